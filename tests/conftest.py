"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# What is computed is judged, not how fast a shared machine was at it.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
