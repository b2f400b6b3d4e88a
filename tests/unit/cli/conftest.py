"""Configuration folders, as the catalog's tests have them."""

from tests.unit.catalog.conftest import folder as folder
