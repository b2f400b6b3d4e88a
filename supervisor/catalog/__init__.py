"""The configuration: read strictly, and turned into a frozen `Catalog` of what to serve."""

from supervisor.catalog.catalog import TASK, Catalog, CatalogModel, Route, Task, VirtualModel
from supervisor.catalog.loading.loader import Configuration, Foreign, find_config, load, load_text
from supervisor.catalog.models.fitting import check_devices
from supervisor.catalog.models.rewrite import Rewrite

__all__ = [
    "TASK",
    "Catalog",
    "CatalogModel",
    "Configuration",
    "Foreign",
    "Rewrite",
    "Route",
    "Task",
    "VirtualModel",
    "check_devices",
    "find_config",
    "load",
    "load_text",
]
