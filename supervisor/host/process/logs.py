"""Workers' logs: their last lines, new lines as they arrive, and the class of a crash.

One ordered table decides the class. The most specific cause comes first: an out-of-memory error is usually followed by
messages of other classes ("failed to load model"), never the other way round. The first line that matches is
quoted, because programs report the cause before its consequences. Quotes are for operators: a quote can contain a user's prompt.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from supervisor.core.types import Crash, CrashClass

CRASH_LINES = 200  # a long traceback may follow the cause
_CHECKED_BYTES = 64
_POSITION = re.compile(r"(\d{1,20})-(\d{1,18})-(\d{1,10})", re.ASCII)
_UNKNOWN = -1  # no file has this number
CUT = "[the log began anew; lines before this may be missing]"
_KEPT_LINES = 20
MOST_BYTES = 256 * 1024  # in one read; of more only the end is shown
_LINE_CHARS = 500
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STAMP = re.compile(r"^(?:\d+\.\d\d\.\d{3}\.\d{3} [DIWE] )?(?:[EWI] )?\s*(?:(?:srv|cmn|slot) +)?")  # llama.cpp's


def _rule(kind: CrashClass, *patterns: str) -> tuple[CrashClass, re.Pattern[str]]:
    return kind, re.compile("|".join(patterns), re.IGNORECASE)


_OUT_OF_MEMORY = (
    _rule(
        CrashClass.OUT_OF_MEMORY,
        r"out of (?:\w+ )?memory",
        r"OutOfMemory|OutOfDeviceMemory|OutOfHostMemory|OUT_OF_MEMORY",
        r"cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
        r"std::bad_alloc",
        r"^MemoryError\b",
        r"(?:failed|unable) to (?:re)?allocate\b",
        r"can't allocate memory",
        r"^(?!.*mlock).*cannot allocate memory",
        r"(?:insufficient|not enough) (?:\w+ )?memory",
        r"no available memory for the cache blocks",
        r"(?:free memory on device|available memory on node) .* is less than",
    ),
)
_ENVIRONMENT = (
    _rule(
        CrashClass.HOST,
        r"No space left on device",
        r"Disk quota exceeded",
        r"(?:fork|clone|thread|what\(\)).*Resource temporarily unavailable",
        r"can't start new thread",
    ),
    _rule(
        CrashClass.PORT,
        r"address already in use",
        r"couldn't bind",
        r"(?:failed|unable) to bind\b",
        r"only one usage of each socket address",
        r"cannot assign requested address",
    ),
    _rule(
        CrashClass.GPU_LOST,
        r"CUDA error\b",
        r"CUDA_ERROR_(?!OUT_OF_MEMORY)\w+",
        r"cudaError(?!MemoryAllocation)[A-Z]\w+",
        r"(?:HIP|ROCm) error\b",
        r"NVRM: Xid|\bXid\b \(",
        r"fallen off the bus|GPU is lost",
        r"uncorrectable ECC",
        r"ErrorDeviceLost|DeviceLostError",
    ),
)
_ARGUMENTS = (
    _rule(
        CrashClass.NOT_INSTALLED,
        r"ModuleNotFoundError",
        r"No module named",
        r"error while loading shared libraries",
    ),
    _rule(
        CrashClass.BAD_ARGUMENTS,
        r"invalid argument: ",
        r"unknown (?:argument|option)",
        r"unrecognized (?:arguments?|option)",
        r"error while handling argument",
        r"\berror: argument ",
        r"the following arguments are required",
        r"unexpected argument",
    ),
    _rule(
        CrashClass.BAD_ARGUMENTS,
        r"failed to open GGUF file",
        r"invalid magic characters",
        r"gguf_init_from_\w+: ",
        r"unknown model architecture",
        r"unknown (?:pre-tokenizer|tokenizer)",
        r"model is corrupted or incomplete",
        r"missing tensor|wrong (?:number of tensors|shape)|done_getting_tensors",
        r"failed to load (?:mmproj|multimodal|draft|clip)",
        r"does not appear to have a file named|is not a valid model identifier|Repo id must be",
        r"safetensors.*(?:Error|header)|SafetensorError",
        r"^(?:FileNotFoundError|NotADirectoryError|IsADirectoryError)\b",
    ),
    _rule(
        CrashClass.BAD_ARGUMENTS,
        r"error loading model: ",
        r"failed to load model",
        r"exiting due to model loading error",
        r"pydantic\w*\.ValidationError",
        r"to serve at least one request with the model",  # vLLM: its cache is too small for its context
        r"failed to infer device type",  # vLLM: built for another device
    ),
    _rule(CrashClass.BAD_ARGUMENTS, r"^usage: "),
)
# llama.cpp also logs these when it goes on without a GPU, so they are the cause only if no other pattern matches.
_NO_DEVICE = (
    _rule(
        CrashClass.GPU_LOST,
        r"no CUDA-capable device",
        r"found no NVIDIA driver",
        r"NVIDIA-SMI has failed",
        r"driver version is insufficient",
        r"failed to initialize (?:CUDA|NVML)",
        r"no CUDA GPUs are available",
    ),
)
_SENTENCES = {
    CrashClass.OUT_OF_MEMORY: "it ran out of memory",
    CrashClass.HOST: "this machine had no disk space, processes or threads left for it",
    CrashClass.PORT: "its port is in use",
    CrashClass.GPU_LOST: "the GPU or its driver failed",
    CrashClass.NOT_INSTALLED: "a library that it needs is not installed",
    CrashClass.BAD_ARGUMENTS: "its arguments or its files are wrong",
}
_CAUSE = re.compile(
    r"\b(?:error|fatal|panic|abort|aborted|exception|assert\w*|failed|cannot|can't|couldn't|traceback)\b"
    r"|\w(?:Error|Exception)\b|GGML_ASSERT",
    re.IGNORECASE,
)


def tail(path: Path, lines: int, max_bytes: int = 64 * 1024) -> tuple[str, ...]:
    """The last `lines` lines of a log, reading at most `max_bytes`; empty if the log can't be read. Blocks.

    For showing: terminal escapes and control characters are removed, of a progress bar only its last state is kept,
    and long lines are cut.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = file.seek(max(0, size - max_bytes))
            text = file.read(max_bytes).decode("utf-8", "replace")
    except OSError:
        return ()
    found = text.split("\n")
    if start > 0 and len(found) > 1:
        del found[0]  # its beginning is missing
    return tuple(cleaned("\n".join(found))[-lines:])


