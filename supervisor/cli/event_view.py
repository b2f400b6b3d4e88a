"""`llmux events` and `why`: what happened, a line each."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from supervisor.cli import client, output
from supervisor.cli.client import Client, Json
from supervisor.cli.options import print_json_line


def follow(daemon: Client, kinds: Sequence[str], *, as_json: bool) -> None:
    """Print events until the daemon ends the stream."""
    for event in daemon.events(f"/v1/admin/events?types={','.join(kinds)}"):
        data = json.loads(event.data)
        if as_json:
            print_json_line({"event": event.kind, "id": event.id, "data": data})
        else:
            output.show(
                output.Table([[line(event.kind, data)]], head=False, whole=True)
            )  # a table's row is never wrapped


def line(kind: str, data: Json) -> list[str | output.Styled]:
    """One event for people."""
    at = data.get("at")
    when = output.clock(time.time() if at is None else at)
    return [f"{when}  ", (f"{kind:8}", "red" if kind == "alert" else "cyan"), "  ", *_told(kind, data)]


def decisions_table(decisions: Sequence[Json], *, with_model: bool) -> output.Table | str:
    """Decisions, a line each, oldest first."""
    rows: list[output.Row] = []
    for decision in decisions:
        when, reason = output.clock(decision.get("at")), output.text(decision.get("reason"))
        model = (output.text(decision.get("model")),) if with_model else ()
        rows.append((when, *model, output.text(decision.get("kind")), reason))
    if not rows:
        return "Nothing was decided yet."
    head = ("TIME", *(("MODEL",) if with_model else ()), "KIND", "REASON")
    return output.Table([head, *rows], whole=True)


def _told(kind: str, data: Json) -> list[str | output.Styled]:
    match kind:
        case "decision":
            return [f"{output.text(data.get('model'))}: {data.get('kind')}: {data.get('reason')}"]
        case "model":
            name, state = data.get("name"), str(data.get("state"))
            numbers = f"{output.text(data.get('in_flight'))} in flight, {output.text(data.get('queued'))} queued"
            rest = f"  {numbers}  {data['reason']}" if "reason" in data else ""
            return [f"{name}: ", output.state(state), rest]
        case "memory":
            free = [
                f"{device.get('id')}: {output.mib(device.get('free_mib'))} free of {output.mib(device.get('total_mib'))}"
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
    start = f"{output.text(data.get('model'))}: {data.get('path')} {data.get('state')}"
    if data.get("state") != "finished":
        return f"{start}  {data.get('request_id')}"
    facts = [f"{data.get('status')}", f"{data.get('total_ms')} ms"]
    if data.get("completion_tokens") is not None:
        facts.append(f"{data['completion_tokens']} completion tokens")
    facts += [str(data["error"])] if data.get("error") else []
    return f"{start}  {', '.join(facts)}  {data.get('request_id')}"
