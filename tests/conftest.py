"""Settings for all tests."""

import os

from hypothesis import HealthCheck, settings

# Machines are noisy: a slow example is no failure. What guards a change tries the same examples each time; people explore.
settings.register_profile("ttrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("ttrl"), derandomize=True)
settings.load_profile("same" if os.environ.get("TTRL_TESTS_SAME_EXAMPLES") else "ttrl")
