"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# Machines are noisy: a slow example is no failure.
settings.register_profile("ttrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ttrl")
