"""Every parser of files and messages, given what is nearly right: it answers or refuses as it promises, and soon."""

from __future__ import annotations

import json
import re
import resource
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtimes.adapters import checkpoints
from runtimes.base import ModelUnusableError
from runtimes.llama_server.adapter import LlamaServerAdapter, gguf_meta
from runtimes.llama_server.adapter.config import LlamaServerConfig
from supervisor.catalog import Catalog, load
from supervisor.catalog.document.document import MAX_NODES
from supervisor.catalog.keys import Keyring, load_keys, new_key
from supervisor.cli import importers
from supervisor.errors import ConfigError
from tests.support import tiny
from tests.support.counts import examples
from tests.support.daemon import REPOSITORY
from tests.support.fuzzing import ODD_NUMBERS, damaged

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
GIB = 1 << 30
GOLDEN = REPOSITORY / "tests/golden/importers"
YAML_WORDS = (b"&a ", b"*a", b"<<: *a\n", b"!!python/object/apply:os.system ", b"{", b"[", b"- ", b": ", b"\t", b"\0")
YAML_WORDS += (
    b"? ",
    b"'",
    b'"',
    b"|\n",
    b"---\n",
    b"%YAML 3\n",
    b"\xff",
    b"\xef\xbb\xbf",
    b".inf",
    b"1e999",
    b"9" * 5000,
)
CONFIG = b"""\
server: {port: 9000, allowed_hosts: [a.example.org]}
limits: {drain_s: 3, body_mib: 5}
devices: [{kind: host, budget_mib: 4000}]
models:
  one: &one {runtime: command, cmd: [sh, -c, "${port}"], vram_mib: 100, endpoints: [/v1/chat/completions]}
  two: {<<: *one, env: {A: b}, priority: 7, stop_cmd: [sh]}
  remote: {runtime: openai_remote, url: "https://api.example.org/v1", key_env: SOME_KEY}
virtual_models:
  alias: {model: one, defaults: {temperature: 0.5}, strip: [seed]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory() -> Iterator[None]:
    """No claim of a file may make us ask for more than the machine has: a greedy parser gets a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * GIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def of_data(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def outcome(act: Callable[[], T], refusal: type[E]) -> T | E:
    """What it returns, or the only exception that it may raise."""
    try:
        return act()
    except refusal as error:
        return error


class TestConfiguration:
    """A catalog, or all problems: nothing else comes out of a configuration file."""

    def loads(self, path: Path, data: bytes) -> None:
        found = outcome(lambda: load(of_data(path, data), check_files=False), ConfigError)
        assert isinstance(found, Catalog) or found.problems

    @settings(max_examples=examples(40))
    @given(data=damaged(CONFIG, words=YAML_WORDS))
    def test_a_damaged_one(self, folder, data):
        self.loads(folder / "llmux.yaml", data)

    @settings(max_examples=examples(60))
    @given(text=st.text(max_size=200))
    @example(text="models: {'\x85': {runtime: command}}")
    @example(text="models:\n  a: {runtime: command, cmd: [a], vram_mib: .nan}")
    @example(text="models:\n  ? [a]\n  : b")
    def test_any_text(self, folder, text):
        self.loads(folder / "llmux.yaml", text.encode("utf-8", "surrogatepass"))

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    )

    @settings(max_examples=examples(40))
    @given(
        data=st.data(),
        value=json_values,
        path=st.sampled_from(
            ["server", "server.port", "limits", "limits.drain_s", "devices", "models", "models.one", "virtual_models"]
            + [f"models.one.{key}" for key in ("runtime", "cmd", "env", "vram_mib", "endpoints", "priority", "x")]
            + [f"virtual_models.alias.{key}" for key in ("model", "defaults", "force", "strip", "when")]
        ),
    )
    def test_any_value_at_any_place(self, folder, data, value, path):
        document: dict[str, object] = {
            "models": {"one": {"runtime": "command", "cmd": ["sh"], "vram_mib": 1}},
            "virtual_models": {"alias": {"model": "one"}},
        }
        at, *rest = path.split(".")
        into = document
        while rest:
            into = into.setdefault(at, {})  # type: ignore[assignment]
            at, *rest = rest
        into[at] = value
        self.loads(folder / "llmux.yaml", json.dumps(document).encode())

    @pytest.mark.parametrize(
        "bomb",
        [
            "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 40)),
            "a0: &a0 {x: y}\n" + "".join(f"a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}\n" for n in range(1, 60)),
            "a0: &a0 {x: y}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60)),
            "a: &a [*a]\n",
            "[" * 100_000,
            "{a: " * 100_000,
            "- " * 100_000,
            "? " * 100_000,
        ],
    )
    def test_bombs(self, folder, bomb):
        path = of_data(folder / "llmux.yaml", bomb.encode())
        with pytest.raises(ConfigError) as refused:
            load(path)
        assert re.search(rf"more than {MAX_NODES} values|deep|complete|unknown|not valid YAML|text", str(refused.value))

    @settings(max_examples=examples(60))
    @given(data=st.one_of(st.binary(max_size=100), damaged(json.dumps([new_key("a")[1]]).encode(), words=YAML_WORDS)))
    @example(data=b"- {name: a, key: " + b"\xf0\x9f\x98\x80" * 8 + b"}")
    @example(data=b"- {name: a, key: 'aaaaaaaaaaaaaaaaaaa', expires: '0001-01-01T00:00:00+23:59'}")
    @example(data=b"- {name: a, key: 'aaaaaaaaaaaaaaaaaaa', expires: '9999-12-31T23:59:59-23:59'}")
    @example(data=b'- {name: a, key: "\\ud800aaaaaaaaaaaaaaaaaaaaaa"}')
    def test_keys(self, folder, data):
        found = outcome(lambda: load_keys(of_data(folder / "api_keys.yaml", data)), ConfigError)
        assert isinstance(found, Keyring) or found.problems


