"""Validation: one function an operation, from what the caller gave to a frozen plan.

This is the only validation path; both backends take only what comes out of it. Checks read
attributes, never device data; they never copy and never synchronise. Host numbers given as
scales are the one kind of data that is looked at.
"""

from __future__ import annotations

from cupy_mla.errors import check_flag as flag
from cupy_mla.errors import check_integer as integer

from .caches import Written, cache, distinct_caches
from .checks import array, check_outputs, host_stream, same_device
from .context import context
from .convert import convert
from .gather import gather, gather_indexer
from .grouped import grouped
from .indexer import indexer_insert
from .insert import insert_inputs, row_sizes, storable
from .layers import layer_caches, layer_list
from .norm_rope import LayerArguments, StepArguments, norm_rope_layer, norm_rope_step
from .operands import number, table
from .query import QueryArguments, fused_q
from .read import read_slots
from .scales import call_scale, layer_scale, writer_scales

__all__ = [
    "LayerArguments",
    "QueryArguments",
    "StepArguments",
    "Written",
    "array",
    "cache",
    "call_scale",
    "check_outputs",
    "context",
    "convert",
    "distinct_caches",
    "flag",
    "fused_q",
    "gather",
    "gather_indexer",
    "grouped",
    "host_stream",
    "indexer_insert",
    "insert_inputs",
    "integer",
    "layer_caches",
    "layer_list",
    "layer_scale",
    "norm_rope_layer",
    "norm_rope_step",
    "number",
    "read_slots",
    "row_sizes",
    "same_device",
    "storable",
    "table",
    "writer_scales",
]
