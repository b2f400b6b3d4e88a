"""`llmux run`, `llmux add` and `llmux remove`: get a model of the hub, chat with it, remove it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from supervisor.cli import operations, output
from supervisor.cli.client import Client, url_of
from supervisor.cli.commands.chat import Conversation, chat_options, converse, question
from supervisor.cli.options import (
    ask_options,
    complete_configured,
    complete_public,
    config_option,
    counted,
    json_option,
    print_json,
)
from supervisor.errors import InvalidRequestError, LlmuxError, NotFoundError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from supervisor.cli.models.hub_models import Reference
    from supervisor.cli.models.model_entries import Offer, Target
    from supervisor.cli.models.pull import ShowAmount

name_option = click.option("--name", help="Its name for clients. Default: the repository's, in small letters.")
LAST_LINES: Final = 10
_echo = functools.partial(click.echo, err=True)


@click.command()
@click.argument("model", shell_complete=complete_public)
@click.argument("prompt", nargs=-1)
@chat_options
@name_option
@config_option
@ask_options
@json_option
def run(
    model: str,
    prompt: tuple[str, ...],
    system: str | None,
    max_tokens: int | None,
    no_thinking: bool,
    name: str | None,
    config: Path | None,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Chat with MODEL: a configured one, a GGUF file, or one of the model hub: ORG/REPO-GGUF, ORG/REPO-GGUF:Q4_K_M, llama3.2.

    A model of the hub or a file is added first, as llmux add does. Where no daemon runs, one is started and ends with the chat.
    With PROMPT, or a prompt on stdin, get one answer.
    """
    from supervisor.catalog.models import local_models  # noqa: PLC0415  # not for declaring
    from supervisor.cli.models import model_entries  # noqa: PLC0415  # not for declaring

    place = model_entries.target(config)
    if local_models.is_path(model) and place.catalog.route(model) is None:
        place.check_writable()
        (only, *others) = model_entries.add_files(place, Path(model), name, _echo)
        if others:
            raise InvalidRequestError(
                f"{model} has several models: {', '.join((only, *others))}. Run one of them by its name."
            )
        model, place = only, model_entries.target(place.path)
    is_served = place.catalog.route(model) is None and _is_served(place, model, url, key)
    known = model if is_served else _configured_name(place, model)
    text = question(prompt, as_json=as_json)
    if known is None:
        place.check_writable()
        known, place = _add_from_hub(place, model, name)
    elif not is_served:
        model_entries.print_device_note(place.catalog, known, _echo)
    with _serving_daemon(place, known, url, key) as daemon:
        converse(Conversation(daemon, known, system, max_tokens, thinking=not no_thinking), text, as_json=as_json)