def gguf(entries: list[tuple[str, int, bytes]], count: int | None = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries) if count is None else count)
    return head + b"".join(
        struct.pack("<Q", len(name.encode())) + name.encode() + struct.pack("<I", kind) + value
        for name, kind, value in entries
    )


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
LLAMA_KEYS = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
LLAMA_KEYS += ("attention.head_count_kv", "attention.key_length", "attention.sliding_window", "expert_used_count")
LLAMA_KEYS += ("attention.sliding_window_pattern", "full_attention_interval", "ssm.state_size", "vocab_size")


@st.composite
def odd_gguf(draw: st.DrawFn) -> bytes:
    """A header that is well formed, with values that no model has."""

    def number(kind: int) -> bytes:
        code = NUMBERS[kind]
        if code in "fd":
            return struct.pack(f"<{code}", draw(st.sampled_from((0.0, -1.5, 1e30, float("inf"), float("nan")))))
        size = 8 * struct.calcsize(f"<{code}")
        value = draw(st.sampled_from(ODD_NUMBERS)) % (1 << size)
        return value.to_bytes(size // 8, "little")

    entries = [("general.architecture", 8, text("llama"))]
    for key in draw(st.lists(st.sampled_from(LLAMA_KEYS), unique=True)):
        kind = draw(st.sampled_from(sorted(NUMBERS)))
        if draw(st.booleans()):
            entries.append((f"llama.{key}", kind, number(kind)))
        else:
            items = b"".join(number(kind) for _ in range(draw(st.integers(0, 3))))
            length = len(items) // struct.calcsize(f"<{NUMBERS[kind]}")
            entries.append((f"llama.{key}", 9, struct.pack("<IQ", kind, length) + items))
    return gguf(entries)


class TestGguf:
    """Metadata, or ModelUnusableError; no memory and no time for what a header only claims."""

    whole = tiny.model().read_bytes()[:6000]

    def reads(self, path: Path) -> None:
        """Everything that the daemon does with a model's file."""
        adapter, config = LlamaServerAdapter(), LlamaServerConfig(runtime="llama_server", path=path)
        found = outcome(lambda: gguf_meta.read(path), ModelUnusableError)
        assert isinstance(found, gguf_meta.Metadata) or str(path) in str(found)
        template = outcome(lambda: gguf_meta.chat_template(path), ModelUnusableError)
        assert isinstance(template, str | None) or str(path) in str(template)
        adapter.estimate(config)
        adapter.capabilities(config)
        adapter.check(config, runtimes_dir=path.parent)

    @settings(max_examples=examples(40))
    @given(data=damaged(whole, whole[:700]))
    def test_a_damaged_one(self, folder, data):
        self.reads(of_data(folder / "damaged.gguf", data))

    @settings(max_examples=examples(60))
    @given(data=odd_gguf())
    @example(
        data=gguf([("general.architecture", 8, text("llama")), ("llama.block_count", 10, struct.pack("<Q", 1 << 62))])
    )
    @example(
        data=gguf(
            [("general.architecture", 8, text("llama")), ("llama.context_length", 6, struct.pack("<f", float("inf")))]
        )
    )
    def test_odd_values(self, folder, data):
        self.reads(of_data(folder / "odd.gguf", data))

    @pytest.mark.parametrize(
        "entries",
        [
            [("a", 8, struct.pack("<Q", 30 * GIB))],
            [("a", 9, struct.pack("<IQ", 8, GIB))],
            [("a", 9, struct.pack("<IQ", 10, GIB))],
            [("a", 9, struct.pack("<IQ", 0, 30 * GIB))],
            [("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2 * GIB))],
            [("general.architecture", 8, text("llama")), ("tokenizer.chat_template", 8, struct.pack("<Q", 30 * GIB))],
        ],
    )
    def test_a_huge_file_that_is_all_header(self, folder, entries):
        """A sparse file, so that its size bears every claim out."""
        path = of_data(folder / "huge.gguf", gguf(entries, count=5))
        with path.open("r+b") as file:
            file.truncate(32 * GIB)
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.reads(path)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert after.ru_utime - used.ru_utime < 30.0
        assert after.ru_maxrss - used.ru_maxrss < 768 * 1024

    def test_a_file_that_shrinks_meanwhile(self, folder):
        """A mapping of it would end the daemon by SIGBUS."""
        path = of_data(folder / "shrinking.gguf", self.whole)
        script = (
            "import sys, os\nfrom pathlib import Path\nfrom runtimes.base import ModelUnusableError\n"
            "from runtimes.llama_server.adapter import gguf_meta\n"
            "path = Path(sys.argv[1])\n"
            "string = gguf_meta._Reader.string\n"
            "def shrink(self):\n    os.truncate(path, 0)\n    return string(self)\n"
            "gguf_meta._Reader.string = shrink\n"
            "try:\n    gguf_meta.read(path)\nexcept ModelUnusableError:\n    pass\n"
        )
        read = subprocess.run(
            [sys.executable, "-c", script, str(path)], cwd=REPOSITORY, capture_output=True, check=False
        )
        assert (read.returncode, read.stderr) == (0, b"")


class TestCheckpoints:
    """A folder's sizes, or ModelUnusableError."""

    head = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
        }
    ).encode()
    words = (b"1e999", b"-1", b"Infinity", b"NaN", b"9" * 5000, b"null", b"[" * 100_000, b'{"a":' * 50_000, b"\xff")
    config = json.dumps(
        {"architectures": ["A"], "hidden_size": 64, "text_config": {"num_hidden_layers": 2, "vocab_size": 7}}
    ).encode()

    @settings(max_examples=examples(60))
    @given(head=damaged(head, words=words), length=st.none() | st.sampled_from(ODD_NUMBERS))
    @example(head=b'{"a": {"dtype": "F16", "data_offsets": [0, 1e999]}}', length=None)
    @example(head=b'{"a": {"dtype": "F16", "data_offsets": [8, 0]}}', length=None)
    @example(head=b"[" * 100_000, length=None)
    def test_weights(self, folder, head, length):
        prefix = struct.pack("<Q", len(head) if length is None else length)
        file = of_data(folder / "model.safetensors", prefix + head + bytes(12))
        sizes = outcome(lambda: checkpoints.tensor_sizes(file), ModelUnusableError)
        if isinstance(sizes, ModelUnusableError):
            assert str(file) in str(sizes)
        else:
            assert all(0 <= size <= file.stat().st_size for _, size in sizes)

    @settings(max_examples=examples(60))
    @given(data=damaged(config, words=words))
    @example(data=b"[" * 100_000)
    @example(data=b'{"text_config": ' * 50_000)
    def test_config(self, folder, data):
        of_data(folder / "config.json", data)
        config = outcome(lambda: checkpoints.config(folder), ModelUnusableError)
        if isinstance(config, ModelUnusableError):
            assert str(folder) in str(config)
            return
        for about in ("architectures", "dtype", "context", "takes_images", "quantization", "heads", "width", "layers"):
            getattr(config, about)

    @settings(max_examples=examples(60))
    @given(
        data=damaged(
            b'{"chat_template": [{"name": "default", "template": "x"}], "weight_map": {"a": "b"}}', words=words
        )
    )
    @example(data=b"[" * 100_000)
    @example(data=b'{"weight_map": {"a": "../../../../dev/zero", "b": "/etc/passwd", "c": "\\u0000"}}')
    def test_files_beside_it(self, folder, data):
        place = folder / "beside"
        place.mkdir(exist_ok=True)
        of_data(place / "tokenizer_config.json", data)
        of_data(place / "model.safetensors.index.json", data)
        assert isinstance(checkpoints.chat_template(place), str | None)
        with pytest.raises(ModelUnusableError):
            checkpoints.weights(place)


class TestImporters:
    """Other programs' files become a draft, or ConfigError."""

    FORMS = (("llama-swap", "llama-swap.yaml"), ("llama.cpp", "presets.ini"), ("llm-pool", "settings.json"))

    def imports(self, path: Path, form: str, data: bytes) -> None:
        found = outcome(lambda: importers.read([of_data(path, data)], form, path.parent).text(("x",)), ConfigError)
        assert isinstance(found, str) or found.problems

    @pytest.mark.parametrize(("form", "name"), FORMS)
    @settings(max_examples=examples(15))
    @given(data=st.data())
    def test_a_damaged_one(self, folder, form, name, data):
        whole = (GOLDEN / name).read_bytes()
        words = (b"${", b"${a}", b"'", b'"', b"\\", b"--", b"9" * 5000, b"null", b"[]", b"\0", b"1e999", b"\xff")
        self.imports(folder / name, form, data.draw(damaged(whole, words=words)))

    @pytest.mark.parametrize(("form", "name"), FORMS)
    @pytest.mark.parametrize(
        "data", [b"[" * 100_000, b'{"a":' * 50_000, b"", b"null", b"\xff\xfe", b'"', b"a: &a [*a]"]
    )
    def test_bombs(self, folder, form, name, data):
        self.imports(folder / name, form, data)
