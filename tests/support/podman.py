"""podman without root, with images, volumes and pods of its own: nothing of the user's is seen or changed.

As root, an account is made for it once (`llmux-podman`), because only a user with further ids of its own (/etc/subuid) can
have containers without root; and where the machine still has the old control groups, podman gets a mount namespace that shows
the new ones.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.support.build_llama_server import CACHE
from tests.support.daemon import REPOSITORY

ACCOUNT = "llmux-podman"
IMAGE = "localhost/llmux"
BASE = "docker.io/library/python:3.13-slim-trixie"
BUILD_S = 1200

_NAMESPACE = """
[ -f /sys/fs/cgroup/cgroup.controllers ] || mount -t cgroup2 none /sys/fs/cgroup
mount --make-rshared /
echo ready
exec sleep infinity
"""


class Podman:
    """A person with podman: `folder` is their home. `close` removes all of it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="llmux-podman-"))
        (self.folder / "run").mkdir(mode=0o700)
        settings = self.folder / ".config" / "containers"
        settings.mkdir(parents=True)
        (settings / "storage.conf").write_text(
            '[storage]\ndriver = "overlay"\n'
        )  # `vfs` would copy the image for each layer
        self._namespace: subprocess.Popen[str] | None = None
        self._prefix: list[str] = []
        if os.geteuid() == 0:
            self._leave_root()
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("LLMUX_", "XDG_"))},
            "HOME": str(self.folder),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
        }

    def __call__(self, *words: str | Path, limit_s: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program as this person, in their home."""
        return subprocess.run(
            [*self._prefix, *words],
            cwd=self.folder,
            env=self.env | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def done(self, *words: str | Path, limit_s: float = 300, **variables: str) -> str:
        """The same for one that must succeed; what it prints."""
        told = self(*words, limit_s=limit_s, **variables)
        assert told.returncode == 0, f"{words}: {told.stdout}{told.stderr}"
        return told.stdout

    def owned(self) -> None:
        """Whatever was put into the home is theirs."""
        if self._prefix:
            self_made = ["find", str(self.folder), "-xdev", "-user", "root", "-exec", "chown", "-h", ACCOUNT, "{}", "+"]
            subprocess.run(self_made, check=True)

    def build(self) -> None:
        """The image, from this checkout's files, as `make image` builds it."""
        context = self.folder / "source"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=REPOSITORY,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (REPOSITORY / name).is_file():
                (context / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, context / name)
        self.owned()
        words = ["make", "-C", str(context), "image", f"BASE={self._base()}"]
        self.done(*words, limit_s=BUILD_S)

    def close(self) -> None:
        self("podman", "pod", "rm", "--all", "--force", "--time", "1")
        self("podman", "system", "reset", "--force")
        self(
            "podman",
            "unshare",
            "sh",
            "-c",
            f"umount -l {self.folder}/.local/share/containers/storage/overlay; rm -rf {self.folder}/.local",
        )
        home = f"HOME={self.folder}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):  # what keeps the namespaces between two commands
            with contextlib.suppress(OSError):
                if home in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
        if self._namespace is not None:
            self._namespace.send_signal(signal.SIGTERM)
            self._namespace.communicate(timeout=60)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _base(self) -> str:
        """Python's own image where a registry can be asked, else Debian's Python from Debian's mirror."""
        if given := os.environ.get("LLMUX_IMAGE_BASE"):
            return given
        if self("podman", "pull", "--quiet", BASE).returncode == 0:
            return BASE
        assert shutil.which("mmdebstrap"), f"needs {BASE}, or mmdebstrap to make its like from Debian's mirror"
        packages = "--include=python3,python3-venv,ca-certificates"
        made = CACHE / "python-trixie.tar"
        authorities = "copy-in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs"  # also those of a proxy in between
        command = ["mmdebstrap", "--quiet", "--variant=minbase", packages, f"--customize-hook={authorities}"]
        if not made.exists():
            partial = made.with_name("python-trixie.partial.tar")
            subprocess.run([*command, "trixie", partial], check=True, timeout=BUILD_S)
            partial.replace(made)
        archive = shutil.copy(made, self.folder / "base.tar")
        self.owned()
        self.done("podman", "import", archive, "localhost/python", limit_s=BUILD_S)
        return "localhost/python"

    def _leave_root(self) -> None:
        try:
            account = pwd.getpwnam(ACCOUNT)
        except KeyError:
            subprocess.run(["useradd", "--create-home", ACCOUNT], check=True)
            account = pwd.getpwnam(ACCOUNT)
        self._namespace = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "slave", "sh", "-c", _NAMESPACE], stdout=subprocess.PIPE, text=True
        )
        assert self._namespace.stdout is not None
        assert self._namespace.stdout.readline() == "ready\n"
        inside = ["nsenter", "--mount", "--target", str(self._namespace.pid), f"--wdns={self.folder}"]
        user = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups"]
        self._prefix = [*inside, *user]
        self.owned()