def cleaned(text: str) -> list[str]:
    """The non-empty lines of a log, for showing: see `tail`."""
    shown = (
        _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()[:_LINE_CHARS] for line in text.split("\n")
    )
    return [line for line in shown if line]


def _checksum_before(file: BinaryIO, offset: int) -> int:
    """The checksum of the bytes before this position."""
    start = max(0, offset - _CHECKED_BYTES)
    return zlib.crc32(os.pread(file.fileno(), offset - start, start))


class LogReader:
    """Reads a log while a worker writes it. Blocks on the file; one reader at a time.

    Each start begins a new file and keeps the last one as `LOG.1`, and a log over its limit is truncated. The file's identity
    and size show both: the reader reads the rest of `LOG.1`, then the new file from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_path = path.with_name(f"{path.name}.1")
        self._identity: int | None = None
        self._offset = 0
        self._check = 0  # of the bytes before the position: a new file may have the inode number of a removed one
        self._partial = b""

    def begin(self, lines: int) -> list[str]:
        """The last `lines` whole lines so far, or fewer; `read` goes on after them."""
        try:
            found = self._path.stat()
        except OSError:
            return []
        self._identity, self._offset = found.st_ino, max(0, found.st_size - MOST_BYTES)
        is_cut = self._offset > 0
        there = self.read()
        return there[max(is_cut, len(there) - lines) :]

    @property
    def position(self) -> str:
        """The position of the next line, for the `resume` of another reader."""
        return f"{self._identity or 0}-{self._offset - len(self._partial)}-{self._check}"

    def resume(self, position: str) -> list[str]:
        """The whole lines since another reader of this log was at `position`; an extra line reports a lost position."""
        self._identity = _UNKNOWN
        if found := _POSITION.fullmatch(position):
            identity, self._offset, check = map(int, found.groups())
            for path in (self._path, self._last_path):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    if os.fstat(file.fileno()).st_ino == identity and _checksum_before(file, self._offset) == check:
                        self._identity, self._check = identity, check
        return self.read()

    def read(self) -> list[str]:
        """The whole lines since the last call, cleaned for showing; an extra line reports omitted ones."""
        before: list[str] = []
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._identity:
                    before = self._end_of_last()
                    self._begin_anew(found.st_ino)
                elif found.st_size < self._offset:
                    before = [CUT]
                    self._begin_anew(found.st_ino)
                return before + self._read_added(file, found.st_size)
        except OSError:
            return before

    def _begin_anew(self, identity: int) -> None:
        self._identity, self._offset, self._check, self._partial = identity, 0, 0, b""

    def _end_of_last(self) -> list[str]:
        """The rest of the previous file, after a new one has replaced it."""
        if self._identity is None:
            return []
        try:
            with self._last_path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino == self._identity:
                    lines = self._read_added(file, found.st_size)
                    return [*lines, *cleaned(self._partial.decode("utf-8", "replace"))]
        except OSError:
            pass
        return [CUT]

    def _read_added(self, file: BinaryIO, size: int) -> list[str]:
        left_out = max(0, size - self._offset - MOST_BYTES)
        file.seek(self._offset + left_out)
        data = file.read(MOST_BYTES)
        self._offset += left_out + len(data)
        whole, found_end, rest = (self._partial + data if not left_out else data).rpartition(b"\n")
        if not found_end:
            self._partial = rest[-MOST_BYTES:]
            return []
        self._partial = rest
        self._check = _checksum_before(file, self._offset - len(rest))
        lines = cleaned(whole.decode("utf-8", "replace"))
        return [f"[{left_out} bytes left out]", *lines] if left_out else lines


def classify(code: int | None, lines: Sequence[str], *, oom_killed: bool = False) -> Crash:
    """Classify the crash of a worker that nobody stopped.

    `code` is its exit code, negative for a signal, None when unknown; `lines` the end of its log (best the last
    `CRASH_LINES`); `oom_killed` whether the kernel's counters show it. The crash keeps the last 20 lines.
    """
    kept = tuple(lines[-_KEPT_LINES:])
    ended = _describe_exit(code)
    if oom_killed:
        return Crash(CrashClass.OUT_OF_MEMORY, f"{ended} by the kernel: out of memory", kept, code)
    for kind, pattern in _rules_for(code):
        for line in lines:
            if pattern.search(line):
                return Crash(kind, f"{_SENTENCES[kind]} ({ended})", kept, code, _STAMP.sub("", line).strip())
    last = next((line for line in reversed(lines) if _CAUSE.search(line)), kept[-1] if kept else "")
    if not last:
        return Crash(CrashClass.UNKNOWN, f"{ended} and left nothing in its log", kept, code)
    return Crash(CrashClass.UNKNOWN, ended, kept, code, f"{ended}: {_STAMP.sub('', last).strip()}")


def _rules_for(code: int | None) -> tuple[tuple[CrashClass, re.Pattern[str]], ...]:
    if code is None or code < 0:
        return _OUT_OF_MEMORY + _ENVIRONMENT  # a signal ends a running program, so its arguments were valid
    return _OUT_OF_MEMORY + _ENVIRONMENT + _ARGUMENTS + _NO_DEVICE if code > 0 else ()


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
