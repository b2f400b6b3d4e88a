"""`llmux service`: llmux as a systemd user service.

The folder `systemd` has the units for a llmux in ~/.local/bin; `install` adapts them to this machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from supervisor.catalog import Catalog, Configuration
from supervisor.catalog.keys import Keyring, is_loopback, load_keys, refuse_exposed
from supervisor.catalog.loading.folders import config_dir
from supervisor.cli.configuration import refuse_foreign, required
from supervisor.core.types import ModelId
from supervisor.errors import ConfigError, LlmuxError
from supervisor.host.store import files

UNIT: Final = "llmux.service"
SOCKET: Final = "llmux.socket"
PROGRAM: Final = "%h/.local/bin/llmux"
SEAL: Final = re.compile(
    r"^(NoNewPrivileges|LockPersonality|RestrictSUIDSGID|SystemCallArchitectures|RestrictAddressFamilies)=.*\n",
    re.MULTILINE,
)
"""Settings of a unit that forbid set-uid programs: the first one directly, the others as a side effect in a user's service."""
ADDRESS: Final = "127.0.0.1"
PORT: Final = 8081
UNITS: Final = Path(__file__).parent / "systemd"
STOP_S: Final = 3600.0  # for running requests; systemd has its own limit
Echo = Callable[[str], None]


class ServiceError(LlmuxError):
    """systemd refused; the message has systemd's own."""

    code = "service_failed"


def service_unit(program: str = PROGRAM, arguments: tuple[str, ...] = (), *, sealed: bool = True) -> str:
    """The unit file. `program` is an absolute path; `%h` is the home folder. `sealed`: the service can't run set-uid programs."""
    command = " ".join(map(_quoted_word, (program, "serve", *arguments)))
    text = (UNITS / UNIT).read_text(encoding="utf-8").replace(f"{PROGRAM} serve", command)
    text = text.replace(f"{PROGRAM} reload", f"{_quoted_word(program)} reload")
    return text if sealed else SEAL.sub("", text)


def unsealed(catalog: Catalog) -> list[ModelId]:
    """The models that can't start in a sealed service."""
    return [model.id for model in catalog.models.values() if model.adapter.needs_set_uid(model.config)]


def socket_unit(host: str = ADDRESS, *ports: int) -> str:
    """The unit file of the socket; without `ports`, for the default port."""
    name = f"[{host}]" if ":" in host else host
    listening = "\n".join(f"ListenStream={name}:{port}" for port in ports or (PORT,))
    return (UNITS / SOCKET).read_text(encoding="utf-8").replace(f"ListenStream={ADDRESS}:{PORT}", listening)


def _quoted_word(word: str) -> str:
    """A word quoted for systemd; specifiers such as `%h` still work."""
    if not any(character in word for character in " \t\"'\\"):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _literal_word(word: str) -> str:
    """A word that systemd takes literally: no specifier, no variable."""
    return word.replace("%", "%%").replace("$", "$$")


def folder() -> Path:
    return config_dir().with_name("systemd") / "user"


def program() -> str:
    """The absolute path of the running llmux command."""
    called = Path(sys.argv[0])
    beside = Path(sys.executable).with_name("llmux")
    for path in (called if called.name == "llmux" else beside, beside):
        if path.is_file():
            return str(path.absolute())
    found = shutil.which("llmux")
    if found is None:
        raise ServiceError(
            "There is no llmux command to start; install llmux first, with uv tool install or pipx install."
        )
    return found


