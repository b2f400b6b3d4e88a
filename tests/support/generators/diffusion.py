"""Tiny pipelines for diffusers with random weights: Stable Diffusion 1.5, XL and 3.5, and FLUX. Their pictures are noise.

The same prompt, seed and size always give the same picture, and others give others; that is all that tests need. A letter is
a token, so that a prompt of more than 75 letters is too long for CLIP.

    python diffusion.py OUT '{"kind": "sd"}'        sd, sdxl, sd3, flux, schnell or lora; in an environment that has diffusers
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from peft import LoraConfig, get_peft_model_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

WIDTH = 32
SIZE = 8  # of the latents; pictures are eight times as large


def clip_tokenizer() -> CLIPTokenizer:
    """Every byte is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps({word: place for place, word in enumerate(words)}))
        Path(folder, "merges.txt").write_text("#version: 0.2\n")
        return CLIPTokenizer.from_pretrained(folder, model_max_length=77)


def clip(tokenizer: CLIPTokenizer, *, projects: bool = False) -> CLIPTextModel | CLIPTextModelWithProjection:
    """A text encoder of one layer."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return CLIPTextModelWithProjection(config) if projects else CLIPTextModel(config)


def t5() -> dict[str, object]:
    """The text encoder and tokenizer of flow models, where a letter is a token, too."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((chr(code), -5.0) for code in range(32, 127))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.decoder = decoders.Fuse()
    fast = T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0, model_max_length=512)
    config = T5Config(
        vocab_size=len(pieces), d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=1, num_heads=2, pad_token_id=0
    )
    return {"tokenizer": fast, "text_encoder": T5EncoderModel(config)}


def vae(channels: int = 4, **keys: object) -> AutoencoderKL:
    """Four levels, so that a latent is eight pixels wide."""
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=8 * SIZE,
        **keys,
    )


def unet(**keys: object) -> UNet2DConditionModel:
    """Two levels, of which one looks at the prompt."""
    return UNet2DConditionModel(
        sample_size=SIZE,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=4,
        **keys,
    )


def sd() -> DiffusionPipeline:
    """Stable Diffusion 1.5."""
    tokenizer = clip_tokenizer()
    return StableDiffusionPipeline(
        vae=vae(),
        text_encoder=clip(tokenizer),
        tokenizer=tokenizer,
        unet=unet(cross_attention_dim=WIDTH),
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> DiffusionPipeline:
    """Stable Diffusion XL: two text encoders, and the size of the picture as an input."""
    tokenizer = clip_tokenizer()
    added = {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": WIDTH + 6 * 8,
    }
    return StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=clip(tokenizer),
        text_encoder_2=clip(tokenizer, projects=True),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet(cross_attention_dim=2 * WIDTH, **added),
        scheduler=EulerDiscreteScheduler(),
    )


def sd3() -> DiffusionPipeline:
    """Stable Diffusion 3.5: a transformer that follows a flow."""
    tokenizer, third = clip_tokenizer(), t5()
    transformer = SD3Transformer2DModel(
        sample_size=SIZE,
        patch_size=2,
        in_channels=16,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * WIDTH,
        out_channels=16,
        pos_embed_max_size=32,
    )
    third["text_encoder"] = T5EncoderModel(T5Config(**{**third["text_encoder"].config.to_dict(), "d_model": 2 * WIDTH}))
    return StableDiffusion3Pipeline(
        vae=vae(16, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
        transformer=transformer,
        text_encoder=clip(tokenizer, projects=True),
        text_encoder_2=clip(tokenizer, projects=True),
        text_encoder_3=third["text_encoder"],
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=third["tokenizer"],
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def flux(*, guided: bool = True) -> DiffusionPipeline:
    """FLUX.1: dev takes a guidance, schnell was distilled without."""
    tokenizer, second = clip_tokenizer(), t5()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=guided,
    )
    return FluxPipeline(
        vae=vae(4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
        transformer=transformer,
        text_encoder=clip(tokenizer),
        text_encoder_2=second["text_encoder"],
        tokenizer=tokenizer,
        tokenizer_2=second["tokenizer"],
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=guided),
    )


def lora() -> DiffusionPipeline:
    """Stable Diffusion 1.5 with a LoRA that does something: only this is written."""
    pipe = sd()
    pipe.unet.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    return pipe


KINDS = {"sd": sd, "sdxl": sdxl, "sd3": sd3, "flux": flux, "schnell": lambda: flux(guided=False)}


if __name__ == "__main__":
    torch.manual_seed(0)
    kind = json.loads(sys.argv[2])["kind"]
    if kind == "lora":
        layers = get_peft_model_state_dict(lora().unet)
        StableDiffusionPipeline.save_lora_weights(sys.argv[1], unet_lora_layers=layers)
    else:
        KINDS[kind]().save_pretrained(sys.argv[1])
