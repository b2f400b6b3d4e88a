"""How the worker treats each parameter of an image request: used, ignored or refused."""

from __future__ import annotations

from typing import Final

from runtimes.sdk.parameters import Table, ignored, refused, used

_ALL: Final[Table] = {
    "model": used("Chooses the model; the supervisor has done so."),
    "prompt": used(
        "What to draw, at most 32 000 characters. What the model can't read is cut off; `revised_prompt` says it."
    ),
    "n": used("1 to 10 pictures, made one after the other. The first has the seed, each further one the next number."),
    "size": used(
        "WIDTHxHEIGHT, multiples of 8 or 16 as the model needs, up to `max_pixels`; auto: as the model was made for."
    ),
    "seed": used("0 to 4294967295: the same seed gives the same picture. -1 or none: any; `data[].seed` says which."),
    "steps": used("1 to 200, before `quality` counts. Default: as configured, else the pipeline's."),
    "num_inference_steps": used("Another name of steps."),
    "guidance": used("0 to 50: how closely it follows the prompt. Refused by models that were distilled without."),
    "guidance_scale": used("Another name of guidance."),
    "true_cfg": used("FLUX: 1 to 50; above 1, a second pass with `negative_prompt` in each step."),
    "negative_prompt": used(
        "What not to draw. Refused where it has no effect: with guidance up to 1, by FLUX without `true_cfg`."
    ),
    "quality": used("low: half of the steps. auto, standard, medium: all. high, hd: half as many again. `steps` wins."),
    "output_format": used("png (default), jpeg or webp."),
    "output_compression": used("0 to 100, of jpeg and webp: 100 is the largest file. Default: 95."),
    "response_format": used("b64_json (default), or url: an address that holds for an hour. Not in a stream."),
    "stream": used("true: events with pictures, as OpenAI's."),
    "partial_images": used("0 to 3, of a stream: pictures of what is there, at even steps."),
    "background": refused("these models draw every point opaque; leave it out, or say opaque", "auto", "opaque"),
    "moderation": ignored("Nothing is moderated, but for `safety_checker` of the configuration."),
    "style": ignored("The prompt says it."),
    "user": ignored("It is for the operator of a remote API."),
}

GENERATION: Final[Table] = {
    **_ALL,
    "strength": refused("it is for changing a picture; /v1/images/edits does that"),
}

_CHANGED: Final[Table] = {
    "image": used("The picture to change, PNG, JPEG or WebP: a part with a filename. One; `image[]` is the same."),
    "strength": used("0 to 1: how much is made anew. So many of the steps are made."),
    "size": used("As for generations; auto: the picture's own, made smaller if it is larger than `max_pixels`."),
}

EDIT: Final[Table] = {
    **_ALL,
    **_CHANGED,
    "mask": used(
        "A picture of the same size: what is transparent is drawn anew; where nothing is, what is white. `strength` is "
        "1 then unless given, else 0.8."
    ),
    "input_fidelity": ignored("strength says it."),
}

VARIATION: Final[Table] = {
    **_ALL,
    **_CHANGED,
    "prompt": used("Optional here: what the variation should show. `strength` is 0.6 unless given."),
    "mask": refused("a variation is of the whole picture; /v1/images/edits takes a mask"),
}
