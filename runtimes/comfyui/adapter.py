"""Pictures from a ComfyUI workflow. Our own worker runs ComfyUI as its child, and serves OpenAI's images API.

No package registry has ComfyUI: `folder` is a checkout, with its environment in `venv` or `.venv`, or another `python`.
ComfyUI itself decides which models stay in memory, so the estimate counts the files that the workflow names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, JsonValue

from runtimes.adapters.server_program import FilePath, ServerAdapter, ServerConfig, option_problems
from runtimes.adapters.worker_adapter import WorkerAdapter, WorkerConfig
from runtimes.base import Capabilities, Endpoint, LaunchContext, LaunchSpec
from runtimes.comfyui.shared import workflow
from runtimes.comfyui.shared.workflow import NAMES, Workflow, WorkflowError
from runtimes.estimate import MIB, Estimate
from runtimes.model_config import Modality

PROGRAM_MIB: Final = 1200  # ComfyUI without a model, and our worker

_GENERATIONS, _EDITS = Endpoint("/v1/images/generations"), Endpoint("/v1/images/edits")


def _checked_name(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{name!r} is none of {', '.join(NAMES)}")
    return name


class ComfyConfig(WorkerConfig, ServerConfig):
    """A workflow of ComfyUI."""

    reserved = """
    --listen --port --tls-keyfile --tls-certfile --enable-cors-header --input-directory --output-directory --temp-directory
    --auto-launch --disable-auto-launch --disable-metadata --disable-api-nodes --cuda-device --default-device --cpu
    --quick-test-for-ci --windows-standalone-build --multi-user
    """
    no_options = ("workflow", "inputs", "max_pixels", "threads")

    type: Literal["image"] = Field(default="image", description="What the model is for: pictures.")
    folder: FilePath = Field(description="ComfyUI's checkout, with its main.py.", examples=["/opt/ComfyUI"])
    python: FilePath | None = Field(
        default=None, description="ComfyUI's interpreter. Default: venv/bin/python or .venv/bin/python in the checkout."
    )
    workflow: FilePath = Field(description="The workflow, as ComfyUI's editor exports it with Export (API).")
    inputs: dict[Annotated[str, AfterValidator(_checked_name)], str] = Field(
        default_factory=dict,
        description="What requests set in the workflow: a name, and its place, NODE.INPUT with the node's id or title. Names: "
        f"{', '.join(NAMES)}. Default: those of the usual nodes, as far as it has them.",
        examples=[{"prompt": "6.text", "seed": "3.seed"}],
    )
    base_directory: FilePath | None = Field(
        default=None, description="Where its models and custom nodes are. Default: the checkout."
    )
    max_pixels: int = Field(
        default=1 << 22,
        ge=4096,
        le=1 << 28,
        description="Width times height of the largest picture that a request may ask for.",
    )
    extra_args: list[str] = Field(default_factory=list, description="Further command line options of ComfyUI.")


class ComfyAdapter(WorkerAdapter[ComfyConfig], ServerAdapter[ComfyConfig]):
    """One process of ours and one of ComfyUI for each workflow."""

    name = "comfyui"
    summary = "Pictures by a workflow of ComfyUI, behind OpenAI's images API."
    all_endpoints = frozenset({_GENERATIONS, _EDITS})
    requirements = Path(__file__).parent / "requirements.lock"
    config = ComfyConfig
    program = "runtimes.comfyui.worker"
    program_key = "python"
    places = ("{config.folder}/venv/bin/python", "{config.folder}/.venv/bin/python")
    missing = (
        "python: there is no environment in {config.folder} (venv, .venv); make one with ComfyUI's requirements.txt, or set python "
        "to the interpreter that has them"
    )

    def problems(self, config: ComfyConfig) -> Iterator[str]:
        """Problems: no checkout or interpreter, a file that is no workflow, places that the workflow doesn't have."""
        if not (config.folder / "main.py").is_file():
            yield f"folder: there is no main.py in {config.folder}; is it ComfyUI's checkout?"
        yield from self.program_problems(config)
        if config.base_directory is not None and not config.base_directory.is_dir():
            yield f"base_directory: {config.base_directory}: there is no such folder"
        try:
            found = workflow.read(config.workflow, config.inputs)
        except WorkflowError as error:
            yield str(error)
        else:
            if "prompt" not in found.places:
                yield "inputs: the workflow has no place for a prompt that can be told: name it, as in {prompt: 6.text}"
            if not found.saves:
                yield "workflow: it saves no picture: it needs a node with a filename_prefix, such as SaveImage"
        yield from option_problems(config)

    def launch(self, config: ComfyConfig, context: LaunchContext) -> LaunchSpec:
        """How to start the worker. Raises RuntimeNotInstalledError or ModelUnusableError."""
        return replace(super().launch(config, context), progress="/progress")

    def command_prefix(self, config: ComfyConfig, program: Path) -> tuple[str, ...]:
        """ComfyUI's interpreter, and the checkout's main.py."""
        return (str(program), str(config.folder.absolute() / "main.py"))

    def options(self, config: ComfyConfig, context: LaunchContext) -> Mapping[str, JsonValue]:
        """The worker's own settings. Raises ModelUnusableError where `check` finds a problem."""
        values: dict[str, JsonValue] = {
            "base_directory": None if config.base_directory is None else str(config.base_directory.absolute()),
            "cpu": not context.device.kind.accelerates,
            "preview_method": "auto",
        }
        return {
            "argv": [*self.command(self.find_program(config), config, values)],
            "workflow": str(config.workflow.absolute()),
            "inputs": dict(config.inputs),
            "max_pixels": config.max_pixels,
        }

    def endpoints(self, config: ComfyConfig) -> frozenset[Endpoint]:
        """Edits where the workflow takes a picture, else generations."""
        found = _read_workflow(config)
        if found is None:
            return self.all_endpoints
        return frozenset({_EDITS if found.takes_picture else _GENERATIONS})

    def estimate(self, config: ComfyConfig) -> Estimate | None:
        """The size of the files below `models` that the workflow names, plus a fifth; None if no file is found."""
        sizes = [path.stat().st_size for path in self.weights(config)]
        if not sizes:
            return None
        mib = -(-sum(sizes) * 6 // 5 // MIB)
        files = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
        return Estimate(mib + PROGRAM_MIB, "file_size", f"{files}, times 1.2 + program {PROGRAM_MIB} MiB")

    def weights(self, config: ComfyConfig) -> tuple[Path, ...]:
        """The files that the workflow names, in the folders of ComfyUI's models."""
        found = _read_workflow(config)
        if found is None:
            return ()
        values = (value for node in found.nodes.values() for value in node["inputs"].values())
        named = {value for value in values if isinstance(value, str) and Path(value).suffix}
        folders = sorted(((config.base_directory or config.folder) / "models").glob("*/"))
        return tuple(path for name in sorted(named) for folder in folders if (path := folder / name).is_file())

    def inputs(self, config: ComfyConfig) -> frozenset[Modality]:
        """Text, and a picture where the workflow takes one."""
        found = _read_workflow(config)
        return frozenset({"text", "image"} if found is not None and found.takes_picture else {"text"})

    def capabilities(self, config: ComfyConfig) -> Capabilities:
        """Single turns of text, with a picture where the workflow takes one."""
        pictures: tuple[Modality, ...] = ("text", "image") if "image" in self.inputs(config) else ("text",)
        return Capabilities(modalities=pictures, tools=False, thinking=False, multi_turn=False)


def _read_workflow(config: ComfyConfig) -> Workflow | None:
    try:
        return workflow.read(config.workflow, config.inputs)
    except WorkflowError:
        return None
