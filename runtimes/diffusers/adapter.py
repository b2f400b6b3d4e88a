"""Pictures with diffusers: a pipeline's folder becomes OpenAI's images API.

`model_index.json` names the parts of a pipeline, each a class of diffusers or transformers with a folder of its own. Only that
file, the parts' config.json and the headers of their weights are read here. Memory is the weights of all parts, the decoder's
layers at the size of the largest picture, one step of the denoising network, and the program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, JsonValue

from runtimes.adapters import checkpoints
from runtimes.adapters.worker_adapter import ModelPath, WorkerAdapter, WorkerConfig
from runtimes.base import Capabilities, Contradiction, Endpoint, LaunchContext, LaunchSpec, ModelUnusableError
from runtimes.diffusers.shared.schedulers import Scheduler
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import ModelType

PROGRAM_MIB: Final = 480  # Python, torch, transformers and diffusers without a model
INDEX: Final = "model_index.json"
LIBRARIES: Final = frozenset({"diffusers", "transformers", "stable_diffusion"})
SAFETY: Final = ("safety_checker", "feature_extractor")
LEAST_PIXELS: Final = 1024 * 1024  # of `max_pixels` unless configured
TILE_PIXELS: Final = 512 * 512  # pixels that the decoder computes at once with `vae_tiling`
FLOW: Final = "FlowMatch"

Stored = Literal["float32", "float16", "bfloat16"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
PLAIN: Final[Mapping[str, Stored]] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Offload = Literal["none", "model", "sequential"]


class DiffusersConfig(WorkerConfig):
    """A model that draws."""

    type: ModelType = Field(default="image", description="What the model is for; decides its default priority.")
    path: ModelPath = Field(
        description="The pipeline's folder, with model_index.json.", examples=["/models/stable-diffusion-3.5-medium"]
    )
    variant: str | None = Field(
        default=None,
        pattern=r"^\w[\w-]{0,30}$",
        description="Which of several sets of weights in the folder: fp16 means *.fp16.safetensors.",
        examples=["fp16"],
    )
    dtype: Dtype = Field(
        default="auto",
        description="Type of the weights once loaded. auto: as they were saved; on the processor, float16 becomes float32.",
    )
    scheduler: Scheduler | None = Field(
        default=None,
        description="How the steps are made. Default: as the folder says. Models that follow a flow (SD 3.5, FLUX) have only theirs.",
    )
    lora: ModelPath | None = Field(
        default=None, description="A LoRA (.safetensors) for the weights.", examples=["/models/loras/ink.safetensors"]
    )
    lora_scale: float = Field(default=1.0, ge=-10, le=10, description="How strongly it counts.")
    steps: int | None = Field(
        default=None,
        ge=1,
        le=200,
        description="Steps of a picture, at medium quality. Default: the pipeline's; of FLUX.1-schnell 4.",
    )
    guidance: float | None = Field(
        default=None, ge=0, le=50, description="How closely pictures follow the prompt. Default: the pipeline's."
    )
    max_pixels: int | None = Field(
        default=None,
        ge=4096,
        le=1 << 26,
        description="Width times height of the largest picture. Default: 1.5 times the size that the model was made for, and "
        "at least 1024 times 1024.",
        examples=[1572864],
    )
    vae_tiling: bool = Field(
        default=False, description="Decode large pictures in tiles: less memory, and edges that may be seen."
    )
    attention_slicing: bool = Field(
        default=False, description="Compute attention part by part: less memory on old GPUs, slower."
    )
    offload: Offload = Field(
        default="none",
        description="model: only the part at work is on the GPU, the others wait in main memory. sequential: so with each "
        "layer, very slowly.",
    )
    safety_checker: bool = Field(
        default=False,
        description="Refuse pictures that the folder's safety checker objects to. Needs one in the folder.",
    )


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The content of a folder's index. `parts`: name of a part's folder → its library and class."""

    path: Path
    name: str  # of its class
    parts: Mapping[str, tuple[str, str]]

    @property
    def denoiser(self) -> Mapping[str, JsonValue]:
        """The configuration of the denoising network, which runs in each step."""
        return self.described("transformer") or self.described("unet")

    @property
    def follows_flow(self) -> bool:
        """Does the scheduler match a flow, as with SD 3.5 and FLUX?"""
        return FLOW in self.parts.get("scheduler", ("", ""))[1]

    def described(self, part: str) -> Mapping[str, JsonValue]:
        """The part's config.json; empty without one."""
        return checkpoints.json_object(self.path / part / "config.json") if part in self.parts else {}

    def native_pixels(self) -> int:
        """Pixels of a picture in the size that the model was trained for. FLUX's files don't contain it."""
        latents = self.denoiser.get("sample_size")
        side = latents if isinstance(latents, int) else 128
        return (side * self.scale) ** 2

    @property
    def scale(self) -> int:
        """The side in pixels of one latent point."""
        return 1 << (len(_integers(self.described("vae"), "block_out_channels", 4)) - 1)