def install(echo: Echo, *, config: Path | None, linger: bool, start: bool, address: tuple[str, int] | None) -> None:
    """Write the unit (and the socket unit with `address`), let systemd read it, start the service; `echo` gets each step.

    The unit names the configuration, since systemd may look elsewhere than this shell. Raises ConfigError without a
    configuration, or when others could reach `address` and there are no keys; ServiceError when systemd refuses.
    """
    configuration = required(config)
    refuse_foreign(configuration)
    base = configuration.base
    if address is not None:
        _check_exposure(address[0], base)
    unit, arguments = folder() / UNIT, ("--config", _literal_word(str(base)))
    open_for = _unsealed_models(configuration)
    changed = _write_unit(unit, service_unit(_literal_word(program()), arguments, sealed=not open_for), echo)
    if open_for:
        echo(f"left NoNewPrivileges and the like out: podman, which runs {', '.join(open_for)}, needs set-uid programs")
    if address is not None:
        extra = configuration.server().extra_ports.values()
        changed |= _write_unit(folder() / SOCKET, socket_unit(*address, *extra), echo)
    wanted = SOCKET if address is not None else UNIT
    enable = ["enable", *(["--now"] if start else []), wanted]
    if not _is_systemd_reachable():
        echo("systemd's user manager can't be reached from here. When you are logged in, run:")
        echo(f"  systemctl --user daemon-reload && systemctl --user {' '.join(enable)}")
    else:
        _systemctl("daemon-reload")
        echo("told systemd to read its units again")
        _enable_unit(wanted, enable, echo, changed=changed, start=start)
    if linger:
        run(["loginctl", "enable-linger", str(os.getuid())])
        echo("enabled linger; llmux starts at boot and outlives your logout")
    else:
        echo("llmux ends when you log out, unless lingering is on: llmux service install --linger")
    echo(f"secrets and variables for it, a NAME=value in each line: {config_dir() / 'environment'}")
    echo("logs: journalctl --user -u llmux -f")


def _unsealed_models(configuration: Configuration) -> list[ModelId]:
    with contextlib.suppress(ConfigError):  # `serve` reports the mistakes
        return unsealed(configuration.read())
    return []


def _check_exposure(host: str, base: Path) -> None:
    """Raises ConfigError when the daemon would refuse to listen on this host."""
    if is_loopback(host):
        return
    path = Configuration(base).keys_file()
    refused = refuse_exposed(host, load_keys(path) if path.exists() else Keyring(), "--socket")
    if refused is not None:
        raise ConfigError((refused,))


def _enable_unit(wanted: str, enable: list[str], echo: Echo, *, changed: bool, start: bool) -> None:
    """Enable the unit and start it. systemd can't begin to listen for a running service, so such a service is restarted."""
    is_running = _systemctl("show", UNIT, "--property=ActiveState", "--value").strip() in {"active", "reloading"}
    if is_running and start and wanted == SOCKET:
        echo(f"stopping {UNIT}, after its running requests, so that systemd can listen instead of it")
        _systemctl("stop", UNIT, SOCKET, limit_s=STOP_S)
        _systemctl(*enable)
        _systemctl("start", UNIT)
        echo(f"enabled {wanted}, and started both again")
        return
    _systemctl(*enable)
    echo(f"enabled {wanted}" + (" and started it" if start else ""))
    if is_running and changed:
        echo("llmux goes on as it was started; what is new in the unit counts from: systemctl --user restart llmux")


def uninstall(echo: Echo) -> None:
    present = [name for name in (SOCKET, UNIT) if (folder() / name).exists()]
    if not present:
        echo("llmux is not installed as a service")
        return
    if _is_systemd_reachable():
        for name in present:
            _systemctl("disable", "--now", name)
            echo(f"stopped and disabled {name}")
    for name in present:
        (folder() / name).unlink()
        echo(f"removed {folder() / name}")
    if _is_systemd_reachable():
        _systemctl("daemon-reload")


def status(echo: Echo) -> dict[str, str]:
    unit = folder() / UNIT
    facts = {"unit": str(unit) if unit.exists() else "not installed: llmux service install"}
    if not _is_systemd_reachable():
        facts["systemd"] = "the user manager can't be reached from here"
    elif unit.exists():
        properties = ("ActiveState", "SubState", "MainPID", "NRestarts", "UnitFileState", "StatusText")
        for line in _systemctl("show", UNIT, *(f"--property={name}" for name in properties)).splitlines():
            name, _, value = line.partition("=")
            facts[name] = value
    for name, value in facts.items():
        echo(f"{name:14} {value}")
    return facts


def _write_unit(path: Path, text: str, echo: Echo) -> bool:
    """Write a unit unless it is unchanged; returns whether it was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        echo(f"unchanged: {path}")
        return False
    with files.replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")
    echo(f"wrote {path}")
    return True


def _is_systemd_reachable() -> bool:
    try:
        _systemctl("show-environment")
    except ServiceError:
        return False
    return True


def _systemctl(*words: str, limit_s: float = 60.0) -> str:
    return run(["systemctl", "--user", *words], limit_s)


def run(argv: list[str], limit_s: float = 60.0) -> str:
    """Run a program and return its output. Raises ServiceError where it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceError(f"{' '.join(argv)}: {error}") from error
    if done.returncode != 0:
        raise ServiceError(f"{' '.join(argv)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
