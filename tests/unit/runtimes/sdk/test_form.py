"""Forms with several files: each in its field, `x[]` as `x`, and no more than a field takes."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from runtimes.sdk.errors import WorkerError
from runtimes.sdk.form import FilesForm, read_files, read_form

TYPE = "multipart/form-data; boundary=X"


def part(name: str, value: str, *, is_file: bool = False) -> str:
    filename = '; filename="a.png"' if is_file else ""
    return f'--X\r\nContent-Disposition: form-data; name="{name}"{filename}\r\n\r\n{value}\r\n'


def request(*parts: str, content_type: str = TYPE) -> Request:
    body = "".join([*parts, "--X--\r\n"]).encode()

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", content_type.encode())]}
    return Request(scope, receive)


async def read(*parts: str) -> FilesForm:
    return await read_files(request(*parts), {"image": 2, "mask": 1})


async def test_files_are_found_by_their_field():
    form = await read(part("image[]", "one", is_file=True), part("image", "two", is_file=True), part("prompt", "a hat"))
    assert [file.read() for file in form.files["image"]] == [b"one", b"two"]
    assert "mask" not in form.files
    assert form.fields.text("prompt") == "a hat"
    form.close()
    assert all(file.closed for file in form.files["image"])


@pytest.mark.parametrize(
    ("parts", "param", "said"),
    [
        ([part("mask", "1", is_file=True), part("mask", "2", is_file=True)], "mask", "at most 1"),
        ([part("picture", "1", is_file=True)], "picture", "one of the fields image, mask"),
        ([part("image", "text")], "image", "must be a file"),
    ],
    ids=["too many", "another field", "text"],
)
async def test_what_does_not_fit_is_refused_by_name(parts, param, said):
    with pytest.raises(WorkerError, match=said) as refused:
        await read(*parts)
    assert refused.value.param == param


async def test_one_file_is_the_only_one():
    fields = [
        part("file", "sound", is_file=True),
        part("x[]", "1"),
        part("x[]", "2"),
        part("y[0]", "3"),
        part("y[1]", "4"),
    ]
    form = await read_form(request(*fields), "file")
    with form.file as file:
        assert file.read() == b"sound"
    assert form.fields.values == {"x": ["1", "2"], "y": ["3", "4"]}
    assert (await read_form(request(part("language", "de")), "file")).file is None


async def test_anything_else_is_no_form():
    with pytest.raises(WorkerError, match="with the field image"):
        await read_files(request(content_type="application/json"), {"image": 1})
