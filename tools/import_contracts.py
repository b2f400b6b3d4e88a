"""A contract that import-linter lacks: a list of allowed imports instead of forbidden ones."""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output
from importlinter.domain.imports import Module


class AllowedContract(Contract):
    """The modules of `source_modules` import only each other and `allowed_modules`.

    With `within`, only imports from that package are checked.
    """

    type_name = "allowed"

    source_modules = fields.ListField(subfield=fields.ModuleField())
    allowed_modules = fields.ListField(subfield=fields.ModuleField())
    within = fields.ModuleField(required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Check every import of the sources."""
        sources = [_module_name(module) for module in self.source_modules]  # type: ignore[attr-defined]
        allowed = [*sources, *(_module_name(module) for module in self.allowed_modules)]  # type: ignore[attr-defined]
        within = None if self.within is None else _module_name(self.within)  # type: ignore[arg-type]  # the metaclass makes modules of fields
        wrong = sorted(
            (importer, imported)
            for importer in graph.modules
            if any(_is_within(importer, source) for source in sources)
            for imported in graph.find_modules_directly_imported_by(importer)
            if (within is None or _is_within(imported, within))
            and not any(_is_within(imported, name) for name in allowed)
        )
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each import that is not allowed, on a line of its own."""
        for importer, imported in check.metadata["wrong"]:
            output.print_error(f"{importer} imports {imported}", bold=False)


def _module_name(module: Module) -> str:
    return module.name


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
