"""A pytest plugin: each array of CuPy and torch in an allocation of its own.

In a pool, a memory checker cannot see an access beyond an array:

    compute-sanitizer --error-exitcode 9 python3 -m pytest -p tests.gpu.no_pools tests/gpu -k cupy
"""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Switch the pools off before anything is allocated."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    try:
        import cupy
    except ImportError:
        return
    cupy.cuda.set_allocator(None)
