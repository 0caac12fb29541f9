"""Plans of the fused operations: what validation hands to a backend, beside `_plan`.

As there, a plan holds sizes, dtypes and strides, never a pointer; all strides are in bytes. Every
number a kernel computes with is already the float32 that it takes (as a Python float).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ._arrays import ArrayRef, DeviceId
from ._plan import CachePlan, Scale
from .dtypes import DType

Rounding = Literal["fused", "staged"]
ROUNDINGS: tuple[Rounding, ...] = ("fused", "staged")


@dataclass(frozen=True, slots=True)
class Operand:
    """How one array of a call lies in memory.

    Attributes
    ----------
    shape : tuple of int
    strides : tuple of int
        Bytes a step along each axis; the last axis is contiguous.
    dtype : numpy.dtype
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType

    @classmethod
    def of(cls, ref: ArrayRef) -> Operand:
        """Describe an array."""
        return cls(ref.shape, ref.strides, ref.dtype)

    @property
    def width(self) -> int:
        """Elements along the last axis."""
        return self.shape[-1]


@dataclass(frozen=True, slots=True)
class NormRopeLayerPlan:
    """What does not change from step to step in `fused_norm_rope`.

    Attributes
    ----------
    operation : str
        Name for messages.
    device : DeviceId
    q_weight, kv_weight : Operand
        ``[Q]`` and ``[R]``, multiplied as float32.
    q_eps, kv_eps, index_eps : float
    k_table : Operand or None
        ``[positions, P]``, a row being cos half, then sin half; None where P is 0. k_pe is
        rotated in interleaved pairs.
    index_weight, index_bias, index_table : Operand or None
        ``[128]``, ``[128]``, ``[positions, P']``: the leading P' elements are rotated. All None
        where no indexer cache is written.
    index_is_neox : bool
        Halves (i, i + P'/2) instead of pairs (2i, 2i + 1).
    mla_cache, indexer_cache : CachePlan or None
    has_indexer : bool
        Whether the top-k buffer is filled.
    rounding : {"fused", "staged"}
    """

    operation: str
    device: DeviceId
    q_weight: Operand
    kv_weight: Operand
    q_eps: float
    kv_eps: float
    index_eps: float
    k_table: Operand | None
    index_weight: Operand | None
    index_bias: Operand | None
    index_table: Operand | None
    index_is_neox: bool
    mla_cache: CachePlan | None
    indexer_cache: CachePlan | None
    has_indexer: bool
    rounding: Rounding


@dataclass(frozen=True, slots=True)
class NormRopeLayer:
    """The arrays that belong to a `NormRopeLayerPlan`, and the scale of a flat fp8 cache."""

    q_weight: ArrayRef
    kv_weight: ArrayRef
    k_table: ArrayRef | None
    index_weight: ArrayRef | None
    index_bias: ArrayRef | None
    index_table: ArrayRef | None
    mla_cache: ArrayRef | None
    mla_scale: Scale
    indexer_cache: ArrayRef | None


@dataclass(frozen=True, slots=True)
class NormRopePlan:
    """A step of `fused_norm_rope` over `tokens` tokens.

    Attributes
    ----------
    layer : NormRopeLayerPlan
    tokens : int
    input_dtype : numpy.dtype
        Of q_c, kv_c, k_pe, index_k and of all outputs.
    positions : Operand
        ``[T']``, int32 or int64.
    q_c, kv_c : Operand
        ``[T', Q]``, ``[T', R]``.
    k_pe, index_k : Operand or None
        ``[T', P]``, ``[T', 128]``; index_k is None where no indexer cache is written.
    topk : Operand or None
        ``[T', K]`` of int32 or int64 whose first `tokens` rows become -1.
    slots, indexer_slots : Operand or None
        ``[T]`` and ``[T']``; None where that cache is not written.
    q_c_out : Operand or None
        None: the backend makes a packed ``[tokens, Q]``.
    kv_c_out, k_pe_out : Operand or None
        None: not wanted.
    """

    layer: NormRopeLayerPlan
    tokens: int
    input_dtype: DType
    positions: Operand
    q_c: Operand
    kv_c: Operand
    k_pe: Operand | None
    index_k: Operand | None
    topk: Operand | None
    slots: Operand | None
    indexer_slots: Operand | None
    q_c_out: Operand | None
    kv_c_out: Operand | None
    k_pe_out: Operand | None

    @property
    def operation(self) -> str:
        """Name for messages."""
        return self.layer.operation


@dataclass(frozen=True, slots=True)
class NormRopeInputs:
    """A step's arrays, as `NormRopePlan` names them."""

    positions: ArrayRef
    q_c: ArrayRef
    kv_c: ArrayRef
    k_pe: ArrayRef | None
    index_k: ArrayRef | None
    topk: ArrayRef | None
    slots: ArrayRef | None
    indexer_slots: ArrayRef | None
    q_c_out: ArrayRef | None
    kv_c_out: ArrayRef | None
    k_pe_out: ArrayRef | None


