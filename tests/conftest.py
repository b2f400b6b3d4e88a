"""Settings for all tests."""

import os
import sys

from hypothesis import HealthCheck, settings

from tests import costs, shares

# What is computed is judged, not how fast a shared machine was at it.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# Hundreds of daemons are started from this folder: each would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser):
    costs.add_option(parser)


def pytest_configure(config):
    costs.register(config)
    shares.register(config)
