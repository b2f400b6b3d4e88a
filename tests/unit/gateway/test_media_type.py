"""A picture is one by how it begins and by what it is declared to be."""

from __future__ import annotations

from supervisor.gateway.media.media_type import agreed_type, media_types
from tests.support.cases import cases
from tests.support.media_server import MP4, PNG, WAV


@cases(
    ("declared", "head", "kind"),
    [
        ("image/png", PNG, "image/png"),
        ("image/jpg", PNG, "image/png"),
        ("IMAGE/PNG; charset=x", PNG, "image/png"),
        (None, PNG, "image/png"),
        (None, b"\xff\xd8\xff\xe0", "image/jpeg"),
        (None, b"GIF89a", "image/gif"),
        (None, b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (None, b"\0\0\0\x1cftypavif", "image/avif"),
        ("audio/x-wav", WAV, "audio/wav"),
        ("audio/mp3", b"ID3\x04", "audio/mpeg"),
        ("audio/mpeg", b"\xff\xfb\x90\x64", "audio/mpeg"),
        ("audio/aac", b"\xff\xf1\x50\x80", "audio/aac"),
        (None, b"OggS", "audio/ogg"),
        ("video/ogg", b"OggS", "video/ogg"),
        ("video/mp4", MP4, "video/mp4"),
        ("audio/mp4", MP4, "audio/mp4"),
        ("audio/webm", b"\x1a\x45\xdf\xa3", "audio/webm"),
        ("image/png", WAV, None),
        ("audio/wav", PNG, None),
        ("application/octet-stream", PNG, None),
        ("text/html", PNG, None),
        ("", PNG, None),
        ("image/svg+xml", b"<svg xmlns=", None),
        ("image/png", b"<!doctype html>", None),
        ("image/png", b"root:x:0:0:", None),
        ("image/png", b"", None),
    ],
)
def test_type(declared, head, kind):
    assert agreed_type(declared, head) == kind


@cases("head", [b"", b"R", b"\xff", b"PK\x03\x04", b"%PDF-1.7", b"{}", b"RIFF\0\0\0\0XXXX"])
def test_nothing_known(head):
    assert media_types(head) == ()
