"""The model: one pipeline of diffusers, and two pipelines of the same parts that change pictures.

Everything here blocks, and runs in the one thread that draws. diffusers and torch are imported when the model is loaded,
which takes seconds: the port is open before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from PIL import Image

from runtimes.diffusers.shared.schedulers import SCHEDULERS
from runtimes.diffusers.worker.request import Abilities, Drawing
from runtimes.sdk.errors import WorkerError

FEW_STEPS: Final = 4  # of models distilled for few steps
FLOW_SIDE: Final = 2  # latents in a patch's side of a transformer
PREVIEWED: Final = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "FluxPipeline")
"""Pipelines with latents that `Pipelines._decode_preview` is known to decode."""
MOST_TOKENS: Final = 512  # of a tokenizer that names no limit
SAMPLE_SIDE: Final = 128  # of the trial picture

OnStep = Callable[[int, int, Callable[[], Image.Image]], None]
"""Called after each step with the steps done, the total, and a function that returns a preview. An exception ends the drawing."""


class Pipelines:
    """The pipelines that draw, change and fill in pictures."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Load the model. Raises whatever diffusers raises."""
        import diffusers  # noqa: PLC0415  # seconds: not before the port is open

        diffusers.utils.logging.disable_progress_bar()
        self._text_to_image = _load_pipeline(options)
        self._image_to_image = _variant_pipeline(diffusers.AutoPipelineForImage2Image, self._text_to_image)
        self._inpainting = _variant_pipeline(diffusers.AutoPipelineForInpainting, self._text_to_image)
        for pipe in (self._text_to_image, self._image_to_image, self._inpainting):
            if pipe is not None:
                pipe.set_progress_bar_config(disable=True)
        self.abilities = self._find_abilities(options)

    def _find_abilities(self, options: Mapping[str, Any]) -> Abilities:
        pipe = self._text_to_image
        taken = inspect.signature(pipe.__call__).parameters
        name = type(pipe).__name__
        if "callback_on_step_end" not in taken:
            raise ValueError(f"{name} can't be followed step by step, and so not be stopped; it is not supported")
        transformer = getattr(pipe, "transformer", None)
        is_distilled = transformer is not None and transformer.config.get("guidance_embeds") is False
        scale = int(getattr(pipe, "vae_scale_factor", 8))
        side = _native_side(pipe) * scale
        guidance = None
        if "guidance_scale" in taken and not is_distilled:
            guidance = options["guidance"]
            guidance = taken["guidance_scale"].default if guidance is None else guidance
        steps = options["steps"] or (FEW_STEPS if is_distilled else taken["num_inference_steps"].default)
        return Abilities(
            multiple=scale * (1 if transformer is None else FLOW_SIDE),
            native=(side, side),
            max_pixels=options["max_pixels"],
            steps=steps,
            guidance=guidance,
            takes_negative="negative_prompt" in taken,
            takes_true_cfg="true_cfg_scale" in taken,
            previews=name in PREVIEWED,
        )

    def draw(self, wanted: Drawing, seed: int, on_step: OnStep) -> Image.Image:
        """Draw one picture. Raises WorkerError, and whatever `on_step` raises."""
        import torch  # noqa: PLC0415  # it is loaded

        pipe = self._pipeline_for(wanted)

        def after_step(_pipe: object, step: int, _time: object, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(step + 1, int(pipe.num_timesteps), lambda: self._decode_preview(tensors["latents"], wanted.size))
            return tensors

        keys = self._call_arguments(pipe, wanted)
        generator = torch.Generator("cpu").manual_seed(seed)  # so that each device begins with the same noise
        try:
            with torch.inference_mode():
                made = pipe(**keys, generator=generator, callback_on_step_end=after_step)
        except torch.OutOfMemoryError as error:
            width, height = wanted.size
            raise WorkerError(
                f"The GPU has too little memory for {width}x{height}: ask for a smaller size, or set vae_tiling or offload.",
                code="out_of_memory",
                status=500,
            ) from error
        finally:
            pipe.maybe_free_model_hooks()
        if any(getattr(made, "nsfw_content_detected", None) or ()):
            raise WorkerError("The safety checker refuses this picture.", code="content_policy_violation")
        picture: Image.Image = made.images[0]
        return picture

    def read(self, prompt: str) -> tuple[int, str]:
        """The number of the prompt's tokens that the model reads, and the text of that part."""
        tokenizers = [getattr(self._text_to_image, f"tokenizer{end}", None) for end in ("", "_2", "_3")]
        read = [_read_prompt(tokenizer, prompt) for tokenizer in tokenizers if tokenizer is not None]
        return max(read, key=lambda found: len(found[1]), default=(0, prompt))  # the tokenizer that reads most counts

    def try_out(self) -> None:
        """Draw a small picture. Raises whatever the model raises."""
        side = min(self.abilities.native[0], SAMPLE_SIDE)
        wanted = Drawing(
            task="generation",
            prompt="a cat",
            negative=None,
            size=(side, side),
            steps=2,
            guidance=self.abilities.guidance,
            true_cfg=1.0,
            strength=1.0,
            image=None,
            mask=None,
            seed=0,
            count=1,
            quality="low",
            format="png",
            compression=100,
            stream=False,
            partial=0,
            wants_links=False,
        )
        self.draw(wanted, 0, lambda _step, _steps, _preview: None)

    def _pipeline_for(self, wanted: Drawing) -> Any:
        pipe = self._text_to_image
        if wanted.image is not None:
            pipe = self._image_to_image if wanted.mask is None else self._inpainting
        if pipe is None:
            what = "change pictures" if wanted.mask is None else "fill in masks"
            raise WorkerError(
                f"{type(self._text_to_image).__name__} can't {what}; /v1/images/generations draws new ones.",
                code="endpoint_not_supported",
                param="model" if wanted.mask is None else "mask",
            )
        return pipe

    def _call_arguments(self, pipe: Any, wanted: Drawing) -> dict[str, Any]:
        taken = inspect.signature(pipe.__call__).parameters
        width, height = wanted.size
        keys: dict[str, Any] = {
            "prompt": wanted.prompt,
            "negative_prompt": wanted.negative,
            "width": width,
            "height": height,
            "num_inference_steps": wanted.steps,
            "guidance_scale": wanted.guidance,
            "true_cfg_scale": wanted.true_cfg,
            "image": wanted.image,
            "mask_image": wanted.mask,
            "strength": wanted.strength,
            "max_sequence_length": self._sequence_length(taken),
        }
        return {name: value for name, value in keys.items() if value is not None and name in taken}

    def _sequence_length(self, taken: Mapping[str, inspect.Parameter]) -> int | None:
        """The longest prompt in tokens, where a pipeline has a choice. FLUX.1-schnell reads half as much as dev."""
        if type(self._text_to_image).__name__.startswith("Flux") and self.abilities.guidance is None:
            return 256
        found = taken.get("max_sequence_length")
        return None if found is None else int(found.default)

    def _decode_preview(self, latents: Any, size: tuple[int, int]) -> Image.Image:
        """The picture as it is between two steps, noise and all."""
        import torch  # noqa: PLC0415  # it is loaded

        pipe, vae = self._text_to_image, self._text_to_image.vae
        width, height = size
        with torch.inference_mode():
            if hasattr(pipe, "_unpack_latents"):
                latents = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor)  # noqa: SLF001  # as the pipeline does at its end
            is_upcast = vae.dtype == torch.float16 and vae.config.get("force_upcast")
            if is_upcast:
                vae.to(torch.float32)
            try:
                mean, spread = (_per_channel(vae.config.get(name), latents) for name in ("latents_mean", "latents_std"))
                latents = latents / vae.config.scaling_factor
                latents = latents if mean is None or spread is None else latents * spread + mean
                latents = latents + (vae.config.get("shift_factor") or 0.0)
                decoded = vae.decode(latents.to(vae.device, vae.dtype), return_dict=False)[0]
            finally:
                if is_upcast:
                    vae.to(torch.float16)
            picture: Image.Image = pipe.image_processor.postprocess(decoded, output_type="pil")[0]
        return picture


