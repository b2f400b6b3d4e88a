"""Pictures and texts as vectors in one space: CLIP and SigLIP behind `/v1/embeddings`, with zero-shot scores for labels.

Each input becomes tensors of one shape before it joins a batch, so a batch holds inputs of any requests: texts are padded to
the length that the model was trained with, pictures are scaled to its size. One thread prepares, another one computes.

A picture takes a few KiB as a file, up to megabytes prepared, and hundreds of them as it is decoded. So a request's pictures
are prepared a few at a time, and decoded one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from PIL import Image
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtimes.embeddings.worker import parameters
from runtimes.embeddings.worker.model import MAX_INPUTS, Model, Vector, encode_vector, shorten
from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError
from runtimes.sdk.parameters import check
from runtimes.sdk.pictures import picture, unusable
from runtimes.sdk.server import Endpoint
from runtimes.sdk.worker_pool import Cancel

MAX_LABELS: Final = 1000
PICTURE: Final = "data:image/"  # how a picture's URL begins
TEMPLATE: Final = "This is a photo of {}."
MAX_SCORES: Final = 1 << 18  # of a request, which is some 20 MB of answer
AT_ONCE: Final = 16  # inputs of a request that are prepared together

Kind = Literal["text", "picture"]


@dataclass(frozen=True, slots=True)
class Input:
    """A text, or a picture's data URL."""

    kind: Kind
    content: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """An input in the model's form. `tensors` have no batch dimension; `size` counts its tokens or patches."""

    kind: Kind
    tensors: Mapping[str, Any]
    size: int


