"""What may change the configuration's file from a distance."""

from __future__ import annotations

from typing import Final

from supervisor.daemon.additions import Addition, Found, Listed, Wanted
from supervisor.daemon.editing import Checked, Edit, FileView, SettingsView, VersionView
from supervisor.dialects.operation import Example, Operation, Parameter, Section, struct

_IF_MATCH: Final = Parameter(
    "If-Match", "The ETag of the file for which the edit was made.", place="header", required=True
)
_NEEDS: Final = "a configuration file"
_CHECKED: Final[dict[str, object]] = {
    "etag": '"1b2c3d4e5f60718a"',
    "text": "models:\n  qwen3:\n    path: qwen3.gguf\n    n_ctx: 8192\n",
    "diff": "@@ -2,2 +2,3 @@\n   qwen3:\n     path: qwen3.gguf\n+    n_ctx: 8192",
    "marks": [],
    "guarded": [],
    "notes": [],
    "difference": {
        "added": [],
        "removed": [],
        "changed": ["qwen3"],
        "restarted": [],
        "stops": [],
        "unchanged": 0,
        "settings": [],
        "needs_restart": [],
        "warnings": [],
    },
    "files": None,
    "fit": {
        "outcome": "fits",
        "rooms": [{"device": "cuda:0", "name": "GPU 0", "need_mib": 6120, "usable_mib": 15870}],
        "others": [],
        "why": "needs 6120 MiB on GPU 0",
    },
}
_ADDITION: Final[dict[str, object]] = {
    "id": "1795500000001",
    "what": "acme/Qwen3-8B-GGUF:Q4_K_M",
    "name": None,
    "state": "running",
    "stage": "acme/Qwen3-8B-GGUF to /home/anna/.local/share/llmux/models/acme/Qwen3-8B-GGUF",
    "done_bytes": 1500000000,
    "total_bytes": 5030000000,
    "bytes_per_s": 42000000.0,
    "eta_s": 84.1,
    "names": [],
    "error": None,
}
_HUB: Final = "a model hub"
SECTION: Final = Section(
    "Administration: configuration",
    "[Edits](configuration.md#editing-from-the-dashboard) of the configuration's file, for the scope `configure`.",
    (
        Operation(
            "GET",
            "/v1/admin/config",
            "The file as it is.",
            "`edit` is `server.edit`, `locked` says why the file can't be changed from here, else null. `guarded_keys` are those that "
            "stay as they are with `edit: safe`. `versions` are the texts that were in force, the newest first. The answer has an ETag.",
            scope="configure",
            answer=struct(FileView),
            example=Example(
                needs=_NEEDS,
                answer={
                    "path": "/home/anna/.config/llmux/llmux.yaml",
                    "text": "models:\n  qwen3:\n    path: qwen3.gguf\n",
                    "etag": '"0a1b2c3d4e5f6071"',
                    "edit": "safe",
                    "locked": None,
                    "guarded_keys": ["binary", "cmd", "env"],
                    "versions": [{"id": "1795500000000-0a1b2c3d4e5f6071", "at": 1795500000.0, "bytes": 45}],
                },
            ),
        ),
        Operation(
            "POST",
            "/v1/admin/config/check",
            "What an edit would do. Changes nothing.",
            """An edit is either the whole `text`, or settings of one `model`: `keys` (null takes a key out, so that its default returns) and
`names`, all further names that stand for the model as it is. With `remove` the model goes, with these names; `files` deletes what llmux
fetched for it, too. Comments and the order of the file stay.

The answer has the `text` as it would be, its `diff`, and `marks` for mistakes. `guarded` keys differ that may not. `difference` is
what [a reload](#post-v1adminreload) would do, and `fit` what loading the model would mean now: on which devices, how much of them,
and which `others` would go. `notes` name keys that have no effect, because another file sets them, too.""",
            scope="configure",
            request=struct(Edit),
            answer=struct(Checked),
            errors=(404, 409),
            example=Example({"model": "qwen3", "keys": {"n_ctx": 8192}}, needs=_NEEDS, answer=_CHECKED),
        ),
        Operation(
            "PUT",
            "/v1/admin/config",
            "Write an edit into the file, and reload it.",
            """The answer is that of the check. Nothing has changed after an error: 400 `invalid_configuration` for mistakes, 403
`configuration_guarded` for keys that only the file's owner changes, 409 `configuration_read_only` where the file can't be written
(`detail` has the lines to enter where it comes from), 412 `configuration_changed` where somebody changed the file meanwhile.
`force` writes although no models or no keys are left.""",
            scope="configure",
            parameters=(_IF_MATCH,),
            request=struct(Edit),
            answer=struct(Checked),
            errors=(404, 409, 412, 428),
            example=Example({"model": "qwen3", "keys": {"n_ctx": 8192}}, needs=_NEEDS, answer=_CHECKED),
        ),
        Operation(
            "GET",
            "/v1/admin/config/versions/{id}",
            "An earlier text of the file, to go back to.",
            scope="configure",
            answer=struct(VersionView),
            errors=(404,),
            example=Example(
                path="/v1/admin/config/versions/1795500000000-0a1b2c3d4e5f6071",
                needs=_NEEDS,
                answer={"id": "1795500000000-0a1b2c3d4e5f6071", "at": 1795500000.0, "text": "models: {}\n"},
            ),
        ),
        Operation(
            "GET",
            "/v1/admin/config/models/{name}",
            "What can be set of a model, each with type and range, what the file says, and what is in effect.",
            "`names` stand for the model as it is; `other_names` have settings of their own. The answer has the file's ETag.",
            scope="configure",
            answer=struct(SettingsView),
            errors=(404,),
            example=Example(
                path="/v1/admin/config/models/qwen3",
                needs=_NEEDS,
                answer={
                    "model": "qwen3",
                    "etag": '"0a1b2c3d4e5f6071"',
                    "locked": None,
                    "settings": [
                        {
                            "key": "n_ctx",
                            "schema": {"type": "integer", "minimum": 0},
                            "description": "Context of one request, in tokens.",
                            "written": None,
                            "value": 4096,
                        }
                    ],
                    "names": ["assistant"],
                    "other_names": [],
                },
            ),
        ),
        Operation(
            "POST",
            "/v1/admin/config/additions/look",
            "What there is to add: a hub's model in its quantisations, with what each takes, or the models of a path.",
            "`entry` has the lines that would be entered. Takes as long as the hub does.",
            scope="configure",
            request=struct(Wanted),
            answer=struct(Found),
            errors=(503,),
            example=Example(
                {"what": "acme/Qwen3-8B-GGUF"},
                needs=_HUB,
                answer={
                    "names": ["qwen3-8b"],
                    "is_new": True,
                    "entry": "models:\n  qwen3-8b:\n    source: {repo: acme/Qwen3-8B-GGUF, files: [Qwen3-8B-Q4_K_M.gguf]}\n",
                    "device": "GPU 0",
                    "why": "",
                    "variants": [
                        {
                            "quantisation": "Q4_K_M",
                            "reference": "acme/Qwen3-8B-GGUF:Q4_K_M",
                            "size_bytes": 5030000000,
                            "need_mib": 6120,
                            "fits": True,
                            "taken": True,
                        }
                    ],
                    "problems": [],
                },
            ),
        ),
        Operation(
            "POST",
            "/v1/admin/config/additions",
            "Add it: fetch the files, install what runs them, enter it, reload.",
            "Additions run one after the other. Nothing is entered before everything has come. Where the file can't be written, the answer is "
            "409 `configuration_read_only`, and `detail` has the lines to enter.",
            scope="configure",
            request=struct(Wanted),
            answer=struct(Addition),
            status=202,
            errors=(409, 503),
            example=Example({"what": "acme/Qwen3-8B-GGUF:Q4_K_M"}, needs=_HUB, answer=_ADDITION),
        ),
        Operation(
            "GET",
            "/v1/admin/config/additions",
            "The additions under way and the last that ended, the newest first.",
            scope="configure",
            answer=struct(Listed),
            example=Example(needs=_HUB, answer={"data": [_ADDITION]}),
        ),
        Operation(
            "GET",
            "/v1/admin/config/additions/{id}",
            "One of them.",
            scope="configure",
            answer=struct(Addition),
            errors=(404,),
            example=Example(path="/v1/admin/config/additions/1795500000001", needs=_HUB, answer=_ADDITION),
        ),
        Operation(
            "DELETE",
            "/v1/admin/config/additions/{id}",
            "Cancel it. What has come stays, and the next try goes on from there.",
            scope="configure",
            answer=struct(Addition),
            errors=(404,),
            example=Example(
                path="/v1/admin/config/additions/1795500000001",
                needs=_HUB,
                answer={**_ADDITION, "state": "cancelled", "eta_s": None},
            ),
        ),
    ),
)
