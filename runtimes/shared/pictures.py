"""The header by which a worker marks the pictures in its answer."""

from __future__ import annotations

from typing import Final

HEADER: Final = "x-llmux-pictures"
"""With the value `url`: the answer has pictures as `b64_json`, but the client asked for addresses."""
