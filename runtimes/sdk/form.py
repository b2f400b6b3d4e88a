"""Multipart forms with files, with or without a Content-Length. Large files are spooled to disk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from runtimes.sdk.body import Body, read_limited
from runtimes.sdk.errors import WorkerError

MAX_BYTES: Final = 2 << 30
MAX_FIELDS: Final = 64
_INDEX: Final = re.compile(r"\[\d*\]\Z")  # PHP's clients number the values of a list


@dataclass(frozen=True, slots=True)
class Form:
    """A form's text fields, and its file if it has one. The caller closes the file."""

    fields: Body
    file: BinaryIO | None


@dataclass(frozen=True, slots=True)
class FilesForm:
    """A form's text fields, and its files by field, in order. The caller closes it."""

    fields: Body
    files: Mapping[str, Sequence[BinaryIO]]

    def close(self) -> None:
        """Close the files."""
        for files in self.files.values():
            for file in files:
                file.close()


async def read_form(request: Request, file_field: str, lists: frozenset[str] = frozenset()) -> Form:
    """The form in a request, with at most one file, in `file_field`; otherwise as `read_files`."""
    form = await read_files(request, {file_field: 1}, lists)
    files = form.files.get(file_field)
    return Form(form.fields, files[0] if files else None)


async def read_files(
    request: Request, file_fields: Mapping[str, int], lists: frozenset[str] = frozenset()
) -> FilesForm:
    """The form in a request, with files in these fields, at most so many in each: `x[]` and `x[0]` are the same as `x`.

    A text field named so, or in `lists`, is a list of all its values; of any other field the last value counts. Empty
    fields count as missing: browsers send them. Raises WorkerError.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        raise WorkerError(
            f"Send a form (multipart/form-data) with the field {next(iter(file_fields))}, not "
            f"{content_type or 'an untyped body'!r}.",
            code="invalid_form",
        )
    parser = MultiPartParser(
        request.headers,
        read_limited(request, MAX_BYTES),
        max_files=sum(file_fields.values()),
        max_fields=MAX_FIELDS,
        max_part_size=1 << 20,
    )
    try:
        parsed = await parser.parse()
    except (MultiPartException, KeyError, UnicodeError) as error:  # KeyError: no boundary, or no name
        raise WorkerError(f"The form can't be read: {error}.", code="invalid_form") from error
    try:
        return _sort_fields(parsed, file_fields, lists)
    except WorkerError:
        await parsed.close()
        raise


def _sort_fields(parsed: FormData, file_fields: Mapping[str, int], lists: frozenset[str]) -> FilesForm:
    """The form's texts and files by field. Raises WorkerError for a file or text in the wrong field."""
    values: dict[str, object] = {}
    files: dict[str, list[BinaryIO]] = {}
    for name, value in parsed.multi_items():
        bare = _INDEX.sub("", name)
        if isinstance(value, UploadFile):
            if bare not in file_fields:
                where = "the field" if len(file_fields) == 1 else "one of the fields"
                raise WorkerError(f"{name}: the file belongs into {where} {', '.join(file_fields)}.", param=name)
            files.setdefault(bare, []).append(value.file)
            if len(files[bare]) > file_fields[bare]:
                raise WorkerError(f"{bare}: at most {file_fields[bare]} files.", param=bare)
        elif bare in file_fields:
            raise WorkerError(f"{name} must be a file: a part with a filename.", param=name)
        elif not value.strip():
            continue
        elif bare != name or name in lists:
            items = values.setdefault(bare, [])
            assert isinstance(items, list)
            items.append(value)
        else:
            values[name] = value
    return FilesForm(Body(values, form=True), files)
