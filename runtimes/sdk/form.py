"""Multipart forms with a file, with or without a Content-Length. Large files are spooled to disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, Final

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from runtimes.sdk.body import Body, limited
from runtimes.sdk.errors import WorkerError

MAX_BYTES: Final = 2 << 30
MAX_FIELDS: Final = 64


@dataclass(frozen=True, slots=True)
class Form:
    """A form's text fields, and its file if it has one. The caller closes the file."""

    fields: Body
    file: BinaryIO | None


async def read_form(request: Request, file_field: str, lists: frozenset[str] = frozenset()) -> Form:
    """The form in a request, with at most one file, in `file_field`.

    A field named `x[]`, or in `lists`, is a list of all its values; of any other field the last value counts. Empty fields
    count as missing: browsers send them. Raises WorkerError.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        raise WorkerError(
            f"Send a form (multipart/form-data) with the field {file_field}, not {content_type or 'an untyped body'!r}.",
            code="invalid_form",
        )
    parser = MultiPartParser(
        request.headers, limited(request, MAX_BYTES), max_files=1, max_fields=MAX_FIELDS, max_part_size=1 << 20
    )
    try:
        parsed = await parser.parse()
    except (MultiPartException, KeyError, UnicodeError) as error:  # KeyError: no boundary, or no name
        raise WorkerError(f"The form can't be read: {error}.", code="invalid_form") from error
    values: dict[str, object] = {}
    file: BinaryIO | None = None
    for name, value in parsed.multi_items():
        if isinstance(value, UploadFile):
            if name != file_field:
                raise WorkerError(f"{name}: the file belongs into the field {file_field}.", param=name)
            file = value.file
        elif name == file_field:
            raise WorkerError(f"{name} must be a file: a part with a filename.", param=name)
        elif not value.strip():
            continue
        elif name.endswith("[]") or name in lists:
            items = values.setdefault(name.removesuffix("[]"), [])
            assert isinstance(items, list)
            items.append(value)
        else:
            values[name] = value
    return Form(Body(values, form=True), file)
