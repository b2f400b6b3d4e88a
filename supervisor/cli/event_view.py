"""`llmux events` and `why`: what happened, a line each."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from supervisor.cli import client, show
from supervisor.cli.client import Json
from supervisor.cli.options import print_json_line


def follow(url: str, key: str | None, kinds: Sequence[str], *, as_json: bool) -> None:
    """Print events until the daemon ends them."""
    for event in client.events(url, key, f"/v1/admin/events?types={','.join(kinds)}"):
        data = json.loads(event.data)
        if as_json:
            print_json_line({"event": event.kind, "id": event.id, "data": data})
        else:
            show.say(show.Table([[line(event.kind, data)]], head=False, whole=True))  # of a table a row is a line


def line(kind: str, data: Json) -> list[str | show.Styled]:
    """One event for people."""
    at = data.get("at")
    when = show.clock(time.time() if at is None else at)
    return [f"{when}  ", (f"{kind:8}", "red" if kind == "alert" else "cyan"), "  ", *_told(kind, data)]


def decisions_table(decisions: Sequence[Json], *, with_model: bool) -> show.Table | str:
    """Decisions, a line each, oldest first."""
    rows: list[show.Row] = []
    for decision in decisions:
        when, reason = show.clock(decision.get("at")), show.text(decision.get("reason"))
        model = (show.text(decision.get("model")),) if with_model else ()
        rows.append((when, *model, show.text(decision.get("kind")), reason))
    if not rows:
        return "Nothing was decided yet."
    head = ("TIME", *(("MODEL",) if with_model else ()), "KIND", "REASON")
    return show.Table([head, *rows], whole=True)


def _told(kind: str, data: Json) -> list[str | show.Styled]:
    match kind:
        case "decision":
            return [f"{show.text(data.get('model'))}: {data.get('kind')}: {data.get('reason')}"]
        case "model":
            name, state = data.get("name"), str(data.get("state"))
            numbers = f"{show.text(data.get('in_flight'))} in flight, {show.text(data.get('queued'))} queued"
            rest = f"  {numbers}  {data['reason']}" if "reason" in data else ""
            return [f"{name}: ", show.state(state), rest]
        case "memory":
            free = [
                f"{device.get('id')}: {show.mib(device.get('free_mib'))} free of {show.mib(device.get('total_mib'))}"
                for device in client.rows(data, "devices")
            ]
            return [", ".join(free)]
        case "request":
            return [_request(data)]
        case "alert":
            return [f"{data.get('code')}: {data.get('message')}"]
        case _:
            return [json.dumps(data, ensure_ascii=False)]


def _request(data: Json) -> str:
    start = f"{show.text(data.get('model'))}: {data.get('path')} {data.get('state')}"
    if data.get("state") != "finished":
        return f"{start}  {data.get('request_id')}"
    facts = [f"{data.get('status')}", f"{data.get('total_ms')} ms"]
    facts += [f"{data[name]} {name.replace('_', ' ')}" for name in ("completion_tokens",) if data.get(name) is not None]
    facts += [str(data["error"])] if data.get("error") else []
    return f"{start}  {', '.join(facts)}  {data.get('request_id')}"
