"""CuPy and torch where they can be imported; without them conftest.py skips every test here."""

from __future__ import annotations

from typing import Any

__all__ = ["cupy", "device_count", "torch"]

cupy: Any = None
torch: Any = None
try:
    import cupy
    import torch
except ImportError:
    pass


def device_count() -> int:
    """Number of CUDA devices that torch sees."""
    return torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0
