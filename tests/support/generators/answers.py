"""Takes answers apart with the transformers worker's own parser of response templates.

Run by the Python of the transformers runtime, as `answers.py RUNTIMES_PACKAGE`. A question is a line of JSON on stdin, and so
is its answer on stdout: `{"template": …, "prompt": …, "tools": […], "parts": […]}` gives the pieces of each part, and of the
end; `{"model_type": …}` the template that transformers has for it; `{"template": …, "tokens": […]}` those that it looks for.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types

package = types.ModuleType("runtimes")
package.__path__ = [sys.argv[1]]
sys.modules["runtimes"] = package

from transformers.cli.serving.utils import get_response_template  # noqa: E402
from transformers.utils.chat_parsing.response_templates import load_response_template  # noqa: E402

from runtimes.sdk.chat.formats.pieces import merge_pieces  # noqa: E402
from runtimes.transformers.worker.chat.response_template import TemplateParser, response_template, used_tokens  # noqa: E402


def described(pieces: list) -> list[list[object]]:
    return [[type(piece).__name__, *dataclasses.asdict(piece).values()] for piece in merge_pieces(pieces)]


def answer(asked: dict) -> object:
    if "model_type" in asked:
        config = types.SimpleNamespace(model_type=asked["model_type"])
        return get_response_template(object(), types.SimpleNamespace(config=config))
    if "tokens" in asked:
        return sorted(used_tokens(load_response_template(asked["template"]), asked["tokens"]))
    template = response_template(types.SimpleNamespace(response_template=asked["template"]), None)
    if template is None:
        return None
    parser = TemplateParser(template, asked.get("prompt", ""), asked.get("tools", []))
    found = [(parser.thinking, described(parser.feed(part))) for part in asked["parts"]]
    return [*found, (parser.thinking, described(parser.end()))]


for line in sys.stdin:
    sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
    sys.stdout.flush()
