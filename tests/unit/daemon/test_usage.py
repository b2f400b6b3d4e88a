"""What each key used on each day."""

from __future__ import annotations

import csv
import io

from msgspec.structs import replace

from supervisor.daemon.observability import usage
from supervisor.daemon.observability.usage import as_csv, rows, summed, used
from supervisor.gateway.record import RequestLine, RequestRecord
from tests.support.cases import cases


def ended(key: str | None = "anna", model: str | None = "a", **more: object) -> RequestRecord:
    said = {"key": key, "status": 200, "error": None, "prompt_tokens": 10, "completion_tokens": 4, **more}
    line = dict.fromkeys(RequestLine.__struct_fields__[:14]) | said
    key_id = "" if key is None else f"key_{key}"
    return RequestRecord(**line, id="1", ended_at=12.0, admitted_at=2.0, model_id=model, key_id=key_id)


class TestOne:
    """A request that has ended."""

    def test_tokens_and_whether_it_failed(self):
        one = used(replace(ended(status=500, error="upstream_error"), cached_tokens=7), 0.0)
        assert one[4:9] == (1, 1, 10, 7, 4)
        assert used(ended(None, None, prompt_tokens=None, completion_tokens=None), 0.0)[1:9] == (
            "",
            "(no key)",
            "",
            1,
            0,
            0,
            0,
            0,
        )

    @cases(
        ("devices", "gpu_s"),
        [
            (("cuda:0",), 10.0),
            (("cuda:0", "cuda:1"), 20.0),
            (("cuda:0", "host"), 10.0),
            (("host",), 0.0),
            (("remote",), 0.0),
            ((), 0.0),
        ],
    )
    def test_seconds_of_its_gpus(self, devices, gpu_s):
        assert used(replace(ended(), devices=devices), 0.0).gpu_s == gpu_s

    def test_that_no_worker_had(self):
        assert used(replace(ended(), devices=("cuda:0",), admitted_at=None), 0.0).gpu_s == 0.0

    def test_counts_on_the_day_of_its_end(self, monkeypatch):
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        import time

        time.tzset()
        usage._day.cache_clear()
        try:
            day_s = 20_000 * 86_400
            assert [used(ended(), day_s + hour * 3600 - 12).day for hour in (0, 14, 15)] == ["2024-10-04"] * 2 + [
                "2024-10-05"
            ]
        finally:
            monkeypatch.undo()
            time.tzset()
            usage._day.cache_clear()


class TestSums:
    """For a day, a key, and a model."""

    def test_by_model_or_not(self):
        all_used = [used(ended(model=name), 0.0) for name in ("a", "b", "a")] + [used(ended("bert"), 0.0)]
        assert [(one.key, one.model, one.requests) for one in summed(all_used)] == [
            ("anna", "a", 2),
            ("anna", "b", 1),
            ("bert", "a", 1),
        ]
        together = rows(all_used, by_model=False)
        assert [(one.key, one.model, one.requests, one.prompt_tokens) for one in together] == [
            ("anna", None, 3, 30),
            ("bert", None, 1, 10),
        ]

    @cases("name", ["=HYPERLINK(1)", "+1", "-1", "@SUM", "\tx", 'a"b', "a,b", "a\r\nb"])
    def test_no_name_is_a_formula_or_another_cell(self, name):
        text = as_csv(rows([used(ended(name), 0.0)], by_model=False), by_model=False)
        head, row = csv.reader(io.StringIO(text, newline=""))
        found = dict(zip(head, row, strict=True))
        assert found["key"].removeprefix("'") == name
        assert not found["key"].startswith(("=", "+", "-", "@", "\t", "\r"))
        assert text.endswith("\r\n")
