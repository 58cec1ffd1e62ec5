"""What holds for every test: a property is judged by what it finds, not by how long an example takes."""

from hypothesis import HealthCheck, settings

# By default an example that takes more than 0.2 s fails its test, and so does drawing ten in more than a second: both
# happen to any test on a machine that stands still for a moment.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
