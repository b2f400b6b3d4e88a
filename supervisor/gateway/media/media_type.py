"""Recognises pictures, sounds and videos by their first bytes."""

from __future__ import annotations

from typing import Final

HEAD: Final = 16
"""The number of first bytes that suffice."""

_STARTS: Final = (
    (b"\x89PNG\r\n\x1a\n", ("image/png",)),
    (b"\xff\xd8\xff", ("image/jpeg",)),
    (b"GIF87a", ("image/gif",)),
    (b"GIF89a", ("image/gif",)),
    (b"BM", ("image/bmp",)),
    (b"II*\0", ("image/tiff",)),
    (b"MM\0*", ("image/tiff",)),
    (b"ID3", ("audio/mpeg",)),
    (b"fLaC", ("audio/flac",)),
    (b"OggS", ("audio/ogg", "video/ogg")),
    (b"\x1a\x45\xdf\xa3", ("video/webm", "audio/webm")),
)
_RIFF: Final = {b"WEBP": ("image/webp",), b"WAVE": ("audio/wav",), b"AVI ": ("video/x-msvideo",)}
_BRANDS: Final = {
    **dict.fromkeys((b"avif", b"avis"), ("image/avif",)),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1"), ("image/heic",)),
    **dict.fromkeys((b"M4A ", b"M4B "), ("audio/mp4",)),
    b"qt  ": ("video/quicktime",),
}


def media_types(head: bytes) -> tuple[str, ...]:
    """The possible types of content with these first bytes, the likeliest first; empty for unknown content."""
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], ())
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], ("video/mp4", "audio/mp4"))
    for start, types in _STARTS:
        if head.startswith(start):
            return types
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # a frame of MPEG audio
        layer = head[1] & 0x06
        return ("audio/mpeg",) if layer else ("audio/aac",) if head[1] & 0xF6 == 0xF0 else ()
    return ()


def agreed_type(declared: str | None, head: bytes) -> str | None:
    """The type of content with these first bytes, if it agrees with the declared type; else None.

    `declared` None: no type is declared. Only the main type must agree: many servers declare a wrong subtype, and the content counts.
    """
    for found in media_types(head):
        if declared is None or found.partition("/")[0] == declared.partition("/")[0].strip().lower():
            return found
    return None
