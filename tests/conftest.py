"""Settings every test runs under: one compute thread, no network lookups, our own packages, and the same
hypothesis examples every time (HYPOTHESIS_PROFILE=explore looks for new ones)."""

import os

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from cluster.preflight import check_own_packages

check_own_packages()

# Time is no property of the code here: a busy machine must not fail an example or its generation.
_TIMELESS = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same", derandomize=True, **_TIMELESS)
hypothesis.settings.register_profile("explore", derandomize=False, max_examples=1000, **_TIMELESS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow ones first, so that none of them is begun when all else is done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
