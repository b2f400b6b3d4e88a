"""What a worker says of the pictures in its answer."""

from __future__ import annotations

from typing import Final

HEADER: Final = "x-llmux-pictures"
"""A worker's response with this header and the value `url` has pictures as `b64_json`, of which its client wants addresses."""
