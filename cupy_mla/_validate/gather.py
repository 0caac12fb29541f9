"""Rows of requests, named by a block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cupy_mla import dtypes
from cupy_mla._arrays import CPU, ArrayRef, DeviceId
from cupy_mla._plan import BlockTable, BlockTablePlan, CachePlan, GatherPlan, IndexerGatherPlan
from cupy_mla.dtypes import DType
from cupy_mla.errors import check_integer, reject_value

from .caches import Written
from .checks import (
    array,
    check_aligned,
    check_disjoint,
    check_dtype,
    check_unit_stride,
    same_device,
    shape_text,
)
from .read import out_dtype


def gather(
    operation: str,
    cache_ref: ArrayRef,
    cache_plan: CachePlan,
    block_table: Any,
    cu_seq_lens: Any,
    *,
    seq_starts: Any,
    num_tokens: Any,
    out: Any,
    new_dtype: Any,
    names: tuple[str, str] = ("kv_cache", "out"),
    num_seqs: int | None = None,
    open_ended: bool = False,
    first_name: str = "cu_seq_lens",
    token_to_seq: Any = None,
) -> tuple[GatherPlan, BlockTable, ArrayRef | None]:
    """Validate a gather.

    Parameters
    ----------
    operation : str
        For messages.
    cache_ref, cache_plan : ArrayRef, CachePlan
    block_table, cu_seq_lens, seq_starts, token_to_seq : array
        The last two may be None.
    num_tokens : int or None
        Output rows; None takes those of `out`, or what `cu_seq_lens` ends with.
    out : array or None
        None makes a new array, of `new_dtype`.
    names : (str, str)
        Names of the cache and of `out`, for messages.
    num_seqs : int or None
        Requests where the arrays may have more entries; None takes the block table's rows.
    open_ended : bool
        Whether `cu_seq_lens` holds starts alone, the last request going on to the last row.
    first_name : str
        Name of `cu_seq_lens`, for messages.
    """
    layout = cache_plan.layout
    table = array(operation, "block_table", block_table)
    place = (cache_ref.device or table.device or CPU, names[0])
    tokens = (
        None if num_tokens is None else check_integer(operation, "num_tokens", num_tokens, least=0)
    )
    width = layout.kv_lora_rank + layout.rope_dim
    ref = None
    if out is None:
        dtype = out_dtype(operation, new_dtype)
        stride = width * dtype.itemsize
    else:
        ref = _destination(operation, names[1], out, width, tokens, dtypes.INPUT_DTYPES, place)
        check_disjoint(operation, names[1], ref, names[0], cache_ref)
        tokens = ref.shape[0] if tokens is None else tokens
        dtype, stride = ref.dtype, ref.strides[0]
    rows, arrays = _block_table(
        operation, table, cu_seq_lens, seq_starts, num_seqs, open_ended, first_name, place
    )
    if token_to_seq is not None:
        owner = _indices(operation, "token_to_seq", token_to_seq, place, tokens or 0)
        rows = replace(rows, owner_stride=owner.strides[0], owner_dtype=owner.dtype)
        arrays = replace(arrays, owner=owner)
    plan = GatherPlan(
        operation, place[0], cache_plan, rows, tokens, stride, dtype, zero_unowned=out is None
    )
    if ref is not None:
        _check_indices_apart(operation, ((names[1], ref),), arrays, first_name)
    elif tokens is not None:
        plan.check_room("num_tokens", tokens)
    return plan, arrays, ref


def gather_indexer(
    operation: str,
    cache_ref: ArrayRef,
    cache_plan: CachePlan,
    dst_k: Any,
    dst_scale: Any,
    block_table: Any,
    cu_seq_lens: Any,
) -> tuple[IndexerGatherPlan, BlockTable, ArrayRef, ArrayRef]:
    """Validate a gather of indexer keys, as codes and scales."""
    table = array(operation, "block_table", block_table)
    place = (cache_ref.device or table.device or CPU, "kv_cache")
    layout = cache_plan.layout
    codes = _destination(
        operation,
        "dst_k",
        dst_k,
        layout.kv_lora_rank,
        None,
        (dtypes.UINT8, dtypes.FLOAT8_E4M3),
        place,
    )
    tokens = codes.shape[0]
    scales = array(operation, "dst_scale", dst_scale)
    check_dtype(operation, "dst_scale", scales, (dtypes.UINT8, dtypes.FLOAT8_E4M3, dtypes.FLOAT32))
    size = (layout.row_bytes - layout.kv_lora_rank) // scales.dtype.itemsize
    scales = _destination(operation, "dst_scale", scales, size, tokens, (scales.dtype,), place)
    for name, ref, other_name, other in (
        ("dst_k", codes, "kv_cache", cache_ref),
        ("dst_scale", scales, "kv_cache", cache_ref),
        ("dst_scale", scales, "dst_k", codes),
    ):
        check_disjoint(operation, name, ref, other_name, other)
    rows, arrays = _block_table(
        operation, table, cu_seq_lens, None, None, False, "cu_seq_lens", place
    )
    outputs = (("dst_k", codes), ("dst_scale", scales))
    _check_indices_apart(operation, outputs, arrays, "cu_seq_lens")
    plan = IndexerGatherPlan(
        operation, place[0], cache_plan, rows, tokens, codes.strides[0], scales.strides[0]
    )
    return plan, arrays, codes, scales


def _check_indices_apart(
    operation: str,
    outputs: Sequence[tuple[str, ArrayRef]],
    arrays: BlockTable,
    first_name: str,
) -> None:
    """Refuse index arrays that lie in what is written."""
    names, refs = zip(*outputs, strict=True)
    Written.of(names, refs).check_apart(
        operation,
        ("block_table", arrays.table),
        (first_name, arrays.first),
        ("seq_starts", arrays.start),
        ("token_to_seq", arrays.owner),
    )


def _destination(
    operation: str,
    argument: str,
    obj: Any,
    width: int,
    tokens: int | None,
    allowed: Sequence[DType],
    place: tuple[DeviceId, str],
) -> ArrayRef:
    """Validate an array ``[tokens, width]`` that is written; it may have more rows."""
    ref = array(operation, argument, obj)
    if ref.ndim != 2 or ref.shape[1] != width or (tokens is not None and ref.shape[0] < tokens):
        rows = "tokens" if tokens is None else f"at least {tokens}"
        reject_value(operation, argument, f"have shape [{rows}, {width}]", shape_text(ref.shape))
    check_dtype(operation, argument, ref, allowed)
    same_device(operation, argument, ref, *place)
    check_unit_stride(operation, argument, ref)
    check_aligned(operation, argument, ref)
    if not ref.writable:
        reject_value(operation, argument, "be writable", "a read-only array")
    if ref.shape[0] > 1 and ref.size and abs(ref.strides[0]) < width * ref.dtype.itemsize:
        reject_value(
            operation,
            argument,
            f"have rows that do not overlap ({width * ref.dtype.itemsize} bytes a row)",
            f"a stride of {ref.strides[0]} bytes along axis 0",
        )
    return ref


def _indices(
    operation: str,
    argument: str,
    obj: Any,
    place: tuple[DeviceId, str],
    entries: int,
    *,
    exact: bool = False,
) -> ArrayRef:
    """Validate an index array of `entries` or more; they may be any step apart."""
    ref = array(operation, argument, obj)
    fits = ref.ndim == 1 and (ref.shape[0] == entries if exact else ref.shape[0] >= entries)
    if not fits:
        wanted = f"[{entries}]" if exact else f"[at least {entries}]"
        reject_value(operation, argument, f"have shape {wanted}", shape_text(ref.shape))
    check_dtype(operation, argument, ref, dtypes.INDEX_DTYPES)
    same_device(operation, argument, ref, *place)
    check_aligned(operation, argument, ref)
    return ref


def _block_table(
    operation: str,
    table: ArrayRef,
    first: Any,
    start: Any,
    num_seqs: int | None,
    open_ended: bool,
    first_name: str,
    place: tuple[DeviceId, str],
) -> tuple[BlockTablePlan, BlockTable]:
    """Validate a block table and the requests' lengths.

    With `num_seqs` the arrays may have more entries than requests, else they fit the table.
    """
    rows = "n_seq" if num_seqs is None else f"at least {num_seqs}"
    if table.ndim != 2 or (num_seqs is not None and table.shape[0] < num_seqs):
        reject_value(
            operation,
            "block_table",
            f"have shape [{rows}, max_blocks]",
            shape_text(table.shape),
        )
    check_dtype(operation, "block_table", table, dtypes.INDEX_DTYPES)
    same_device(operation, "block_table", table, *place)
    check_aligned(operation, "block_table", table)
    count = table.shape[0] if num_seqs is None else num_seqs
    exact = num_seqs is None
    entries = count if open_ended else count + 1
    first_ref = _indices(operation, first_name, first, place, entries, exact=exact)
    start_ref = None
    if start is not None:
        start_ref = _indices(operation, "seq_starts", start, place, count, exact=exact)
    plan = BlockTablePlan(
        count,
        table.shape[1],
        (table.strides[0], table.strides[1]),
        table.dtype,
        first_ref.strides[0],
        first_ref.dtype,
        start_ref.strides[0] if start_ref is not None else 0,
        start_ref.dtype if start_ref is not None else dtypes.INT32,
        0,
        dtypes.INT32,
        open_ended,
    )
    return plan, BlockTable(table, first_ref, start_ref, None)
