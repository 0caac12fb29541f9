"""Fixtures that every folder of tests shares, and the profiles of Hypothesis.

A folder for another backend overrides `backend` in its own conftest.py and imports the tests it
wants to run there: `from tests.cpu.test_cases_addressing import *`.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.helpers", "tests.oracle")

from tests import helpers  # noqa: E402  (after the rewrite of its assertions is registered)

settings.register_profile(
    "ci",
    deadline=None,
    max_examples=150,
    print_blob=True,
    # Fixtures that are objects without state may be shared by the examples of a test.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def backend() -> helpers.Backend:
    """How arrays are made and read back: NumPy, unless a folder overrides it."""
    return helpers.Backend()


@pytest.fixture(params=list(helpers.INSERT_PATHS), ids=str)
def insert_path(request):
    """Every public way to store given rows in the caches of several layers."""
    return helpers.INSERT_PATHS[request.param]


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.default_rng(20260)
