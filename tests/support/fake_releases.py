"""llama.cpp's releases, played on loopback: archives of the real layout, and a server that misbehaves on demand.

The archive has the compiled llama-server of the tests. Where a build is for a GPU, a script in front of it plays what no
machine here has: it lists the GPU, says that it uses it, and takes memory of the scripted NVML.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

from tests.support import build_llama_server, fake_http

GPU = """#!/bin/sh
# Plays a build for a GPU: lists one, and says that it uses it.
here=$(dirname "$(readlink -f "$0")")
[ "$1" != --list-devices ] || { printf 'Available devices:\\n  %(name)s: Fake GPU (16376 MiB, 15000 MiB free)\\n'; exit; }
for word; do
    shift
    if [ "$word" = %(name)s ]; then
        word=none
        export FAKE_VRAM_MIB=%(vram_mib)s FAKE_VRAM_WORLD='%(world)s'
        echo "llama_model_load_from_file_impl: using device %(name)s (Fake GPU) (0000:01:00.0) - 15000 MiB free" >&2
    fi
    set -- "$@" "$word"
done
exec "$here/llama-server.bin" "$@"
"""


def archive(
    folder: Path,
    build: str,
    kind: str,
    *,
    vram_mib: int | None = 150,
    world: str = "",
    extra: dict[str, bytes] | None = None,
) -> Path:
    """A release's archive; without `vram_mib` it is for the processor alone. `extra`: further files, by name."""
    program = build_llama_server.built()
    assert program is not None, "make llama-server"
    path = folder / f"llama-{build}-bin-ubuntu-{kind}-x64.tar.gz"
    top = f"llama-{build}"
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for file in sorted(program.parent.glob("lib*")):
            tar.add(file, f"{top}/{file.name}")
        name = "llama-server" if vram_mib is None else "llama-server.bin"
        tar.add(program, f"{top}/{name}")
        device = "CUDA0" if kind.startswith("cuda") else "Vulkan0"
        script = (GPU % {"vram_mib": vram_mib, "world": world, "name": device}).encode()
        scripts = {} if vram_mib is None else {"llama-server": script}
        for other, content in {**scripts, **(extra or {})}.items():
            member = tarfile.TarInfo(f"{top}/{other}")
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))
    return path


@dataclass
class Releases:
    """What the server has, by build, and how it misbehaves."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    cut_after: int | None = None  # bytes of the next answer with a file
    limited: bool = False
    elsewhere: str | None = None  # redirect files to this address
    wrong_digest: bool = False

    def add(self, build: str, path: Path) -> None:
        self.files.setdefault(build, {})[path.name] = path.read_bytes()

    def pins(self, path: Path, build: str) -> Path:
        """The file of pinned digests, of this build."""
        assets = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in self.files[build].items()}
        path.write_text(json.dumps({"repository": "ggml-org/llama.cpp", "build": build, "assets": assets}))
        return path


@contextlib.contextmanager
def serving() -> Iterator[Releases]:
    releases = Releases()

    class Answer(fake_http.Handler):
        def give(self, status: int, body: bytes, **fields: str) -> None:
            self.send_head(status, {**fields, "Content-Length": str(len(body))})
            cut, releases.cut_after = (releases.cut_after, None) if status in (200, 206) else (None, releases.cut_after)
            self.wfile.write(body[:cut])
            self.close_connection |= cut is not None

        def do_GET(self) -> None:
            releases.asked.append(self.path)
            _, kind, build, *rest = self.path.split("/")
            files = releases.files.get(build, {})
            if releases.limited:
                self.give(403, b"{}", **{"X-RateLimit-Remaining": "0", "Retry-After": "60"})
            elif kind == "tags":
                digest = lambda data: "0" * 64 if releases.wrong_digest else hashlib.sha256(data).hexdigest()
                assets = [
                    {"name": name, "size": len(data), "digest": f"sha256:{digest(data)}", "state": "uploaded"}
                    for name, data in files.items()
                ]
                self.give(200 if files else 404, json.dumps({"assets": assets}).encode())
            elif rest[0].partition("?")[0] not in files:
                self.give(404, b"Not Found")
            elif releases.elsewhere is not None and not self.path.endswith("?moved"):
                self.give(302, b"", Location=f"{releases.elsewhere}{self.path}?moved")
            else:
                data, begin = files[rest[0].partition("?")[0]], 0
                if (wanted := self.headers.get("range")) is not None:
                    begin = int(wanted.removeprefix("bytes=").rstrip("-"))
                self.give(206 if begin else 200, data[begin:])

    with fake_http.serving(ThreadingHTTPServer(("127.0.0.1", 0), Answer)) as server:
        releases.url = f"http://127.0.0.1:{server.server_port}"
        yield releases
