"""How the worker treats each parameter of an image request: used, ignored or refused."""

from __future__ import annotations

from typing import Final

from runtimes.sdk.parameters import Table, ignored, refused, used

PARAMETERS: Final[Table] = {
    "model": used("Chooses the model; the supervisor has done so."),
    "prompt": used("What to draw."),
    "negative_prompt": used("What not to draw."),
    "n": used("1 to 10 pictures: at once where the workflow has a place for it, else one after the other."),
    "size": used("WIDTHxHEIGHT, up to `max_pixels`; auto: as in the workflow."),
    "seed": used("The same seed gives the same picture. -1 or none: any; `data[].seed` says which."),
    "steps": used("Default: as in the workflow."),
    "num_inference_steps": used("Another name of steps."),
    "guidance": used("How closely it follows the prompt. Default: as in the workflow."),
    "guidance_scale": used("Another name of guidance."),
    "strength": used("0 to 1: how much of a picture is made anew. Default: as in the workflow."),
    "checkpoint": used("The name of a checkpoint that ComfyUI has. Default: as in the workflow."),
    "image": used("/v1/images/edits: the picture to change, a part with a filename."),
    "mask": used("/v1/images/edits, where the workflow has a place for it."),
    "output_format": used("png (default), jpeg or webp."),
    "output_compression": used("0 to 100, of jpeg and webp: 100 is the largest file. Default: 95."),
    "response_format": used("b64_json (default), or url: an address that holds for an hour. Not in a stream."),
    "stream": used("true: an event for each picture, once it is made."),
    "partial_images": used(
        "0 to 3, of a stream: what there is at even steps, as far as the workflow's sampler shows it."
    ),
    "background": refused("a workflow draws what it draws; leave it out, or say opaque", "auto", "opaque"),
    "quality": ignored("The workflow says it."),
    "style": ignored("The prompt says it."),
    "moderation": ignored("Nothing is moderated."),
    "user": ignored("It is for the operator of a remote API."),
}

GENERATION: Final[Table] = {
    **PARAMETERS,
    **dict.fromkeys(
        ("image", "mask"),
        refused("it is for changing a picture; /v1/images/edits does that, where the workflow takes one"),
    ),
}
