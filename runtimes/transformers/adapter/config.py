"""The configuration keys of a transformers model. Keys for one type of model form groups of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runtimes.adapters.speech_recognition import MAX_AUDIO_S, DefaultLanguage, MaxAudio
from runtimes.adapters.worker_adapter import ModelPath, ParallelConfig
from runtimes.model_config import DividedConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none", "fp8", "mxfp4", "bitsandbytes-8bit", "bitsandbytes-4bit"]


class TransformersConfig(DividedConfig, ParallelConfig):
    """A Hugging Face model folder, run by transformers: a language model, or speech recognition (`type: asr`)."""

    def says_where(self) -> bool:
        """Does a device map divide the model among GPUs? Speech recognition always uses one GPU."""
        return self.type == "asr" or self.device_map != "auto"

    type: Literal["llm", "asr"] = Field(
        default="llm", description="llm: a language model; asr: speech recognition. Decides its default priority, too."
    )
    path: ModelPath = Field(description="The model's folder: config.json, safetensors, tokenizer.")
    dtype: DType = Field(default="auto", description="Type of the weights in memory; auto: as they are in the files.")

    parallel: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Requests worked on at once. Default: 4, or fewer for a longer default `n_ctx`; for speech recognition 1.",
    )

    # speech recognition
    default_language: DefaultLanguage = None
    max_audio_s: MaxAudio = MAX_AUDIO_S

    # language models
    n_ctx: int | None = Field(
        default=None,
        ge=16,
        description="Context of a request in tokens, prompt and answer. Default: up to 32768, as the device has room; more where half of a GPU stays free.",
    )
    quantization: Quantization = Field(
        default="auto",
        description="auto: as the files are; none: plain weights, computed from quantised files; others quantise while loading.",
    )
    device_map: Literal["auto", "cpu"] | dict[str, Annotated[int, Field(ge=0)] | Literal["cpu"]] = Field(
        default="auto",
        description="Where the layers go: auto, on the worker's GPUs, as much on each; cpu; or module by module: the number of one of its GPUs, or cpu.",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        default="auto", description="Implementation of attention."
    )
    prefill_tokens: Annotated[int, Field(ge=16)] = Field(
        default=512, description="Tokens of a prompt read in one step; between them the other requests go on."
    )
    chat_template_file: ModelPath | None = Field(
        default=None, description="File with a chat template. Default: the model's own."
    )
    tool_format: Literal["auto", "qwen", "harmony", "none"] = Field(
        default="auto",
        description="How the model writes tool calls and thoughts; auto: as its chat template shows, else as its response template says.",
    )
    image_pixels: int | None = Field(
        default=None, ge=1024, description="Pixels above which a picture is made smaller. Default: as the model says."
    )
