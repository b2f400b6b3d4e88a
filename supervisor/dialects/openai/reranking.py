"""`return_documents` of a worker that returns none: each result gets its document."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from supervisor.catalog.rewrite import Fields
from supervisor.dialects.openai.whole import Completed
from supervisor.errors import InvalidRequestError

_documents: Final = msgspec.json.Decoder(list[str | dict[str, Any]]).decode


class Reranking:
    """See Translation."""

    path = "/v1/rerank"

    def request(self, fields: Fields) -> tuple[Fields, Completed]:
        """See Translation."""
        try:
            documents = _documents(fields["documents"])
        except (KeyError, msgspec.MsgspecError) as error:
            message = '"documents" must be a list of texts, or of objects with a text.'
            raise InvalidRequestError(message, param="documents") from error

        def complete(answer: dict[str, Any]) -> None:
            for row in answer["results"]:
                document = documents[row["index"]]
                row["document"] = {"text": document} if isinstance(document, str) else document

        kept = {name: raw for name, raw in fields.items() if name != "return_documents"}
        return kept, Completed(complete, "ranking")
