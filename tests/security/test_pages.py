"""What pages in a browser on this machine can do with a daemon that has no keys."""

from __future__ import annotations

import pytest

from tests.support import raw
from tests.support.cases import cases

HOST = "Host: 127.0.0.1"


def get(target, path, site, *lines):
    return raw.request(target, f"GET {path} HTTP/1.1", HOST, f"Sec-Fetch-Site: {site}", *lines)


class TestCrossSite:
    """An image or a frame of a foreign page sends no Origin with its GET; browsers say where it comes from all the same."""

    @cases("path", ["/stats?model=idle", "/v1/models", "/models", "/v1/admin/models", "/metrics"])
    def test_is_refused(self, target, path):
        told = get(target, path, "cross-site", "Sec-Fetch-Mode: no-cors")
        assert told.status == 403
        assert b"origin_not_allowed" in told.body

    def test_loads_nothing(self, target):
        assert get(target, "/stats?model=idle", "cross-site").status == 403
        assert target.model("idle")["state"] == "stopped"

    @pytest.mark.parametrize("path", ["/v1/admin/models", "/metrics"])
    def test_another_port_of_this_machine_is_no_operator(self, target, path):
        assert get(target, path, "same-site").status == 403

    @cases("site", ["same-origin", "none"])
    @cases("path", ["/v1/models", "/v1/admin/models", "/metrics"])
    def test_our_pages_and_the_address_bar_are_served(self, target, path, site):
        assert get(target, path, site).status == 200

    def test_links_to_what_is_open_work(self, target):
        assert get(target, "/", "cross-site", "Accept: text/html").status == 307
        assert get(target, "/ui/", "cross-site").status == 200

    def test_allowed_origins_are(self, target):
        for origin, status in (("https://chat.example.org", 200), ("https://evil.example", 403)):
            assert get(target, "/v1/models", "cross-site", f"Origin: {origin}").status == status


class TestEventStreams:
    """Those of clients don't take an operator's places."""

    def test_places_are_left_for_operators(self, target):
        with target.client() as client:
            streams = []
            try:
                for _ in range(70):
                    stream = client.stream("GET", "/models/sse")
                    answer = stream.__enter__()
                    streams.append(stream)
                    if answer.status_code != 200:
                        break
                else:
                    pytest.fail("no bound")
                with client.stream("GET", "/v1/admin/events") as answer:
                    assert answer.status_code == 200
            finally:
                for stream in streams:
                    stream.__exit__(None, None, None)

    @pytest.mark.parametrize("path", ["/v1/admin/events", "/models/sse", "/v1/admin/models/plain/logs?follow=true"])
    def test_a_head_request_ends(self, target, path):
        with target.client() as client:
            for _ in range(2):
                assert client.head(path).status_code == 405
