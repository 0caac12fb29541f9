"""The NumPy backend: every operation as its rules say it, vectorised, readable as specification.

It is what a machine without a GPU runs, and what every kernel is compared with, byte for byte.
"""

from __future__ import annotations

from .convert import convert
from .gather import gather, gather_indexer
from .insert import HostTarget, insert
from .read import host_rows, read_slots

__all__ = [
    "HostTarget",
    "convert",
    "gather",
    "gather_indexer",
    "host_rows",
    "insert",
    "read_slots",
]