class DiffusersAdapter(WorkerAdapter[DiffusersConfig]):
    """Hugging Face's diffusers."""

    name = "diffusers"
    summary = "Pictures: Stable Diffusion 1.5 to 3.5, SDXL, FLUX and others, on diffusers."
    all_endpoints = frozenset(map(Endpoint, ("/v1/images/generations", "/v1/images/edits", "/v1/images/variations")))
    spreads = True
    offload_key = "offload"
    overridable_keys = (
        "dtype",
        "threads",
        "steps",
        "guidance",
        "max_pixels",
        "vae_tiling",
        "attention_slicing",
        "offload",
    )
    program = "runtimes.diffusers.worker"
    requirements = Path(__file__).parent / "requirements.lock"
    config = DiffusersConfig

    def problems(self, config: DiffusersConfig) -> Iterator[str]:
        """Problems: no pipeline, or a pipeline that needs its own code or lacks weights."""
        return _problems(config)

    def launch(self, config: DiffusersConfig, context: LaunchContext) -> LaunchSpec:
        """How to start the worker. Raises RuntimeNotInstalledError or ModelUnusableError."""
        return replace(super().launch(config, context), progress="/progress")

    def options(self, config: DiffusersConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError where `check` finds a problem, or the device lacks support."""
        kind, pipeline = context.device.kind, _read_pipeline(config.path)
        if config.offload != "none" and not kind.accelerates:
            raise ModelUnusableError(f"offload: {config.offload} moves parts off a GPU, and this worker has none")
        return {
            "path": str(config.path),
            "device": kind.accelerator,
            "device_map": "balanced" if len(context.devices) > 1 else None,
            "dtype": config.dtype,
            "stored_dtype": _stored_dtype(config, pipeline),
            "variant": config.variant,
            "scheduler": config.scheduler,
            "lora": None if config.lora is None else str(config.lora),
            "lora_scale": config.lora_scale,
            "steps": config.steps,
            "guidance": config.guidance,
            "max_pixels": _max_pixels(config, pipeline),
            "vae_tiling": config.vae_tiling,
            "attention_slicing": config.attention_slicing,
            "offload": config.offload,
            "safety_checker": config.safety_checker,
        }

    def weights(self, config: DiffusersConfig) -> tuple[Path, ...]:
        """The weight files of all parts that the worker loads."""
        try:
            pipeline = _read_pipeline(config.path)
        except ModelUnusableError:
            return ()
        return tuple(file for part in _loaded_parts(config, pipeline) for file in _weight_files(config, pipeline, part))

    def estimate(self, config: DiffusersConfig) -> Estimate | None:
        """From the files' headers and the configurations of decoder and network; None: these don't suffice."""
        try:
            pipeline = _read_pipeline(config.path)
            parts = {part: _weight_bytes(config, pipeline, part) for part in _loaded_parts(config, pipeline)}
        except ModelUnusableError:
            return None
        pixels = _max_pixels(config, pipeline)
        resident = sum(parts.values())
        if config.offload != "none":
            resident = max(parts.values(), default=0)
        per_gpu = _activation_bytes(config, pipeline, pixels) + PROGRAM_MIB * MIB
        sizes = {
            "weights": resident,
            "activations": _activation_bytes(config, pipeline, pixels) * config.equal_gpus,
            "program": PROGRAM_MIB * MIB * config.equal_gpus,
        }
        return Estimate.of(sizes, f"{pipeline.name}, pictures of {pixels} pixels", each=per_gpu)

    def capabilities(self, config: DiffusersConfig) -> Capabilities:
        """The model takes text, and pictures to change."""
        try:
            architecture = _read_pipeline(config.path).name
        except ModelUnusableError:
            architecture = None
        return Capabilities(("text", "image"), tools=False, thinking=False, multi_turn=False, architecture=architecture)


def _read_pipeline(path: Path) -> Pipeline:
    """Read the pipeline in this folder. Raises ModelUnusableError."""
    if path.is_file():
        raise ModelUnusableError(
            f"{path} is a single file; give the pipeline's folder, which DiffusionPipeline.save_pretrained writes"
        )
    if not path.is_dir():
        raise ModelUnusableError(f"{path}: there is no such folder")
    index = checkpoints.json_object(path / INDEX)
    name = index.get("_class_name")
    if not index:
        raise ModelUnusableError(f"{path / INDEX} can't be read; is it the folder of a diffusers pipeline?")
    if not isinstance(name, str) or not name.endswith("Pipeline"):
        raise ModelUnusableError(
            f"{path / INDEX} names no pipeline of diffusers, and code of a model's own is never run"
        )
    parts: dict[str, tuple[str, str]] = {}
    for part, value in index.items():
        match value:
            case [str(library), str(kind)] if not part.startswith("_"):
                if library not in LIBRARIES or not part.isidentifier():
                    raise ModelUnusableError(
                        f"{path / INDEX}: {part} comes from {library!r}, and code of a model's own is never run"
                    )
                parts[part] = (library, kind)
    return Pipeline(path, name, parts)


def _loaded_parts(config: DiffusersConfig, pipeline: Pipeline) -> list[str]:
    """The parts with weights."""
    skipped = () if config.safety_checker else SAFETY
    return [part for part in pipeline.parts if part not in skipped and (pipeline.path / part / "config.json").is_file()]


def _weight_files(config: DiffusersConfig, pipeline: Pipeline, part: str) -> list[Path]:
    """The part's weight files: those of the configured variant, else those without a variant."""
    found = sorted((pipeline.path / part).glob("*.safetensors"))
    plain = [file for file in found if re.fullmatch(r"[^.]+\.safetensors", file.name)]
    if config.variant is None:
        return plain
    of_variant = re.compile(rf"[^.]+\.{re.escape(config.variant)}(-\d+-of-\d+)?\.safetensors")
    return [file for file in found if of_variant.fullmatch(file.name)] or plain


def _weight_bytes(config: DiffusersConfig, pipeline: Pipeline, part: str) -> int:
    """The part's weights in bytes, once loaded. Raises ModelUnusableError."""
    by_type: dict[str, int] = {}
    for file in _weight_files(config, pipeline, part):
        for kind, size in checkpoints.tensor_sizes(file):
            by_type[kind] = by_type.get(kind, 0) + size
    return checkpoints.Weights(0, by_type).bytes_as(None if config.dtype == "auto" else config.dtype) if by_type else 0


def _stored_dtype(config: DiffusersConfig, pipeline: Pipeline) -> Stored | None:
    """The stored type of most values in the denoising network; None: no plain type, so the type of the computation counts."""
    sizes: dict[str, int] = {}
    for part in ("transformer", "unet"):
        for file in _weight_files(config, pipeline, part) if part in pipeline.parts else ():
            for kind, size in checkpoints.tensor_sizes(file):
                sizes[kind] = sizes.get(kind, 0) + size
    return PLAIN.get(max(sizes, key=sizes.__getitem__, default=""))


def _value_bytes(config: DiffusersConfig, pipeline: Pipeline) -> int:
    """Bytes of a value during the computation."""
    dtype = _stored_dtype(config, pipeline) if config.dtype == "auto" else config.dtype
    return checkpoints.VALUE_BYTES[dtype or "float32"]


def _activation_bytes(config: DiffusersConfig, pipeline: Pipeline, pixels: int) -> int:
    """The larger of two: the decoder's last levels, and one step.

    A decoder of the usual size was measured: 960 to 990 values for each point, of widths 128 and 256.
    """
    width = _value_bytes(config, pipeline)
    vae = pipeline.described("vae")
    channels = _integers(vae, "block_out_channels", 4)
    decoder_width = 4 if vae.get("force_upcast") else width
    decoded = min(pixels, TILE_PIXELS) if config.vae_tiling else pixels
    decoder = decoded * decoder_width * 5 * sum(channels[:2]) // 2
    latents = pixels // pipeline.scale**2
    network = pipeline.denoiser
    if "transformer" in pipeline.parts:
        heads, size = network.get("num_attention_heads"), network.get("attention_head_dim")
        inner = heads * size if isinstance(heads, int) and isinstance(size, int) else 3072
        return max(decoder, latents // 4 * inner * width * 24)
    return max(decoder, 2 * latents * _integers(network, "block_out_channels", 4)[0] * width * 24)


def _max_pixels(config: DiffusersConfig, pipeline: Pipeline) -> int:
    return config.max_pixels or max(LEAST_PIXELS, pipeline.native_pixels() * 3 // 2)


def _integers(values: Mapping[str, JsonValue], name: str, count: int) -> list[int]:
    """A list of integers in a configuration; if missing, the list of Stable Diffusion."""
    found = values.get(name)
    numbers = [value for value in found if isinstance(value, int)] if isinstance(found, list) else []
    return numbers or [128, 256, 512, 512][:count]


def _problems(config: DiffusersConfig) -> Iterator[str]:
    try:
        pipeline = _read_pipeline(config.path)
        for part in _loaded_parts(config, pipeline):
            if not _weight_files(config, pipeline, part):
                yield f"path: {config.path / part} has no weights (*.safetensors); other formats may hold code, and are never read"
            for file in _weight_files(config, pipeline, part):
                checkpoints.tensor_sizes(file)
    except ModelUnusableError as error:
        yield f"path: {error}"
        return
    if config.variant is not None and not any(config.path.glob(f"*/*.{config.variant}*.safetensors")):
        yield f"variant: there are no weights of {config.variant!r} (*.{config.variant}.safetensors) in {config.path}"
    if config.scheduler is not None and pipeline.follows_flow:
        yield f"scheduler: {pipeline.name} follows a flow and has only its own scheduler; remove the key"
    if config.safety_checker and "safety_checker" not in pipeline.parts:
        yield f"safety_checker: there is none in {config.path}; remove the key"
    if config.lora is not None and not (config.lora.is_file() and config.lora.suffix == ".safetensors"):
        yield f"lora: {config.lora}: there is no such .safetensors file"
    if config.offload != "none" and config.equal_gpus > 1:
        yield Contradiction(
            f"offload: {config.offload} is for one GPU, and gpus is {config.gpus}; remove one of the two"
        )