@dataclass(frozen=True, slots=True)
class FusedQPlan:
    """Rotating and quantising the queries of `tokens` tokens.

    Attributes
    ----------
    operation : str
        Name for messages.
    device : DeviceId
    tokens : int
    input_dtype : numpy.dtype
        Of q_pe, ql_nope and index_q.
    quantize_mqa : bool
        True: mqa_q is ``[T, H, R + P]`` of e4m3 codes; False: ``[T, H, P]`` of `input_dtype`.
    has_indexer : bool
        False: the index operands are None.
    index_is_neox : bool
    softmax_scale, head_scale : float
    positions : Operand
        ``[T]``, int32 or int64.
    q_pe, q_table : Operand
        ``[T', H, P]``, rotated in interleaved pairs; ``[positions, P]``.
    ql_nope : Operand or None
        ``[T', H, R]``; None where it is not quantised.
    index_q, index_table, index_weights : Operand or None
        ``[T', I, D]``, ``[positions, P']`` (the leading P' of D are rotated), ``[T', I]``.
    mqa_q_out, index_q_out, index_weights_out : Operand or None
        None: the backend makes a packed one of `tokens` rows.
    """

    operation: str
    device: DeviceId
    tokens: int
    input_dtype: DType
    quantize_mqa: bool
    has_indexer: bool
    index_is_neox: bool
    softmax_scale: float
    head_scale: float
    positions: Operand
    q_pe: Operand
    q_table: Operand
    ql_nope: Operand | None
    index_q: Operand | None
    index_table: Operand | None
    index_weights: Operand | None
    mqa_q_out: Operand | None
    index_q_out: Operand | None
    index_weights_out: Operand | None

    @property
    def mqa_shape(self) -> tuple[int, int, int]:
        """Shape of mqa_q."""
        heads, rope = self.q_pe.shape[1:]
        return self.tokens, heads, rope + (self.ql_nope.width if self.ql_nope is not None else 0)


@dataclass(frozen=True, slots=True)
class FusedQInputs:
    """The arrays of a `FusedQPlan`, and the scale by which mqa_q is divided."""

    positions: ArrayRef
    q_pe: ArrayRef
    q_table: ArrayRef
    ql_nope: ArrayRef | None
    q_scale: Scale
    index_q: ArrayRef | None
    index_table: ArrayRef | None
    index_weights: ArrayRef | None
    mqa_q_out: ArrayRef | None
    index_q_out: ArrayRef | None
    index_weights_out: ArrayRef | None


@dataclass(frozen=True, slots=True)
class IndexerInsertPlan:
    """Storing `tokens` rows of 128 in an indexer cache.

    Attributes
    ----------
    operation : str
        Name for messages.
    device : DeviceId
    tokens : int
    k : Operand
        ``[T', 128]``.
    slots : Operand
        ``[T]``, int32 or int64.
    cache : CachePlan
    """

    operation: str
    device: DeviceId
    tokens: int
    k: Operand
    slots: Operand
    cache: CachePlan


@dataclass(frozen=True, slots=True)
class IndexerInsertInputs:
    """The arrays of an `IndexerInsertPlan`."""

    k: ArrayRef
    slots: ArrayRef
    cache: ArrayRef


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """Norm, RoPE and insert of `tokens` rows in each of `num_layers` caches.

    Attributes
    ----------
    operation : str
        Name for messages.
    device : DeviceId
    num_layers, tokens, kv_lora_rank, rope_dim : int
    input_dtype : numpy.dtype
    kv_strides, slot_strides : (int, int)
        Bytes a layer and a token; a list of slots has no meaning in them.
    slot_dtype : numpy.dtype
    positions : Operand or None
        ``[T']``, int32 or int64; None where rope_dim is 0.
    weight : Operand
        ``[L, R]``, multiplied as float32.
    table : Operand or None
        ``[positions, P]``; None where rope_dim is 0.
    eps : float
    is_neox : bool
    rounding : {"fused", "staged"}
    """

    operation: str
    device: DeviceId
    num_layers: int
    tokens: int
    kv_lora_rank: int
    rope_dim: int
    input_dtype: DType
    kv_strides: tuple[int, int]
    slot_strides: tuple[int, int]
    slot_dtype: DType
    positions: Operand | None
    weight: Operand
    table: Operand | None
    eps: float
    is_neox: bool
    rounding: Rounding


@dataclass(frozen=True, slots=True)
class ContextInputs:
    """The arrays of a `ContextPlan`; `slots` as in `InsertInputs`."""

    kv: ArrayRef
    positions: ArrayRef | None
    slots: ArrayRef | tuple[ArrayRef | None, ...]
    weight: ArrayRef
    table: ArrayRef | None