class DualEncoder(Model):
    """A model with one encoder for texts and one for pictures."""

    def load(self) -> None:
        from transformers import AutoModel, AutoProcessor  # noqa: PLC0415  # seconds: not before the port is open

        path, options = self.options["path"], self.load_arguments()
        self.model: Any = AutoModel.from_pretrained(path, local_files_only=True, **options["model_kwargs"])
        self.model.to(options["device"]).eval()
        processor: Any = AutoProcessor.from_pretrained(path, local_files_only=True)
        # The processor's parts, since the whole processor of SigLIP 2 ignores the folder's setting for patches.
        self.tokenizer, self.images = processor.tokenizer, processor.image_processor
        self.limit = min(self.model.config.text_config.max_position_embeddings, self.tokenizer.model_max_length)
        self.scale: float = self.model.logit_scale.exp().item()
        bias = getattr(self.model, "logit_bias", None)
        self.bias: float | None = None if bias is None else bias.item()
        (trial,) = self.compute([*self._prepare_texts(["trial"])])
        self.width = int(trial.shape[0])
        self.compute([self._picture_tensors(Image.new("RGB", (64, 64)))])

    def routes(self) -> Mapping[str, Endpoint]:
        return {"POST /v1/embeddings": self.embeddings}

    def compute(self, batch: Sequence[Prepared]) -> Sequence[Vector]:
        import torch  # noqa: PLC0415  # seconds: not before the port is open

        vectors: list[Vector] = [None] * len(batch)
        features = {"text": self.model.get_text_features, "picture": self.model.get_image_features}
        with torch.inference_mode():
            for kind, encode in features.items():
                places = [place for place, item in enumerate(batch) if item.kind == kind]
                if not places:
                    continue
                given = {
                    name: self._on_device(torch.stack([batch[place].tensors[name] for place in places]))
                    for name in batch[places[0]].tensors
                }
                found = encode(**given).pooler_output.float()
                rows = torch.nn.functional.normalize(found, dim=-1).cpu().numpy().astype("<f4")
                for place, row in zip(places, rows, strict=True):
                    vectors[place] = row
        return vectors

    async def embeddings(self, request: Request) -> Response:
        body = await Body.parse(request)
        check(parameters.VISION, body.values)
        width = body.integer("dimensions", None, 1, self.width)
        encoding = body.choice("encoding_format", ("float", "base64"), "float")
        inputs = _read_inputs(body)
        labels = _read_labels(body, inputs)
        template = _read_template(body)
        prompts = [Input("text", template.replace("{}", label)) for label in labels]
        counts = await self.count_texts(inputs, body, "input") + await self.count_texts(
            prompts, body, "candidate_labels"
        )
        label_vectors = await self._compute_vectors(prompts)
        vectors = await self._compute_vectors(inputs)
        scores = (
            await self.counting.run(lambda _cancel: self._label_scores(vectors, label_vectors), again=True)
            if labels
            else []
        )
        self.meters.tokens_in.inc(sum(counts))
        data = []
        for place, vector in enumerate(vectors):
            row = {"object": "embedding", "index": place, "embedding": encode_vector(shorten(vector, width), encoding)}
            if labels:
                row["scores"] = [
                    {"label": label, "score": score} for label, score in zip(labels, scores[place], strict=True)
                ]
            data.append(row)
        usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
        return JSONResponse({"object": "list", "data": data, "model": self.settings.model, "usage": usage})

    async def count_texts(self, inputs: Sequence[Input], body: Body, name: str) -> list[int]:
        """The token counts of the texts. Raises WorkerError for a text that is too long and may not be cut."""
        places = [place for place, item in enumerate(inputs) if item.kind == "text"]
        if not places:
            return []
        counts = dict(zip(places, await self.count([inputs[place].content for place in places]), strict=True))
        fitting = self.check_lengths([counts.get(place, 0) for place in range(len(inputs))], body, name)
        return [fitting[place] for place in places]

    async def _compute_vectors(self, inputs: Sequence[Input]) -> list[Vector]:
        vectors: list[Vector] = []
        for begin in range(0, len(inputs), AT_ONCE):
            part = inputs[begin : begin + AT_ONCE]
            prepared = await self.counting.run(partial(self._prepare, part, begin), again=begin > 0)
            vectors += await self.batches.run([(item, item.size) for item in prepared])
        return vectors

    def _prepare(self, inputs: Sequence[Input], begin: int, cancel: Cancel) -> list[Prepared]:
        """Prepare the next inputs of a request, from index `begin` on."""
        texts = iter(self._prepare_texts([item.content for item in inputs if item.kind == "text"]))
        prepared = []
        for number, item in enumerate(inputs, begin):
            cancel.check()
            prepared.append(
                next(texts) if item.kind == "text" else self._prepare_picture(item.content, f"input[{number}]")
            )
        return prepared

    def _prepare_texts(self, texts: Sequence[str]) -> list[Prepared]:
        """The texts as tensors, padded to the length that the model was trained with. Some tokenizers pad less by themselves."""
        if not texts:
            return []
        rows = self.tokenizer(
            list(texts), padding="max_length", max_length=self.limit, truncation=True, return_tensors="pt"
        )
        return [
            Prepared("text", {name: row[place] for name, row in rows.items()}, self.limit)
            for place in range(len(texts))
        ]

    def _prepare_picture(self, url: object, place: str) -> Prepared:
        image = picture(url, field="input", place=place)
        try:
            return self._picture_tensors(image)
        except ValueError as error:  # unsupported shapes
            raise unusable("input", f"the picture can't be used: {error}", place) from error

    def _picture_tensors(self, image: Image.Image) -> Prepared:
        rows = self.images([image], return_tensors="pt")
        if "pixel_attention_mask" in rows:  # a row for each patch, as SigLIP 2 takes pictures of any shape
            patches = int(rows["pixel_attention_mask"].shape[1])
        else:
            patches = (rows["pixel_values"].shape[-1] // self.model.config.vision_config.patch_size) ** 2
        return Prepared("picture", {name: row[0] for name, row in rows.items()}, patches)

    def _on_device(self, tensor: Any) -> Any:
        device = self.model.device
        return tensor.to(device, self.model.dtype) if tensor.is_floating_point() else tensor.to(device)

    def _label_scores(self, vectors: Sequence[Vector], labels: Sequence[Vector]) -> list[list[float]]:
        """For each vector, the score of each label.

        CLIP's labels exclude each other, so their scores sum to one. SigLIP scores each label by itself.
        """
        logits = np.stack(vectors).astype("f8") @ np.stack(labels).astype("f8").T * self.scale
        if self.bias is not None:
            found = 1 / (1 + np.exp(-(logits + self.bias)))
        else:
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            found = powers / powers.sum(axis=1, keepdims=True)
        scores: list[list[float]] = found.tolist()
        return scores


def _read_inputs(body: Body) -> list[Input]:
    given = body.values.get("input")
    items = given if isinstance(given, list) else [given]
    if not 1 <= len(items) <= MAX_INPUTS:
        raise WorkerError(f"input has {len(items)} items, but must have 1 to {MAX_INPUTS}.", param="input")
    return [_read_input(place, item) for place, item in enumerate(items)]


def _read_input(place: int, item: object) -> Input:
    """Parse the item with this index: a text, a picture's data URL, or an object with either."""
    if isinstance(item, str) and item:
        return Input("picture" if item[: len(PICTURE)].lower() == PICTURE else "text", item)
    if isinstance(item, dict):
        fields = {name: value for name, value in item.items() if name != "type" and value is not None}
        match fields:
            case {"text": str(text)} if text and len(fields) == 1:
                return Input("text", text)
            case {"image": str(url)} if len(fields) == 1:
                return Input("picture", url if url.startswith("data:") else f"data:image/unknown;base64,{url}")
            case {"image_url": {"url": str(url)} | str(url)} if len(fields) == 1:
                return Input("picture", url)
    raise WorkerError(
        f'input[{place}] must be a text, a data URL of a picture, {{"type": "text", "text": …}} or '
        '{"type": "image_url", "image_url": {"url": "data:…"}}, and not empty.',
        param="input",
    )


def _read_labels(body: Body, inputs: Sequence[Input]) -> list[str]:
    labels = body.texts("candidate_labels", MAX_LABELS)
    if body.values.get("candidate_labels") is None:
        return []
    if not labels or not all(label.strip() for label in labels):
        raise body.wrong_value("candidate_labels", "a list of labels, none of them empty")
    for place, item in enumerate(inputs):
        if item.kind == "text":
            raise WorkerError(
                f"input[{place}] is a text, and candidate_labels are compared with pictures. Leave one of them out.",
                param="candidate_labels",
            )
    if len(inputs) * len(labels) > MAX_SCORES:
        raise WorkerError(
            f"{len(inputs)} pictures with {len(labels)} labels are {len(inputs) * len(labels)} scores, and {MAX_SCORES} are the "
            "most in a request. Send fewer pictures at once.",
            param="input",
        )
    return labels


def _read_template(body: Body) -> str:
    template = body.text("hypothesis_template", TEMPLATE)
    if "{}" not in template:
        raise body.wrong_value(
            "hypothesis_template", 'a text with {} in it, where the label goes, such as "a photo of {}"'
        )
    if body.values.get("candidate_labels") is None and "hypothesis_template" in body.values:
        raise WorkerError("hypothesis_template is for candidate_labels, and there are none.", param="candidate_labels")
    return template
