"""A model hub on loopback, as far as a client that fetches models can tell: listings, files, ranges, gates, a CDN, trouble.

Large files are answered by a redirect to another origin, as the real hub does, which mustn't see the person's token. The
ones that are kept as Xet can be had there in either way: plainly, or by what the hub's own downloader asks for.
Repositories of kernels are those whose names begin with "kernels/"; they are listed as a tree, and have branches.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Self
from urllib.parse import unquote, urlsplit

from tests.support.fake_http import Handler, serving
from tests.support.limits import LIMIT_S

COMMITS = {"main": "a" * 40, "v2": "b" * 40, "v1": "c" * 40, "v4": "d" * 40}


def blob(content: bytes) -> str:
    """Git's name for it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


MIB = 1 << 20
XET_CHUNK = 64 * 1024
XET_BLOCK = 1 << 20


def packed(content: bytes) -> tuple[bytes, int]:
    """A block as Xet stores it, uncompressed, and how many chunks that is."""
    chunks = [content[at : at + XET_CHUNK] for at in range(0, len(content), XET_CHUNK)]
    sizes = [len(chunk).to_bytes(3, "little") for chunk in chunks]
    return b"".join(b"\0" + size + b"\0" + size + chunk for size, chunk in zip(sizes, chunks)), len(chunks)


@dataclass
class Repo:
    files: dict[str, bytes]
    large: frozenset[str] = frozenset()  # kept as LFS: by sha256, on the CDN
    xet: frozenset[str] = frozenset()  # of the large ones
    gated: bool = False
    versions: dict[str, dict[str, bytes]] = field(default_factory=dict)  # files that a revision has instead

    def at(self, revision: str) -> dict[str, bytes] | None:
        for name, commit in COMMITS.items():
            if revision in (name, commit) and (name == "main" or name in self.versions):
                return self.files | self.versions.get(name, {})
        return None


