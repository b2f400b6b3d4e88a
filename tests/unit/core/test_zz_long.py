from hypothesis import HealthCheck, settings

from tests.unit.core.test_scheduler_stateful import Scheduling

TestLong = Scheduling.TestCase
TestLong.settings = settings(
    max_examples=1500, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
