"""Names in llama-cpp-python: chat formats, and the types of a KV cache."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

CHAT_FORMATS: Final = MappingProxyType(
    {
        "alpaca": "format_alpaca",
        "baichuan": "format_baichuan",
        "baichuan-2": "format_baichuan2",
        "chatglm3": "format_chatglm3",
        "chatml": "format_chatml",
        "gemma": "format_gemma",
        "intel": "format_intel",
        "llama-2": "format_llama2",
        "llama-3": "format_llama3",
        "mistral-instruct": "format_mistral_instruct",
        "mistrallite": "format_mistrallite",
        "oasst_llama": "format_oasst_llama",
        "open-orca": "format_open_orca",
        "openbuddy": "format_openbuddy",
        "openchat": "format_openchat",
        "phind": "format_phind",
        "pygmalion": "format_pygmalion",
        "qwen": "format_qwen",
        "redpajama-incite": "format_redpajama_incite",
        "saiga": "format_saiga",
        "snoozy": "format_snoozy",
        "vicuna": "format",
        "zephyr": "format_zephyr",
    }
)
"""Chat format → its function in llama_cpp.llama_chat_format."""

CACHE_TYPES: Final = MappingProxyType(
    {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
)
"""Cache type → ggml's number of the type."""