@click.command()
@click.argument("model")
@click.option("--dry-run", is_flag=True, help="Only show what there is, and what would be taken.")
@click.option(
    "--watched",
    is_flag=True,
    help="For programs: print the progress in bytes, then the added models, as JSON lines; stop when standard input ends; reload no daemon.",
)
@name_option
@config_option
@ask_options
@json_option
def add(
    model: str,
    dry_run: bool,
    watched: bool,
    name: str | None,
    config: Path | None,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Enter MODEL in the configuration, fetched from the model hub if it is there; a running daemon reloads it.

    MODEL may be a GGUF file, or a folder: then all models in it are entered, GGUF files and Hugging Face
    folders. Else it is ORG/REPO, ORG/REPO:QUANTISATION, the same behind hf://, the address of its page, or a
    well-known name such as llama3.2 or qwen3:4b. Without a quantisation it is the best that fits this
    machine; Q4_K_M on a processor. Gated models need a token: HF_TOKEN.
    """
    from supervisor.catalog.document.yaml_writer import to_yaml  # noqa: PLC0415  # not for declaring
    from supervisor.catalog.models import local_models  # noqa: PLC0415  # not for declaring
    from supervisor.cli.models import model_entries  # noqa: PLC0415  # not for declaring
    from supervisor.cli.models import pull as pulling  # noqa: PLC0415  # not for declaring

    if watched:
        pulling.end_with_stdin()
    place = model_entries.target(config)
    found: Offer | None = None
    names: list[str] = []
    problems: list[str] = []
    new: dict[str, JsonValue] = {}  # the entries
    if local_models.is_path(model):
        if dry_run:
            there, problems = local_models.find(Path(model))
            planned, _, _ = model_entries.with_models_entered(place, there, name)
            for line in (*(f"{called}: {path}" for path, called in planned.items()), *problems):
                _echo(line)
            names = list(planned.values())
            new = {planned[one.path]: dict(one.entry) for one in there if planned[one.path] not in place.catalog.models}
        else:
            place.check_writable()
            names = model_entries.add_files(place, Path(model), name, _echo)
            place = model_entries.target(place.path)
    known = names[0] if names else _configured_name(place, model)
    is_new = known is None or bool(new)
    if known is None:
        if not dry_run:
            place.check_writable()
        found = _show_offer(place, model)
        if dry_run:
            known = model_entries.free_name(place.catalog, _parse_reference(model), found.taken, name)
            new = {known: dict(found.taken.entry)}
        else:
            known, place = _add_from_hub(place, model, name, found, pulling.show_amount if watched else None)
    elif not names:
        _echo(f"{model} is configured already, as {known}.")
    daemon = _client_of(place, url, key)
    runs = not (dry_run or watched) and _reload_daemon(place, daemon, removed=False)
    reloaded = runs and daemon.serves(known)
    if runs and not reloaded:
        _echo(f"The daemon at {daemon.url} does not serve {known}: it runs with another configuration.")
    if as_json or watched:
        variants = found.rows(_parse_reference(model)) if found is not None else []
        result = {
            "name": known,
            "names": names or [known],
            "is_new": is_new,
            "config": str(place.path),
            "entry": to_yaml({"models": new}) if new else "",
            "device": found.device.label if found is not None else None,
            "why": found.why if found is not None else "",
            "variants": variants,
            "problems": problems,
            "reloaded": reloaded,
        }
        print_json(result, indent=None if watched else 2)
    elif not dry_run:
        _echo(f"Use it: llmux chat {known}" if reloaded else f"Use it: llmux run {known}")


@click.command()
@click.argument("model", shell_complete=complete_configured)
@click.option("--files", is_flag=True, help="Delete the files that were pulled for it, too. Asks first.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@config_option
@ask_options
@json_option
def remove(
    model: str, files: bool, yes: bool, config: Path | None, url: str | None, key: str | None, as_json: bool
) -> None:
    """Take MODEL out of the configuration; a running daemon unloads it. Its files stay, unless --files is given."""
    from supervisor.catalog.models import pulled_files  # noqa: PLC0415  # not for declaring
    from supervisor.cli.models import model_entries  # noqa: PLC0415  # not for declaring

    place = model_entries.target(config)
    place.check_writable()
    folder, names = pulled_files.pulled(place.catalog, model_entries.removable(place, model))
    deleted = names if files else []
    if deleted and not yes:
        if as_json or not sys.stdin.isatty():
            raise click.UsageError("Nobody can be asked here whether to delete the files: give --yes.")
        deleted_files = output.clean("\n  ".join(str(folder / name) for name in deleted))
        click.confirm(f"Delete {counted(len(deleted), 'file')}?\n  {deleted_files}\n", abort=True, err=True)
    model_entries.remove(place, model)
    _echo(f"{model}: taken out of {place.path}")
    reloaded = _reload_daemon(place, _client_of(place, url, key), removed=True)
    if deleted:
        pulled_files.delete(folder, deleted, place.catalog.server.models_dir)
        _echo(f"{model}: deleted {counted(len(deleted), 'file')} in {folder}")
    elif names:
        _echo(f"{model}: its files are still in {folder}")
    if as_json:
        paths = [str(folder / name) for name in deleted]
        print_json({"name": model, "config": str(place.path), "deleted": paths, "reloaded": reloaded})


def _configured_name(place: Target, model: str) -> str | None:
    """The configured name of the model; None: `model` is a name on the hub. Raises NotFoundError for a name that is neither."""
    from supervisor.cli.models import hub_models, model_entries  # noqa: PLC0415  # not for declaring

    if place.catalog.route(model) is not None:
        return model
    wanted = hub_models.reference(model)
    if wanted is None:
        nearest = place.catalog.nearest(model)
        meant = f" Did you mean {nearest!r}?" if nearest is not None else ""
        if sizes := hub_models.sizes(model):
            meant = f" By its short name llmux knows {', '.join(sizes)}."
        raise NotFoundError(
            f"There is no model {model!r} in {place.path}.{meant} A model of the hub is named ORG/REPO or ORG/REPO:QUANT."
        )
    return model_entries.configured(place.catalog, wanted)


def _show_offer(place: Target, model: str) -> Offer:
    """The hub's variants of the model, also printed as a table on stderr, since stdout is for an answer or for JSON."""
    from supervisor.cli.models import model_entries  # noqa: PLC0415  # not for declaring

    wanted = _parse_reference(model)
    if wanted.name is not None:
        _echo(f"{model} is {wanted.repo} on the model hub.")
    found = model_entries.offer(place.catalog, wanted)
    output.show(found.table(), err=True)
    if found.why:
        _echo(found.why)
    return found


def _add_from_hub(
    place: Target, model: str, name: str | None, found: Offer | None = None, show_amount: ShowAmount | None = None
) -> tuple[str, Target]:
    """Add a model of the hub; returns its name and the changed configuration."""
    from supervisor.cli.models import model_entries  # noqa: PLC0415  # not for declaring

    found = found or _show_offer(place, model)
    known = model_entries.add(place, _parse_reference(model), found, name, _echo, show_amount)
    return known, model_entries.target(place.path)


def _parse_reference(model: str) -> Reference:
    from supervisor.cli.models import hub_models  # noqa: PLC0415  # not for declaring

    found = hub_models.reference(model)
    assert found is not None  # `_configured_name` refuses other names
    return found


def _client_of(place: Target, url: str | None, key: str | None) -> Client:
    server = place.catalog.server
    return Client(url or url_of(server.host, server.port), key)


def _is_served(place: Target, model: str, url: str | None, key: str | None) -> bool:
    """Whether a running daemon serves a model by this name, even if the configuration here has none."""
    from supervisor.cli import session  # noqa: PLC0415  # not for declaring

    daemon = _client_of(place, url, key)
    with contextlib.suppress(LlmuxError):  # such as a missing key
        return session.is_daemon(daemon) and daemon.serves(model)
    return False


def _reload_daemon(place: Target, daemon: Client, *, removed: bool) -> bool:
    """Let a running daemon reload its configuration; False: no daemon runs. `removed`: also where that removes the last model."""
    from supervisor.cli import session  # noqa: PLC0415  # not for declaring

    if not session.is_daemon(daemon):
        return False
    try:
        daemon.call(operations.RELOAD_CONFIGURATION, {"force": removed})
    except LlmuxError as error:
        message = f"{place.path} is written, but the daemon at {daemon.url} has not reloaded it: {error.message}"
        raise type(error)(message, detail=error.detail) from error
    return True


def _attach_log_lines(error: LlmuxError, daemon: Client, model: str) -> None:
    """Add the last lines of a failed worker's log to the error: this daemon ends with the chat, and then nobody can ask for them."""
    if error.code == "model_failed" and not error.detail:
        with contextlib.suppress(LlmuxError):
            lines = daemon.text(operations.READ_LOGS, {"lines": LAST_LINES}, name=model)
            error.detail = tuple(lines.splitlines())


@contextlib.contextmanager
def _serving_daemon(place: Target, name: str, url: str | None, key: str | None) -> Iterator[Client]:
    """A client of a daemon that serves this model: of the running daemon, else of a new one that ends with the block."""
    from supervisor.cli import session  # noqa: PLC0415  # not for declaring

    daemon = _client_of(place, url, key)
    if url is None and not session.is_daemon(daemon):
        with session.own_daemon(daemon, place.arguments, place.catalog.server.state_dir, _echo) as own:
            if own is not None:
                started = Client(own, key)
                try:
                    yield started
                except LlmuxError as error:
                    _attach_log_lines(error, started, place.catalog.resolve(name).model.id)
                    raise
                return
    if not daemon.serves(name):
        _reload_daemon(place, daemon, removed=False)
        if not daemon.serves(name):
            raise NotFoundError(
                f"The daemon at {daemon.url} does not serve {name}: it runs with another configuration than {place.path}. "
                "Name that with --config, or stop the daemon."
            )
    yield daemon
