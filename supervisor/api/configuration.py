"""Edits of the configuration's file, and additions of models to it, for the scope `configure`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.requests import Request

from supervisor.api.operation import Api
from supervisor.catalog.document.document import MAX_BYTES
from supervisor.daemon.configuration.editing import ReadOnlyError
from supervisor.errors import LlmuxError
from supervisor.gateway.body.parameters import body_of
from supervisor.gateway.disconnect import CancelOnDisconnect
from supervisor.gateway.operation import Group
from supervisor.schema.edit import (
    Addition,
    Additions,
    Checked,
    Edit,
    FileView,
    Found,
    SettingsView,
    VersionView,
    Wanted,
)
from supervisor.schema.operation import Example, Parameter

PATH: Final = "/v1/admin/config"
MOST_BODY: Final = 6 * MAX_BYTES + 4096
"""JSON may need six characters for one character of the text."""
_IF_MATCH: Final = Parameter(
    "If-Match", "The ETag of the file for which the edit was made.", place="header", required=True
)
_EDIT: Final = Example({"model": "qwen3", "keys": {"n_ctx": 8192}}, needs="a configuration file")
_HUB: Final = "a model hub"
_ADDITION: Final = Example(path=f"{PATH}/additions/1795500000001", needs=_HUB)
GROUP: Final = Group(
    "Administration: configuration",
    "[Edits](configuration.md#editing-from-the-dashboard) of the configuration's file, for the scope `configure`.",
)


class NoVersionError(LlmuxError):
    """A change without the version of the file that it is based on."""

    status = HTTPStatus.PRECONDITION_REQUIRED
    type = "invalid_request_error"
    code = "precondition_required"


@GROUP.operation("GET", PATH, scope="configure", etag=True, example=Example(needs="a configuration file"))
async def read_file(api: Api) -> FileView:
    """The file as it is.

    `edit` is `server.edit`, `locked` says why the file can't be changed from here, else null. `guarded_keys` are those that stay as
    they are with `edit: safe`. `versions` are the texts that were in force, the newest first. The answer has an ETag.
    """
    return await api.editor.file()


@GROUP.operation("POST", f"{PATH}/check", scope="configure", body_limit=MOST_BODY, errors=(404, 409), example=_EDIT)
async def check_edit(api: Api, body: Edit) -> Checked:
    """What an edit would do. Changes nothing.

    An edit is either the whole `text`, or settings of one `model`: `keys` (null takes a key out, so that its default returns) and
    `names`, all further names that stand for the model as it is. With `remove` the model goes, with these names; `files` deletes
    what llmux fetched for it, too. Comments and the order of the file stay.

    The answer has the `text` as it would be, its `diff`, and `marks` for mistakes. `guarded` keys differ that may not. `difference`
    is what [a reload](#post-v1adminreload) would do, and `fit` what loading the model would mean now: on which devices, how much of
    them, and which `others` would go. `notes` name keys that have no effect, because another file sets them, too.
    """
    return await api.editor.check(body)


@GROUP.operation(
    "PUT",
    PATH,
    scope="configure",
    etag=True,
    reads=Edit,
    parameters=(_IF_MATCH,),
    errors=(404, 409, 412, 428),
    example=_EDIT,
)
async def save_edit(api: Api, request: Request) -> Checked:
    """Write an edit into the file, and reload it.

    The answer is that of the check. Nothing has changed after an error: 400 `invalid_configuration` for mistakes, 403
    `configuration_guarded` for keys that only the file's owner changes, 409 `configuration_read_only` where the file can't be written
    (`detail` has the lines to enter where it comes from), 412 `configuration_changed` where somebody changed the file meanwhile.
    `force` writes although no models or no keys are left.
    """
    etag = request.headers.get("if-match")
    if etag is None:
        raise NoVersionError(f"Send the ETag of GET {PATH} as If-Match, so that nobody's change gets lost.")
    return await api.editor.save(await body_of(request, Edit, MOST_BODY), etag)


@GROUP.operation(
    "GET",
    f"{PATH}/versions/{{id}}",
    scope="configure",
    errors=(404,),
    example=Example(path=f"{PATH}/versions/1795500000000-0a1b2c3d4e5f6071", needs="a configuration file"),
)
async def get_version(api: Api, id: str) -> VersionView:
    """An earlier text of the file, to go back to."""
    return await api.editor.version(id)


@GROUP.operation(
    "GET",
    f"{PATH}/models/{{name:path}}",
    scope="configure",
    etag=True,
    errors=(404,),
    example=Example(path=f"{PATH}/models/qwen3", needs="a configuration file"),
)
async def read_model_settings(api: Api, name: str) -> SettingsView:
    """What can be set of a model, each with type and range, what the file says, and what is in effect.

    `names` stand for the model as it is; `other_names` have settings of their own. The answer has the file's ETag.
    """
    return await api.editor.settings(name)


@GROUP.operation(
    "POST",
    f"{PATH}/additions/look",
    scope="configure",
    errors=(503,),
    example=Example({"what": "acme/Qwen3-8B-GGUF"}, needs=_HUB),
)
async def look_up_model(api: Api, body: Wanted, request: Request) -> Found:
    """What there is to add: a hub's model in its quantisations, with what each takes, or the models of a path.

    `entry` has the lines that would be entered. Takes as long as the hub does.
    """
    with CancelOnDisconnect(request.scope):
        return await api.daemon.additions.look(body)


@GROUP.operation(
    "POST",
    f"{PATH}/additions",
    scope="configure",
    status=HTTPStatus.ACCEPTED,
    errors=(409, 503),
    example=Example({"what": "acme/Qwen3-8B-GGUF:Q4_K_M"}, needs=_HUB),
)
async def add_model(api: Api, body: Wanted) -> Addition:
    """Add it: fetch the files, install what runs them, enter it, reload.

    Additions run one after the other. Nothing is entered before everything has come. Where the file can't be written, the answer is
    409 `configuration_read_only`, and `detail` has the lines to enter.
    """
    if (locked := await api.editor.locked()) is not None:
        found = await api.daemon.additions.look(body)
        raise ReadOnlyError(
            f"The configuration can't be changed here: {locked}. Enter this where it comes from, then fetch the files: "
            f"llmux pull {found.names[0]}",
            detail=tuple(found.entry.splitlines()),
        )
    return api.daemon.additions.begin(body)


@GROUP.operation("GET", f"{PATH}/additions", scope="configure", example=Example(needs=_HUB))
async def list_additions(api: Api) -> Additions:
    """The additions under way and the last that ended, the newest first."""
    return api.daemon.additions.listing()


@GROUP.operation("GET", f"{PATH}/additions/{{id}}", scope="configure", errors=(404,), example=_ADDITION)
async def get_addition(api: Api, id: str) -> Addition:
    """One of them."""
    return api.daemon.additions.find(id)


@GROUP.operation("DELETE", f"{PATH}/additions/{{id}}", scope="configure", errors=(404,), example=_ADDITION)
async def cancel_addition(api: Api, id: str) -> Addition:
    """Cancel it. What has come stays, and the next try goes on from there."""
    return await api.daemon.additions.cancel(id)
