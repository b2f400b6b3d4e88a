"""Generates with the worker's own decoder, many sequences at once, and with transformers' `generate`, one by one.

Run by the Python of the transformers runtime, as `decoding.py RUNTIMES_PACKAGE`. A question is a line of JSON on stdin,
`[MODEL_FOLDER, WHAT]`, and so is its answer on stdout. WHAT is `texts` or `pictures`: both ways' tokens; `leave`: what
comes until somebody has left; `fail`: what one of two hears that fails, and the other.
"""

from __future__ import annotations

import json
import os
import random
import sys
import types

package = types.ModuleType("runtimes")
package.__path__ = [sys.argv[1]]
sys.modules["runtimes"] = package

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from runtimes.sdk.worker_pool import Cancel  # noqa: E402
from runtimes.transformers.worker.chat.decoder import Decoder, Job  # noqa: E402
from runtimes.transformers.worker.chat.model import Loaded, Options, load  # noqa: E402
from runtimes.transformers.worker.chat.prompt import _with_pictures, prepared  # noqa: E402
from runtimes.transformers.worker.chat.sampling import Sampling  # noqa: E402

LENGTHS = (3, 40, 1, 17, 33, 64, 25, 16)
NEW = (12, 30, 40, 5, 20, 8, 25, 30)


class HandingOver(Cancel):
    """Of a client that has left when it is looked for once more than `looks` times."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    @property
    def is_set(self) -> bool:
        self._looks -= 1
        return self._looks < 0


def leave(decoder: Decoder) -> list[int]:
    """Tokens of a job whose client leaves after five steps: while it is continued, and while its prompt is being read."""
    made = []
    for length in (10, 2000):
        job = Job([65] * length, 1000, Sampling(temperature=0), HandingOver(5), frozenset())
        decoder.submit(job)
        made.append(sum(not isinstance(item, str) for item in job.out))
    return made


def fail(decoder: Decoder) -> list[object]:
    """How a job ends that no token can be chosen for, and another one's tokens, generated at the same time."""
    good, bad = (Job([65] * 20, 8, Sampling(temperature=heat), Cancel(), frozenset()) for heat in (0, 1e-300))
    for job in (good, bad):
        decoder.submit(job)
    made = sum(not isinstance(item, str) for item in good.out)
    try:
        return [made, [*bad.out]]
    except RuntimeError as error:
        return [made, str(error)]


def same(loaded: Loaded, *, pictures: bool) -> dict[str, list[list[int]]]:
    """The tokens of sequences that were generated together, and of the same ones alone."""
    draw = random.Random(1)
    jobs = []
    for length, most in zip(LENGTHS, NEW, strict=True):
        tokens, extra = [draw.randrange(32, 256) for _ in range(length)], None
        if pictures and length > 20:
            place = loaded.model.config.image_token_id
            features, counts = prepared(loaded.image_processor, [Image.new("RGB", (32 * length, 96), (length, 200, 0))])
            tokens, _, extra = _with_pictures(loaded, [*tokens, place, 65, 66], features, counts, thinking=False)
        jobs.append(Job(tokens, most, Sampling(temperature=0), Cancel(), frozenset(), extra))
    decoder = Decoder(loaded.model, width=3, chunk=16)
    for job in jobs:
        decoder.submit(job)
    together = [[item.id for item in job.out if not isinstance(item, str)] for job in jobs]
    alone = []
    for job in jobs:
        ids = torch.tensor([job.tokens])
        made = loaded.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=job.max_tokens,
            eos_token_id=-1,
            **(job.pictures or {}),
        )
        alone.append(made[0, len(job.tokens) :].tolist())
    return {"together": together, "alone": alone}


def answered(folder: str, what: str) -> object:
    loaded = load(Options("tiny", folder, "cpu", "float32", "auto", "auto", None, "auto", 4096, 16, "auto", None, None))
    match what:
        case "leave":
            return leave(Decoder(loaded.model, width=3, chunk=16))
        case "fail":
            return fail(Decoder(loaded.model, width=3, chunk=16))
        case _:
            return same(loaded, pictures=what == "pictures")


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answered(*json.loads(line))), flush=True)
    os._exit(0)  # the decoders' threads don't survive the interpreter's own end


if __name__ == "__main__":
    main()