class Hub:
    """`url` is its endpoint. What happens can be changed at any time; `sent` counts bytes of each file."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.token = "hf_good"
        self.cuts: dict[str, list[int]] = {}  # file → after how many bytes each of the next answers breaks off
        self.errors: dict[str, list[int]] = {}  # file → status of each of the next answers
        self.head_errors: dict[str, list[int]] = {}  # large file → status of each of the next answers to how it is kept
        self.ranges = True
        self.corrupt: Counter[str] = Counter()  # file → how often it comes with a wrong byte
        self.endless: set[str] = set()  # files, or names of repositories whose listing, that have no end
        self.more_as_xet: dict[str, int] = {}  # file → so many bytes more come as Xet
        self.listed: dict[str, dict[str, object]] = {}  # file → what its listing says instead
        self.hold: dict[str, threading.Event] = {}  # file → wait half way
        self.half_way: dict[str, threading.Event] = {}
        self.tokens_at_cdn: set[str | None] = set()
        self.xet_reads: list[str] = []  # files that were asked for as Xet
        self._sent: Counter[str] = Counter()
        self._under_way = 0
        self._changed = threading.Condition()
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler(cdn=cdn)) for cdn in (False, True)]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for server in self._servers:
                stack.enter_context(serving(server))
            self._serving = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for event in self.hold.values():
            event.set()
        self._serving.close()

    @property
    def sent(self) -> Counter[str]:
        """Bytes of each file, when no answer is under way: a client has them all a moment before they are counted."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._under_way == 0, LIMIT_S)
            return self._sent.copy()

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        with self._changed:
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _handler(self, *, cdn: bool) -> type[Handler]:
        hub = self

        class Answer(Handler):
            def end_headers(self) -> None:
                self.send_header("Connection", "close")
                super().end_headers()

            def do_GET(self) -> None:
                with hub._answering():
                    self.find(unquote(urlsplit(self.path).path))

            do_HEAD = do_GET

            def find(self, path: str) -> None:
                if cdn and path.startswith("/xet/v1/reconstructions/"):
                    self.rebuilding(path.rpartition("/")[2])
                elif cdn and path.startswith("/xet/block/"):
                    self.block(*path.split("/")[3:])
                elif cdn and path.startswith("/xet/"):
                    self.refuse(404, None)
                elif cdn:
                    hub.tokens_at_cdn.add(self.headers["Authorization"])
                    _, repo, revision, name = path.split("|")
                    self.file(name, hub.repos[repo].at(revision)[name])
                elif "/xet-read-token/" in path:
                    until = str(int(time.time()) + 3600)
                    access = {"X-Xet-Cas-Url": f"{hub.cdn}/xet", "X-Xet-Access-Token": "xet_good"}
                    self.send(200, b"{}", **access, **{"X-Xet-Token-Expiration": until})
                elif path.startswith("/api/models/"):
                    name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
                    self.listing(name, revision or "main")
                elif path.startswith("/api/kernels/") and path.endswith("/refs"):
                    self.branches(path.removeprefix("/api/").removesuffix("/refs"))
                elif path.startswith("/api/kernels/"):
                    name, _, place = path.removeprefix("/api/").partition("/tree/")
                    self.tree(name, *place.split("/", 1))
                elif "/resolve/" in path:
                    repo, _, rest = path.removeprefix("/").partition("/resolve/")
                    revision, _, name = rest.partition("/")
                    self.resolve(repo, revision, name)
                else:
                    self.refuse(404, None)

            def listing(self, name: str, revision: str) -> None:
                repo = hub.repos.get(name)
                if repo is None:
                    self.refuse(401, "RepoNotFound")
                    return
                files = repo.at(revision)
                if files is None:
                    self.refuse(404, "RevisionNotFound")
                    return
                siblings = []
                for file, content in files.items():
                    entry = {"rfilename": file, "size": len(content), "blobId": blob(content)}
                    if file in repo.large:
                        digest = hashlib.sha256(content).hexdigest()
                        entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
                    siblings.append(entry | hub.listed.get(file, {}))
                if name in hub.endless:
                    self.send_response(200)
                    self.end_headers()
                    self.go_on(name, b"[")
                    return
                sha = COMMITS.get(revision, revision)
                gated = "manual" if repo.gated else False
                body = {"id": name, "sha": sha, "private": False, "gated": gated, "tags": [], "siblings": siblings}
                self.send_json(200, {**body, "downloads": 0, "likes": 0})

            def branches(self, name: str) -> None:
                if name not in hub.repos:
                    self.refuse(401, "RepoNotFound")
                    return
                found = [branch for branch in COMMITS if branch == "main" or branch in hub.repos[name].versions]
                listed = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": COMMITS[b]} for b in found]
                body = {"branches": listed, "converts": [], "tags": []}
                self.send_json(200, body)

            def tree(self, name: str, revision: str, folder: str) -> None:
                repo = hub.repos[name]
                files = repo.at(revision)
                assert files is not None
                entries: dict[str, dict[str, object]] = {}
                for file, content in files.items():
                    for above in list(PurePosixPath(file).parents)[:-1]:
                        entries[str(above)] = {"type": "directory", "path": str(above), "oid": "0" * 40, "size": 0}
                    entries[file] = {"type": "file", "path": file, "size": len(content), "oid": blob(content)}
                    if file in repo.large:
                        digest = hashlib.sha256(content).hexdigest()
                        entries[file]["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
                below = [entry for path, entry in entries.items() if path.startswith(f"{folder}/")]
                self.send_json(200, below)

            def resolve(self, repo_name: str, revision: str, name: str) -> None:
                repo = hub.repos[repo_name]
                if repo.gated and self.headers["Authorization"] is None:
                    self.refuse(401, "GatedRepo")
                    return
                if repo.gated and self.headers["Authorization"] != f"Bearer {hub.token}":
                    self.refuse(403, "GatedRepo")
                    return
                content = repo.at(revision)[name]
                if name not in repo.large:
                    self.file(name, content)
                    return
                if self.command == "HEAD" and hub.head_errors.get(name):
                    self.refuse(hub.head_errors[name].pop(0), None)
                    return
                digest = hashlib.sha256(content).hexdigest()
                fields = {
                    "Location": f"{hub.cdn}/|{repo_name}|{revision}|{name}",
                    "X-Repo-Commit": COMMITS.get(revision, revision),
                    "X-Linked-Size": str(len(content)),
                    "X-Linked-Etag": f'"{digest}"',
                    "Content-Length": "0",
                }
                if name in repo.xet:
                    access = f"{hub.url}/api/models/{repo_name}/xet-read-token/{revision}"
                    fields |= {"X-Xet-Hash": digest, "Link": f'<{access}>; rel="xet-auth"'}
                self.send_head(302, fields)

            def kept_as_xet(self, digest: str) -> tuple[str, bytes]:
                for repo in hub.repos.values():
                    for version in ("main", *repo.versions):
                        for name, content in (repo.at(version) or {}).items():
                            if hashlib.sha256(content).hexdigest() == digest:
                                return name, content + bytes(hub.more_as_xet.get(name, 0))
                raise KeyError(digest)

            def rebuilding(self, digest: str) -> None:
                """Of which blocks the file is made, and where they are."""
                hub.tokens_at_cdn.add(self.headers["Authorization"])
                name, content = self.kept_as_xet(digest)
                hub.xet_reads.append(name)
                terms, places = [], {}
                for number, at in enumerate(range(0, len(content), XET_BLOCK)):
                    stored, chunks = packed(content[at : at + XET_BLOCK])
                    block, extent = f"{number + 1:064x}", {"start": 0, "end": chunks}
                    length = len(content[at : at + XET_BLOCK])
                    terms.append({"hash": block, "unpacked_length": length, "range": extent})
                    url, whole = f"{hub.cdn}/xet/block/{digest}/{at}", {"start": 0, "end": len(stored) - 1}
                    places[block] = [{"range": extent, "url": url, "url_range": whole}]
                body = {"offset_into_first_range": 0, "terms": terms, "fetch_info": places}
                self.send_json(200, body)

            def block(self, digest: str, at: str) -> None:
                hub.tokens_at_cdn.add(self.headers["Authorization"])
                name, content = self.kept_as_xet(digest)
                self.file(name, content[int(at) : int(at) + XET_BLOCK], stored=lambda block: packed(block)[0])

            def file(self, name: str, content: bytes, stored: Callable[[bytes], bytes] = bytes) -> None:
                if hub.errors.get(name):
                    self.refuse(hub.errors[name].pop(0), None)
                    return
                if hub.corrupt[name]:
                    hub.corrupt[name] -= 1
                    content = bytes([content[0] ^ 1]) + content[1:]
                content = stored(content)
                first = 0
                if hub.ranges and (asked := self.headers["Range"]):
                    begin, _, end = asked.removeprefix("bytes=").partition("-")
                    first, content = int(begin), content[: int(end) + 1 if end else None]
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
                else:
                    self.send_response(200)
                if name not in hub.endless:
                    self.send_header("Content-Length", str(len(content) - first))
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.end_headers()
                if self.command == "HEAD":
                    return
                rest = content[first:]
                if hub.cuts.get(name):
                    rest = rest[: hub.cuts[name].pop(0)]
                half = len(rest) // 2
                for piece in (rest[:half], rest[half:]):
                    try:
                        self.wfile.write(piece)
                        self.wfile.flush()
                    except OSError:  # the client has had enough
                        return
                    hub._sent[name] += len(piece)
                    if piece is not rest[half:] and name in hub.hold:
                        hub.half_way[name].set()
                        hub.hold[name].wait(LIMIT_S)
                if name in hub.endless:
                    self.go_on(name, b"x")

            def go_on(self, name: str, letter: bytes) -> None:
                """Until the client has had enough, but no longer than a disk has room for."""
                with contextlib.suppress(OSError):
                    for _ in range(1000):
                        self.wfile.write(letter * MIB)
                        hub._sent[name] += MIB

            def refuse(self, status: int, code: str | None) -> None:
                self.send(status, b'{"error": "no"}', **({"X-Error-Code": code} if code else {}))

        return Answer