def _load_pipeline(options: Mapping[str, Any]) -> Any:
    import diffusers  # noqa: PLC0415  # seconds
    import torch  # noqa: PLC0415

    path, device = options["path"], options["device"]
    keys: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "dtype": _load_dtype(options, torch)}
    if options["variant"] is not None:
        keys["variant"] = options["variant"]
    if options["device_map"] is not None:
        keys["device_map"] = options["device_map"]
    index = diffusers.DiffusionPipeline.load_config(path, local_files_only=True)
    if "safety_checker" in index and not options["safety_checker"]:
        keys |= {"safety_checker": None, "requires_safety_checker": False}
    pipe = diffusers.AutoPipelineForText2Image.from_pretrained(path, **keys)
    if options["scheduler"] is not None:
        name, changed = SCHEDULERS[options["scheduler"]]
        pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config, **changed)
    if options["lora"] is not None:
        folder, _, name = options["lora"].rpartition("/")
        pipe.load_lora_weights(folder, weight_name=name, local_files_only=True)
        pipe.fuse_lora(lora_scale=options["lora_scale"])
        pipe.unload_lora_weights()
    if options["attention_slicing"]:
        pipe.enable_attention_slicing()
    if options["vae_tiling"]:
        pipe.vae.enable_tiling()
    if options["offload"] == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif options["offload"] == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    elif options["device_map"] is None:
        pipe.to(device)
    return pipe


def _load_dtype(options: Mapping[str, Any], torch: Any) -> Any:
    """The type to load: the configured one, else the stored type of most values."""
    if options["dtype"] != "auto":
        return getattr(torch, options["dtype"])
    stored = torch.float32 if options["stored_dtype"] is None else getattr(torch, options["stored_dtype"])
    return torch.float32 if stored == torch.float16 and options["device"] == "cpu" else stored


def _variant_pipeline(auto: Any, pipe: Any) -> Any:
    """The pipeline of the same parts for another task; None where diffusers has none."""
    try:
        return auto.from_pipe(pipe)
    except ValueError as error:
        sys.stderr.write(f"not offered: {error}\n")
        return None


def _native_side(pipe: Any) -> int:
    """The side, in latent points, of pictures in the size that the model was trained for."""
    found = getattr(pipe, "default_sample_size", None)
    network = getattr(pipe, "transformer", None) or getattr(pipe, "unet", None)
    if found is None and network is not None:
        found = network.config.get("sample_size")
    return found if isinstance(found, int) else 128


def _per_channel(values: Any, latents: Any) -> Any:
    """The numbers of a VAE's configuration, one for each channel of the latents."""
    return None if values is None else latents.new_tensor(values).view(1, -1, 1, 1)


def _read_prompt(tokenizer: Any, prompt: str) -> tuple[int, str]:
    limit = min(tokenizer.model_max_length, MOST_TOKENS)
    ids = tokenizer(prompt, truncation=True, max_length=limit, verbose=False)["input_ids"]
    if len(tokenizer(prompt, truncation=False, verbose=False)["input_ids"]) <= limit:
        return len(ids), prompt
    return len(ids), str(tokenizer.decode(ids, skip_special_tokens=True))
