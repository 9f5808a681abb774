"""``pytest tests/fuzz --hypothesis-profile=campaign`` gives each test many more inputs."""

from hypothesis import settings

settings.register_profile("campaign", max_examples=20_000, print_blob=True)
