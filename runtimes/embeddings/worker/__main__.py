"""The embedding worker: sentence-transformers behind `/v1/embeddings`, or a cross-encoder behind `/v1/rerank`.

Models that see as well, such as CLIP, are in `vision`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtimes.embeddings.worker import parameters
from runtimes.embeddings.worker.model import MAX_INPUTS, Model, Vector, encode_vector, shorten
from runtimes.embeddings.worker.vision import DualEncoder
from runtimes.sdk.body import Body
from runtimes.sdk.errors import WorkerError, unsupported
from runtimes.sdk.parameters import check
from runtimes.sdk.server import Endpoint, Settings, Worker, serve


class Embedder(Model):
    """The worker that turns texts into vectors."""

    def load(self) -> None:
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415  # seconds: not before the port is open

        self.model: Any = SentenceTransformer(self.options["path"], **self.load_arguments())
        self.tokenizer, self.limit = copy.deepcopy(self.model.tokenizer), self.model.max_seq_length
        self.width = int(self.compute(["trial"])[0].shape[0])

    def compute(self, batch: Sequence[str]) -> Sequence[Vector]:
        vectors: Sequence[Vector] = self.model.encode(
            list(batch), batch_size=len(batch), show_progress_bar=False, prompt="", convert_to_numpy=True
        ).astype("<f4")
        return vectors

    def routes(self) -> Mapping[str, Endpoint]:
        return {"POST /v1/embeddings": self.embeddings}

    async def embeddings(self, request: Request) -> Response:
        body = await Body.parse(request)
        check(parameters.EMBEDDINGS, body.values)
        width = body.integer("dimensions", None, 1, self.width)
        encoding = body.choice("encoding_format", ("float", "base64"), "float")
        texts = await self.counting.run(lambda _cancel: self._read_texts(body))
        prompt = self._prompt_prefix(body)
        texts = [prompt + text for text in texts]
        counts = await self.count(texts)
        sizes = self.check_lengths(counts, body, "input")
        vectors = await self.batches.run(list(zip(texts, sizes, strict=True)))
        self.meters.tokens_in.inc(sum(sizes))
        data = [
            {"object": "embedding", "index": place, "embedding": encode_vector(shorten(vector, width), encoding)}
            for place, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": sum(sizes), "total_tokens": sum(sizes)}
        return JSONResponse({"object": "list", "data": data, "model": self.settings.model, "usage": usage})

    def _prompt_prefix(self, body: Body) -> str:
        name = body.text("prompt_name", self.model.default_prompt_name)
        if name is None:
            return ""
        if name not in self.model.prompts:
            raise body.wrong_value(
                "prompt_name", f"one of {', '.join(self.model.prompts) or 'none: the model has no prompts'}"
            )
        return str(self.model.prompts[name])

    def _read_texts(self, body: Body) -> list[str]:
        given = body.values.get("input")
        items: list[Any] = given if isinstance(given, list) else [given]
        if items and all(_is_id(item) for item in items):
            items = [items]
        if not 1 <= len(items) <= MAX_INPUTS:
            raise WorkerError(f"input has {len(items)} items, but must have 1 to {MAX_INPUTS}.", param="input")
        return [self._read_text(place, item) for place, item in enumerate(items)]

    def _read_text(self, place: int, item: object) -> str:
        if isinstance(item, str) and item:
            return item
        if isinstance(item, list) and item and all(_is_id(token) for token in item):
            if max(item) < len(self.tokenizer):
                return str(self.tokenizer.decode(item, skip_special_tokens=True))
            raise WorkerError(
                f"input[{place}] has the token {max(item)}, but this model knows {len(self.tokenizer)}. Send text: a "
                "client that splits it with another model's tokenizer (LangChain: check_embedding_ctx_length=False stops "
                "it) sends numbers that mean something else here.",
                param="input",
            )
        raise WorkerError(f"input[{place}] must be a text or a list of token ids, and not empty.", param="input")


class Reranker(Model):
    """The worker that scores pairs of a query and a document."""

    def load(self) -> None:
        from sentence_transformers import CrossEncoder  # noqa: PLC0415  # seconds: not before the port is open

        self.model: Any = CrossEncoder(self.options["path"], **self.load_arguments())
        self.tokenizer = copy.deepcopy(self.model.tokenizer)
        self.limit = self.model.max_length or self.tokenizer.model_max_length
        if self.model.num_labels != 1:
            raise ValueError(f"it tells {self.model.num_labels} classes apart; a reranker gives one score")
        self.compute([("trial", "trial")])

    def compute(self, batch: Sequence[tuple[str, str]]) -> Sequence[float]:
        scores = self.model.predict(list(batch), batch_size=len(batch), show_progress_bar=False)
        return [float(score) for score in scores]

    def routes(self) -> Mapping[str, Endpoint]:
        return {"POST /v1/rerank": self.rerank}

    async def truncate_texts(self, texts: Sequence[str], most: int) -> list[str]:
        """The beginning of each text, at most `most` tokens."""
        if not self.tokenizer.is_fast:
            raise unsupported("max_tokens_per_doc", "this model's tokenizer doesn't tell where its tokens are")

        def cut() -> list[str]:
            encoded = self.tokenizer(
                list(texts), add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
            )
            places = encoded["offset_mapping"]
            return [
                text if len(place) <= most else text[: place[most - 1][1]]
                for text, place in zip(texts, places, strict=True)
            ]

        return await self.counting.run(lambda _cancel: cut())

    async def rerank(self, request: Request) -> Response:
        body = await Body.parse(request)
        check(parameters.RERANK, body.values)
        query = body.required_text("query")
        documents = _read_documents(body)
        best = body.integer("top_n", len(documents), 1)
        most = body.integer("max_tokens_per_doc", None, 1)
        compared = documents if most is None else await self.truncate_texts(documents, most)
        counts = await self.count([query] * len(documents), compared)
        sizes = self.check_lengths(counts, body, "documents")
        pairs = [((query, document), size) for document, size in zip(compared, sizes, strict=True)]
        scores = await self.batches.run(pairs)
        self.meters.tokens_in.inc(sum(sizes))
        order = sorted(range(len(documents)), key=lambda place: (-scores[place], place))[:best]
        results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in order]
        if body.flag("return_documents"):
            results = [{**result, "document": {"text": documents[result["index"]]}} for result in results]
        usage = {"prompt_tokens": sum(sizes), "total_tokens": sum(sizes)}
        return JSONResponse({"object": "list", "model": self.settings.model, "results": results, "usage": usage})


def _read_documents(body: Body) -> list[str]:
    given = body.values.get("documents")
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_INPUTS:
        raise body.wrong_value("documents", f"a list of 1 to {MAX_INPUTS} texts")
    texts: list[str] = []
    for place, item in enumerate(given):
        text = item.get("text") if isinstance(item, dict) else item
        if isinstance(item, dict) and item.keys() - {"text"}:
            raise unsupported("documents", f"[{place}] has further fields; only text can be compared")
        if not isinstance(text, str):
            raise WorkerError(f"documents[{place}] must be a text, or an object with a text.", param="documents")
        texts.append(text)
    return texts


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def make(settings: Settings) -> Worker:
    """The worker for the model's task."""
    kinds: dict[str, type[Model]] = {"embed": Embedder, "rerank": Reranker, "vision": DualEncoder}
    return kinds[settings.options["task"]](settings)


if __name__ == "__main__":
    serve(make)
