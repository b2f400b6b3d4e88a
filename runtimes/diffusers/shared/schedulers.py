"""The schedulers that a configuration may name: how each step of a picture is made."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

Scheduler = Literal["ddim", "dpmpp_2m", "dpmpp_2m_karras", "euler", "euler_a", "heun", "lcm", "unipc"]

SCHEDULERS: Final[Mapping[Scheduler, tuple[str, Mapping[str, bool]]]] = MappingProxyType(
    {
        "ddim": ("DDIMScheduler", {}),
        "dpmpp_2m": ("DPMSolverMultistepScheduler", {}),
        "dpmpp_2m_karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
        "euler": ("EulerDiscreteScheduler", {}),
        "euler_a": ("EulerAncestralDiscreteScheduler", {}),
        "heun": ("HeunDiscreteScheduler", {}),
        "lcm": ("LCMScheduler", {}),
        "unipc": ("UniPCMultistepScheduler", {}),
    }
)
"""Scheduler → its class in diffusers, and the settings that differ from the folder's."""
