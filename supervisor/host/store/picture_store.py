"""Pictures that clients get by address: a folder of files, bounded by bytes and age. Their names can't be guessed.

There is no other state, so a successor finds the pictures that an earlier daemon kept. Everything here blocks on the disk.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from supervisor.host.store.files import replacing
from supervisor.host.store.store import NotSavedError

NAME_BYTES: Final = 32
_FOLDER: Final = "pictures"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{43}\.(png|jpeg|webp)")

log = structlog.get_logger("llmux.pictures")


class Kept(NamedTuple):
    """A picture that is still here."""

    path: Path
    left_s: float  # of its time


class PictureStore:
    """The pictures of one daemon. Use from any thread."""

    def __init__(self) -> None:
        self.most_bytes, self.keep_s = 0, 0.0
        self._folder: Path | None = None  # None until `open`
        self._lock = threading.Lock()  # held from counting the files until the new ones are written

    @property
    def is_on(self) -> bool:
        """Is anything kept?"""
        return self._folder is not None and self.most_bytes > 0

    def open(self, folder: Path) -> None:
        """Go on with the pictures below `folder`. A folder that can't be used is logged, and nothing is kept."""
        folder /= _FOLDER
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in folder.iterdir():
                if _NAME.fullmatch(path.name) is None:  # a daemon was killed while it wrote the file
                    path.unlink()
        except OSError as error:
            log.warning("pictures.unusable", folder=str(folder), reason=str(error), consequence="none is kept")
            return
        self._folder = folder
        self.expire()

    def configure(self, *, most_bytes: int, keep_s: float) -> None:
        """Change the limits."""
        self.most_bytes, self.keep_s = most_bytes, keep_s
        self.expire()

    def keep(self, pictures: Sequence[tuple[bytes, str]]) -> list[str]:
        """Keep the pictures of one answer, each with its kind (png, jpeg or webp), and return their names. The oldest make room.

        Raises NotSavedError, having kept none or some.
        """
        size = sum(len(data) for data, _ in pictures)
        if self._folder is None or size > self.most_bytes:
            raise NotSavedError(
                "The pictures are larger than all that may be kept (limits.pictures_mib); ask for fewer, or for b64_json.",
                code="picture_not_kept",
            )
        names = [f"{secrets.token_urlsafe(NAME_BYTES)}.{kind}" for _, kind in pictures]
        try:
            with self._lock:
                self._make_room(size)
                for name, (data, _) in zip(names, pictures, strict=True):
                    assert _NAME.fullmatch(name), name
                    with replacing(self._folder / name, 0o600) as new:
                        new.write_bytes(data)
        except OSError as error:
            raise NotSavedError(
                f"The picture can't be kept: {error.strerror or error}", code="picture_not_kept"
            ) from error
        return names

    def find(self, name: str) -> Kept | None:
        """The picture with this name; None: it isn't kept."""
        if self._folder is None or _NAME.fullmatch(name) is None:
            return None
        path = self._folder / name
        try:
            left_s = path.stat().st_mtime + self.keep_s - time.time()
        except OSError:
            return None
        return Kept(path, left_s) if left_s > 0 else None

    def expire(self) -> None:
        """Remove pictures that have been kept long enough."""
        with self._lock:
            self._make_room(0)

    def clear(self) -> None:
        """Remove all."""
        for path, _, _ in self._list_files():
            with contextlib.suppress(OSError):
                path.unlink()

    def _make_room(self, size: int) -> None:
        before, taken = time.time() - self.keep_s, size
        for path, at, its_size in sorted(self._list_files(), key=lambda one: -one[1]):
            taken += its_size
            if at <= before or taken > self.most_bytes:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _list_files(self) -> Iterator[tuple[Path, float, int]]:
        """Each picture's path, modification time and size."""
        for path in () if self._folder is None else self._folder.iterdir():
            with contextlib.suppress(OSError):  # another thread has just removed the file
                status = path.stat()
                yield path, status.st_mtime, status.st_size
