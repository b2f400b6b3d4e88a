"""Which of a request's paths, as it came, a pattern stands for."""

from __future__ import annotations

import pytest

from runtimes.path_pattern import leaves_its_folder, pattern_of
from tests.support.cases import cases


@pytest.mark.parametrize(
    ("path", "fits", "fits_not"),
    [
        ("/files/*", ["/files/", "/files/a", "/files/a/b%2Fc", "/files/a\nb"], ["/files", "/file/a", "/x/files/a"]),
        ("/{name}/x", ["/a/x", "/a%2Fb/x"], ["//x", "/a/b/x", "/a/x/", "/a/xy"]),
        ("/a%2Fb.json", ["/a%2Fb.json"], ["/a/b.json", "/a%2Fbxjson"]),
        ("/{a}/{b}/*", ["/1/2/", "/1/2/3/4"], ["/1/2", "/1//3"]),
    ],
)
def test_fits(path, fits, fits_not):
    pattern = pattern_of(path)
    assert all(pattern.fullmatch(each.encode()) for each in fits)
    assert not any(pattern.fullmatch(each.encode()) for each in fits_not)


def test_a_path_is_no_pattern():
    assert pattern_of("/v1/chat/completions") is None


@cases("path", ["/*/a", "/a*b", "/**", "/{}", "/{a", "/a}", "/{a/b}"])
def test_what_is_none(path):
    with pytest.raises(ValueError, match="a path"):
        pattern_of(path)


@cases(
    ("path", "leaves"),
    [(b"/a/../b", True), (b"/a/%2e%2E/b", True), (b"/a%2F..%5cb", True), (b"/a/.", True), (b"/a/..b/c.", False)],
)
def test_other_folders(path, leaves):
    assert leaves_its_folder(path) is leaves
