"""The NumPy backend: every operation as its rules say it, vectorised, readable as specification.

It is what a machine without a GPU runs, and what every kernel is compared with, byte for byte.
"""

from __future__ import annotations

from .insert import HostTarget, insert
from .read import read_slots

__all__ = ["HostTarget", "insert", "read_slots"]
