"""`llmux serve`: find or write the configuration, print the models and how to use them, run the daemon."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import structlog

from supervisor.catalog import Catalog, Configuration
from supervisor.catalog.loading.folders import state_dir
from supervisor.catalog.loading.loader import require_config
from supervisor.cli.configuration import found, has_models, of_folder, pool_variables
from supervisor.cli.demo import write_demo
from supervisor.cli.environments.environments import install
from supervisor.cli.options import counted
from supervisor.cli.serving.log_setup import configure, say
from supervisor.errors import ConfigError, LlmuxError
from supervisor.host.process import notify

log = structlog.get_logger("llmux.serve")

DEMO_RUNTIME = "llama_server"


def serve(config: Path | None, flags: Mapping[str, object], *, demo: bool, takeover: bool, as_json: bool) -> None:
    """Run until a signal. Without any configuration, serve the demo and say so; as a service, refuse to start.

    With `as_json` stdout gets one line only, once the daemon listens; all other output goes to stderr.
    """
    local = config is not None and has_models(config)
    if config is not None and local:
        configuration: Configuration | None = of_folder(config, flags)
    else:
        configuration = None if demo else found(config, flags)
    if configuration is None and not demo:
        if notify.is_supervised():
            require_config(config)
        click.echo(
            "No configuration found: serving the demo. Write your own: llmux config example explains every key.",
            err=as_json,
        )
        demo = True
    if demo:
        named = flags.get("server.state_dir")
        folder = Path(str(named)) if named is not None else state_dir() / "demo"
        flags = {**flags, "server.state_dir": str(folder)}
        os.environ.pop("MODEL_BASE_PATH", None)  # set by runners; the demo's models lie elsewhere
        configuration = Configuration(write_demo(folder).absolute(), flags)
    assert configuration is not None
    catalog = configuration.read()
    if nothing := catalog.nothing_to_serve():
        raise ConfigError((nothing,))
    from supervisor.server.known_uvicorn import refuse_unknown_uvicorn  # noqa: PLC0415  # late, as below

    refuse_unknown_uvicorn()
    if local:
        _install_runtimes(catalog, lambda line: click.echo(line, err=as_json))
    if demo and not any((catalog.server.runtimes_dir / DEMO_RUNTIME / "bin").glob("python")):
        click.echo("Installing the embedded llama.cpp server, once:", err=as_json)
        folder = catalog.server.runtimes_dir  # plain: the demo's models are too small to need a GPU
        install(DEMO_RUNTIME, folder, lambda line: click.echo(f"  {line}", err=as_json), plain=True)
    configure(catalog.server.log_level, catalog.server.log_format)
    _log_source(configuration)
    gc.disable()  # objects of the start live on; `settle_garbage_collector` enables it again
    from supervisor.cli.serving.daemon import run  # noqa: PLC0415  # late, because this import takes most of the start

    def on_listening(url: str, keys: int) -> None:
        text = json.dumps(greeting(catalog, url, keys)) if as_json else welcome(catalog, url, keys)
        say(text)

    run(configuration, catalog, on_listening=on_listening, takeover=takeover)


def _install_runtimes(catalog: Catalog, echo: Callable[[str], None]) -> None:
    """Install the runtimes that the models of a folder need; where one fails, the other models are still served."""
    from supervisor.cli.models.model_entries import install_for  # noqa: PLC0415  # only here

    if not catalog.models:
        echo("There are no models in it yet: each file that comes is served once it is whole.")
    for model in catalog.models.values():
        try:
            install_for([model], catalog, echo)
        except LlmuxError as error:
            echo(f"{model.id}: {error}")


def _log_source(configuration: Configuration) -> None:
    """Log the source of the settings, unless that is a file of llmux alone and no variable of llm-pool is set."""
    if configuration.foreign is not None and not configuration.foreign.files:
        log.info("configuration.variables", hint="llmux config show says which variable says what")
    elif configuration.foreign is not None and pool_variables():
        files = [str(file) for file in configuration.foreign.files if file.is_file()]
        log.info("configuration.imported", program="llm-pool", files=files, hint="llmux config import shows the result")
    elif ignored := pool_variables():
        log.info("configuration.not_imported", ignored=ignored, used=str(configuration.base))


def greeting(catalog: Catalog, url: str, keys: int) -> dict[str, str | int | list[str]]:
    return {
        "url": url,
        "api": f"{url}/v1",
        "dashboard": f"{url}/ui/",
        "pid": os.getpid(),
        "keys": keys,
        "models": [entry.name for entry in catalog.listing()],
        "state_dir": str(catalog.server.state_dir),
    }


def command() -> str:
    """The command that calls this same program from the current folder."""
    return "llmux" if shutil.which("llmux") else os.path.relpath(sys.argv[0])


def welcome(catalog: Catalog, url: str, keys: int) -> str:
    """The facts that a person needs next: the URL, a request to paste, settings for clients, the places of files."""
    listing = catalog.listing()
    chat = next((entry for entry in listing if entry.model.config.type == "llm"), None)
    lines = [f"llmux serves {counted(len(listing), 'model')} at {url}/v1", f"Dashboard: {url}/ui/"]
    authorization = "" if not keys else " -H 'Authorization: Bearer <key>'"
    if chat is not None:
        body = f'{{"model":"{chat.name}","messages":[{{"role":"user","content":"Hello"}}]}}'
        lines += [
            "",
            "Try it:",
            f"  curl {url}/v1/chat/completions{authorization} -H 'Content-Type: application/json' -d '{body}'",
        ]
    lines += [
        "",
        "Open WebUI (Admin Settings > Connections > OpenAI API):",
        f"  URL: {url}/v1",
        "  Key: "
        + (
            "one of yours (llmux keys list)" if keys else "anything (no keys are configured: only this machine gets in)"
        ),
        "",
        f"Models:  {', '.join(entry.name for entry in listing)}",
        f"State:   {catalog.server.state_dir}",
        f"Logs:    {catalog.server.state_dir / 'logs'} (workers); the daemon's own on stderr",
        f"Look:    {command()} ps --url {url}",
        f"         {command()} why --url {url}",
        "",
    ]
    return "\n".join(lines)
