"""deploy/traefik, followed as its page says: a real Traefik with the page's own configuration, in front of a daemon."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import ssl
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from tests.support import traefik
from tests.support.daemon import REPOSITORY, Daemon, fake, running, wait_until
from tests.support.limits import LIMIT_S
from tests.support.ports import quiet_ports

FOLDER = REPOSITORY / "deploy" / "traefik"
HOST = "llm.example.org"
KEY = "sk-llmux-me-0123456789abcdef"
AROUND = [
    "/v1/admin",
    "/v1/%61dmin/models",
    "//v1/admin/models",
    "/v1//admin/models",
    "/v1/./admin/models",
    "/v1/x/../admin/models",
    "/v1/models/%2e%2e/admin/models",
    "/v1/..%2fv1%2fadmin%2fmodels",
    "/v1/.%2fadmin/models",
    "/v1/%5cadmin/models",
    "/v1/ADMIN/models",
    "/v1/;admin/models",
    "/v1/../ui/",
    "/v1/..%2fmetrics",
]
"""Other spellings of what isn't routed."""


class Site:
    """Traefik, and the daemon behind it. `enough` ends the model's answers."""

    def __init__(self, folder, daemon: Daemon, port: int) -> None:
        self.enough, self.daemon, self.port = folder / "enough", daemon, port

    @contextlib.contextmanager
    def asked(
        self, path: str, *, key: str | None = KEY, host: str = HOST, body: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Asks for the path as it is written. Traefik's own certificate is nobody's."""
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=LIMIT_S)
        connection.putrequest("GET" if body is None else "POST", path, skip_host=True)
        connection.putheader("Host", host)
        if key is not None:
            connection.putheader("Authorization", f"Bearer {key}")
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body.encode() if body is not None else None)
        with contextlib.closing(connection), connection.getresponse() as answer:
            yield answer

    def status(self, path: str, **keys) -> int:
        try:
            with self.asked(path, **keys) as answer:
                return answer.status
        except OSError:
            return 0


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("traefik")
    keys = folder / "keys.yaml"
    keys.write_text(yaml.safe_dump([{"name": "me", "key": KEY, "scopes": ["inference", "admin", "metrics"]}]))
    keys.chmod(0o600)
    page = (FOLDER / "README.md").read_text()
    (told,) = (block for block in re.findall(r"```\w*\n(.*?)```", page, re.DOTALL) if "entryPoints:" in block)
    static, port = yaml.safe_load(told), quiet_ports()
    static["providers"]["file"]["directory"] = str(FOLDER)
    static["entryPoints"]["websecure"]["address"] = f"127.0.0.1:{port}"
    (folder / "traefik.yml").write_text(yaml.safe_dump(static))
    config = {
        "models": {"chat": fake("--goes-on-until", str(folder / "enough"))},
        "server": {"api_keys": str(keys), "allowed_hosts": [HOST]},
    }
    with running(folder, config) as daemon:
        variables = {"LLMUX_HOST": HOST, "LLMUX_BACKEND": daemon.url}
        argv = [traefik.program(), f"--configFile={folder / 'traefik.yml'}"]
        with (folder / "traefik.log").open("w") as log:
            proxy = subprocess.Popen(argv, env={**os.environ, **variables}, stdout=log, stderr=log)
        site = Site(folder, daemon, port)
        try:
            wait_until(lambda: site.status("/health") == 200, what=f"Traefik routes; its log: {folder / 'traefik.log'}")
            yield site
        finally:
            proxy.terminate()
            proxy.wait()


class TestRouter:
    """What goes through, and what doesn't."""

    def test_the_pages_table(self, site):
        assert site.status("/health", key=None) == 200
        assert site.status("/v1/models", key=None) == 401
        with site.asked("/v1/models") as answer:
            assert b'"chat"' in answer.read()
        for path in ("/v1/admin/models", "/ui/", "/metrics"):
            with site.asked(path) as answer:
                assert (answer.status, answer.read()) == (404, b"404 page not found\n"), path  # Traefik's own words

    @pytest.mark.parametrize("path", AROUND)
    def test_no_way_around(self, site, path):
        """The key could do it, if it got there."""
        assert site.status(path) in {400, 404}

    def test_another_name_is_not_routed(self, site):
        assert site.status("/health", host="other.example.org") == 404

    def test_a_stream_goes_on_piece_by_piece(self, site):
        """The first piece is here before the answer may end."""
        body = '{"model": "chat", "stream": true, "messages": []}'
        with site.asked("/v1/chat/completions", body=body) as answer:
            assert answer.status == 200
            assert answer.readline().startswith(b"data: {")
            site.enough.touch()
            assert answer.read().endswith(b"data: [DONE]\n\n")
