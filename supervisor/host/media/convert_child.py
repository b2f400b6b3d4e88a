"""Opens files that clients send: text out of PDFs, and pictures as PNG. A separate process with limits, run as a script.

Such files may be malicious, so the daemon never opens one itself. The process takes a kind as its argument and the file on
standard input. It prints the result; or, with the exit code `REFUSED` or `MISSING`, the reason on standard error. It ends
together with its parent, or at its limits.
"""

from __future__ import annotations

import ctypes
import io
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Final

MEMORY_BYTES: Final = 1 << 30
CPU_S: Final = 20
PIXELS: Final = 40_000_000
PAGES: Final = 500
TEXT: Final = 1_000_000  # characters of one document
PR_SET_PDEATHSIG: Final = 1
REFUSED: Final = 3
MISSING: Final = 4  # the library for such files isn't installed


def text_of(data: bytes) -> bytes:
    """The text of a PDF's pages."""
    from pypdf import PdfReader  # noqa: PLC0415  # of the extra `media`; loaded only when needed

    found: list[str] = []
    pages = PdfReader(io.BytesIO(data)).pages
    for page in pages[:PAGES]:
        found.append(page.extract_text())
        if sum(map(len, found)) > TEXT:
            break
    text = "\n\n".join(filter(None, map(str.strip, found)))
    if len(found) < len(pages) or len(text) > TEXT:
        text = f"{text[:TEXT]}\n\n(The document goes on. This is its text up to page {len(found)} of {len(pages)}.)"
    return text.encode("utf-8", "replace")


def png_of(data: bytes) -> bytes:
    """A picture of any kind, upright, as PNG."""
    from PIL import Image, ImageOps  # noqa: PLC0415

    if data[4:8] == b"ftyp":  # HEIC; newer versions of Pillow read AVIF themselves
        try:
            from pillow_heif import register_heif_opener  # noqa: PLC0415
        except ImportError:
            if data[8:12] not in (b"avif", b"avis"):
                raise
        else:
            register_heif_opener()
    Image.MAX_IMAGE_PIXELS = PIXELS
    with Image.open(io.BytesIO(data)) as picture:
        if picture.width * picture.height > PIXELS:
            raise ValueError(f"it has more than {PIXELS} pixels")
        upright = ImageOps.exif_transpose(picture)
        out = io.BytesIO()
        upright.convert("RGBA" if "A" in upright.getbands() else "RGB").save(out, "PNG", compress_level=1)
    return out.getvalue()


KINDS: Final[Mapping[str, Callable[[bytes], bytes]]] = {"pdf": text_of, "picture": png_of}


def main() -> int:
    """Convert standard input; see the module."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    try:
        sys.stdout.buffer.write(KINDS[sys.argv[1]](sys.stdin.buffer.read()))
    except ImportError:
        return MISSING
    except MemoryError:
        sys.stderr.write("it takes too much memory")
        return REFUSED
    except Exception as error:  # noqa: BLE001  # a malicious file can make libraries raise anything
        sys.stderr.write(f"{type(error).__name__}: {error}"[:300])
        return REFUSED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
