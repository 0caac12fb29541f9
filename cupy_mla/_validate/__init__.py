"""Validation: one function an operation, from what the caller gave to a frozen plan.

This is the only validation path; both backends take only what comes out of it. Checks read
attributes, never device data; they never copy and never synchronise. Host numbers given as
scales are the one kind of data that is looked at.
"""

from __future__ import annotations

from .caches import cache
from .checks import array, host_stream, same_device
from .grouped import grouped
from .insert import insert_inputs, storable
from .read import read_slots
from .scales import call_scale, writer_scales

__all__ = [
    "array",
    "cache",
    "call_scale",
    "grouped",
    "host_stream",
    "insert_inputs",
    "read_slots",
    "same_device",
    "storable",
    "writer_scales",
]
