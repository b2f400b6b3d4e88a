"""What operators ask of the daemon: its configuration, tasks, an upgrade."""

from __future__ import annotations

from typing import Final

from supervisor.daemon.alert_hook import Delivery
from supervisor.daemon.sets import SetList, Switch
from supervisor.daemon.usage import UsageList
from supervisor.dialects.operation import (
    Example,
    Operation,
    Parameter,
    Section,
    array,
    choice,
    flag,
    listing,
    named,
    number,
    record,
    request,
    struct,
    text,
    whole,
)

_DIFFERENCE: Final = named(
    record(
        {
            "added": array(None, "Models and virtual models, by name."),
            "removed": array(None, "Models and virtual models, by name."),
            "changed": array(None, "Models and virtual models, by name."),
            "restarted": array(None, "Those of `changed` whose worker is replaced after its requests."),
            "stops": array(
                record(
                    {
                        "model": text(),
                        "state": text(),
                        "in_flight": whole(),
                        "queued": whole(),
                        "pinned": flag(),
                        "drain_s": number(),
                    }
                ),
                "The workers that end, those of restarted and of removed models: `model`, `state`, `in_flight` and `queued` requests, `pinned`, and `drain_s`, after which running requests are cut.",
            ),
            "unchanged": whole("How many names did not change."),
            "settings": array(None, "Changed settings that took effect, such as `limits.drain_s`."),
            "needs_restart": array(None, "Changed settings that take effect only after a restart of the daemon."),
            "warnings": array(None, "What can't be right about models' memory, each with the model's name."),
        }
    ),
    "Difference",
)
_TASK: Final = named(
    record(
        {
            "name": text("As configured."),
            "description": text("As configured.", null=True),
            "pin_primary": flag("As configured."),
            "keep_alive_s": number("As configured.", null=True),
            "budget_s": number("As configured.", null=True),
            "allow_remote": flag("As configured."),
            "candidates": array(
                record(
                    {
                        "model": text(),
                        "physical": text(),
                        "state": text(null=True),
                        "warm": flag(),
                        "remote": flag(),
                        "allowed": flag(),
                    }
                ),
                "In order: `model` as the task names it, `physical` the model behind that, its `state`, whether it is `warm` or `remote`, and whether the guard against cloud fallbacks has it `allowed`.",
            ),
            "chosen": text(
                "The candidate that a request would go to first; `primary` or `warm`; the same in a sentence."
            ),
            "reason": choice(
                "primary",
                "warm",
                about="The candidate that a request would go to first; `primary` or `warm`; the same in a sentence.",
            ),
            "why": text("The candidate that a request would go to first; `primary` or `warm`; the same in a sentence."),
        }
    ),
    "Task",
)
_SETS: Final = {
    "data": [
        {
            "name": "coding",
            "description": "In the evening",
            "default_models": ["qwen-coder"],
            "pin": ["qwen-coder"],
            "active": True,
        }
    ]
}
_GUARD: Final = {"allowCloudFallback": flag("May tasks [fall back to remote models](tasks.md#remote-models)?")}
_PRIMARY: Final = {
    "name": "task:reply",
    "description": None,
    "pin_primary": False,
    "keep_alive_s": None,
    "budget_s": None,
    "allow_remote": False,
    "candidates": [
        {"model": "qwen3", "physical": "qwen3", "state": "ready", "warm": True, "remote": False, "allowed": True}
    ],
    "chosen": "qwen3",
    "reason": "primary",
    "why": "qwen3 is the primary, and ready.",
}
SECTION: Final = Section(
    "Administration: daemon",
    "The daemon itself, its configuration and its tasks.",
    (
        Operation(
            "GET",
            "/v1/admin/info",
            "Which daemon this is.",
            "`watch` says whether it reloads when a file changes. `configuration` has the files that a reload reads: the first is the "
            "configuration itself, then come tasks, the changes on this machine (`local`) and the API keys.",
            scope="admin",
            answer=record(
                {
                    "version": text(),
                    "python": text(),
                    "pid": whole(),
                    "uptime_s": number(),
                    "host": text(),
                    "port": whole(),
                    "state_dir": text(),
                    "watch": flag(),
                    "configuration": array(
                        record(
                            {
                                "path": text(),
                                "kind": choice("configuration", "tasks", "local", "api_keys"),
                                "exists": flag(),
                            }
                        )
                    ),
                }
            ),
        ),
        Operation(
            "GET",
            "/v1/admin/tasks",
            "Every [task](tasks.md), with its keys, its candidates as they are now, and whom a request would go to.",
            scope="admin",
            answer=listing(_TASK),
        ),
        Operation(
            "GET",
            "/v1/admin/tasks/{name}",
            "One of them, by its public name: `task:NAME`.",
            scope="admin",
            answer=_TASK,
            errors=(404,),
            example=Example(path="/v1/admin/tasks/task:reply", needs="a task", answer=_PRIMARY),
        ),
        Operation(
            "GET",
            "/v1/admin/usage",
            "What each key used on each day: requests, tokens, seconds of GPUs.",
            """The last 30 days, or those of `from` and `to`, as this machine's clock names them; 400 days are kept. Each request counts once, on the
day of its end, for its key and the model that answered. A GPU second is one second of one GPU during which a worker had the request;
requests that a worker computes together count each as if alone. As CSV, names that a spreadsheet would take for formulas have an
apostrophe before them.""",
            scope="admin",
            parameters=(
                Parameter("from", "The first day, such as 2026-11-01."),
                Parameter("to", "The last day."),
                Parameter("key", "Only this key, by its name or id."),
                Parameter("model", "Only this model."),
                Parameter("by_model", "A row for each model.", flag()),
                Parameter("format", "`json` or `csv`; without it `Accept: text/csv` counts.", choice("json", "csv")),
            ),
            answer=struct(UsageList),
            other_types=("text/csv",),
            errors=(507,),
            example=Example(
                needs="requests of an earlier day",
                answer={
                    "data": [
                        {
                            "day": "2026-11-26",
                            "key": "anna",
                            "key_id": "key_0123456789abcdef01234567",
                            "requests": 214,
                            "failed": 3,
                            "prompt_tokens": 512400,
                            "cached_tokens": 301220,
                            "completion_tokens": 61230,
                            "gpu_s": 1893.4,
                            "model": None,
                        }
                    ]
                },
            ),
        ),
        Operation(
            "POST",
            "/v1/admin/alerts/test",
            "Send an alert on all [configured ways](operations.md#alerts), once, to see whether it arrives.",
            scope="admin",
            answer=struct(Delivery),
            example=Example(needs="`server.alerts`", answer={"webhook": None, "command": "command: it ended with 1"}),
        ),
        Operation(
            "GET",
            "/v1/admin/sets",
            "The [sets](configuration.md#sets), and which of them is active.",
            scope="admin",
            answer=struct(SetList),
            example=Example(needs="sets", answer=_SETS),
        ),
        Operation(
            "PUT",
            "/v1/admin/sets",
            "Switch to another set, or to none (`null`): all as configured.",
            "It holds at once, and is kept over restarts. Pins that operators set by hand end with it. No worker ends, and none is loaded by "
            "the switch itself. Where it can't be kept, nothing changes, and the answer is 507 `state_not_saved`.",
            scope="admin",
            request=struct(Switch),
            answer=struct(SetList),
            errors=(404, 503, 507),
            example=Example({"active": "coding"}, needs="sets", answer=_SETS),
        ),
        Operation(
            "GET",
            "/api/v1/config",
            "What operators change while the daemon runs.",
            scope="admin",
            answer=record(_GUARD),
        ),
        Operation(
            "PUT",
            "/api/v1/config",
            "Change it. It holds at once, and is kept over restarts.",
            "Where it can't be kept, nothing changes, and the answer is 507 `state_not_saved`.",
            scope="admin",
            request=request(_GUARD, "allowCloudFallback"),
            answer=record(_GUARD),
            errors=(507,),
            example=Example({"allowCloudFallback": False}),
        ),
        Operation(
            "POST",
            "/v1/admin/reload",
            "Read the configuration again and apply [the differences](configuration.md#reload).",
            """The response comes when these are decided; the replacement of workers follows. If the file has mistakes, nothing
changes: 400 `invalid_configuration`, and `detail` lists all mistakes. A reload after which there would be no models or no
keys any more is refused, too.

`?dry_run=true` or the body `{"dry_run": true}` only tells the differences and changes nothing; `force`, in the same two ways,
reloads although no models or no keys are left.""",
            scope="admin",
            parameters=(
                Parameter("dry_run", "Only tell what would change.", flag()),
                Parameter("force", "Also where no models or no keys are left.", flag()),
            ),
            request=request({"dry_run": flag(), "force": flag()}),
            is_body_optional=True,
            answer=_DIFFERENCE,
            errors=(503,),
            example=Example({"dry_run": True}),
        ),
        Operation(
            "POST",
            "/v1/admin/upgrade",
            "Replace the daemon by the llmux that is installed now, with the arguments of the running one.",
            "See [upgrades](operations.md#upgrades). The response comes when the new daemon serves: `pid` is its process id, `running` is "
            "how many requests still run in the old one. If it can't take over, the old one goes on: 503 `upgrade_failed`, and "
            "`detail` has the last lines that the new one wrote.",
            scope="admin",
            answer=record({"pid": whole(), "running": whole()}),
            errors=(503,),
            example=Example(needs="a daemon that may be replaced", answer={"pid": 4242, "running": 1}),
        ),
    ),
)
