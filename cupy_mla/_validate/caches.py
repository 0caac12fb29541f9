"""A cache array, and the layout of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef
from cupy_mla._plan import CachePlan
from cupy_mla.errors import reject_type, reject_value
from cupy_mla.layouts import (
    BLOCK_PLANAR_WIDTH,
    FIXED_SIZES,
    CacheLayout,
    ScaleFormat,
    build_layout,
    canonical_name,
    check_scale_format,
    get_layout,
)

from .checks import (
    array,
    byte_range,
    check_aligned,
    check_disjoint,
    check_dtype,
    check_unit_stride,
    overlapping_axis,
    shape_text,
)


def cache(
    operation: str,
    argument: str,
    obj: Any,
    kv_cache_dtype: str | CacheLayout,
    sizes: tuple[int, int] | None,
    scale_format: str,
    *,
    writable: bool = True,
    planar: bool = False,
    aligned: bool = True,
    name_argument: str = "kv_cache_dtype",
    sizes_text: str | None = None,
) -> tuple[ArrayRef, CachePlan]:
    """Validate one cache array and find its layout.

    Parameters
    ----------
    operation, argument : str
        For messages.
    obj : array
        ``[num_blocks, block_size, width]``, or 4-D with one head.
    kv_cache_dtype : str or CacheLayout
    sizes : (int, int) or None
        kv_lora_rank and rope_dim; None takes the width of a flat cache as it is.
    scale_format : str
    writable : bool
        Whether the cache is a destination.
    planar : bool
        Whether a layout is taken that keeps the parts of its rows apart in a block.
    aligned : bool
        Whether elements must lie at multiples of their size; where rows are read as bytes alone,
        they need not.
    name_argument : str
        Name of `kv_cache_dtype`, for messages.
    sizes_text : str or None
        What the sizes are those of, for messages about the width; None for arguments of their own.
    """
    ref = array(operation, argument, obj)
    if ref.ndim not in (3, 4) or (ref.ndim == 4 and ref.shape[2] != 1):
        reject_value(
            operation,
            argument,
            "have shape [num_blocks, block_size, width] or [num_blocks, block_size, 1, width]",
            shape_text(ref.shape),
        )
    layout = _layout_of(
        operation, argument, ref, kv_cache_dtype, sizes, scale_format, name_argument, planar
    )
    if not planar:
        whole_rows(operation, layout, name_argument)
    blocks, rows, width = ref.shape[0], ref.shape[1], ref.shape[-1]
    if width != layout.width:
        reject_value(
            operation,
            argument,
            f"have {layout.width} elements in its last axis for {layout.name} rows ("
            + (sizes_text or f"kv_lora_rank {layout.kv_lora_rank}, rope_dim {layout.rope_dim}")
            + ")",
            _width_text(ref, layout),
        )
    if rows < 1:
        reject_value(operation, argument, "have at least one row a block", shape_text(ref.shape))
    check_unit_stride(operation, argument, ref)
    if aligned:
        check_aligned(operation, argument, ref)
    if layout.is_planar and rows > 1 and ref.strides[1] != layout.row_bytes and ref.size:
        reject_value(
            operation,
            argument,
            f"have blocks without gaps (a stride of {layout.row_bytes} bytes along axis 1): "
            f"{layout.name} keeps the parts of its rows apart in a block",
            f"a stride of {ref.strides[1]} bytes",
        )
    if writable:
        if not ref.writable:
            reject_value(operation, argument, "be writable", "a read-only array")
        axis = overlapping_axis(ref.shape, ref.strides, (0, 1), layout.row_bytes)
        if axis is not None and ref.size:
            reject_value(
                operation,
                argument,
                f"have rows that do not overlap (a row has {layout.row_bytes} bytes, a block "
                f"{rows} rows)",
                f"a stride of {ref.strides[axis]} bytes along axis {axis}, with strides "
                f"{ref.strides} bytes",
            )
    return ref, CachePlan(layout, blocks, rows, ref.strides[0], ref.strides[1])


def distinct_caches(operation: str, argument: str, refs: Sequence[ArrayRef]) -> None:
    """Refuse caches of which two share memory, unless they are one and the same.

    Layers that share a cache write to slots of their own; equal slots are duplicates as in a layer.

    Parameters
    ----------
    operation, argument : str
        For messages; the argument is one with an entry a layer.
    refs : sequence of ArrayRef
    """
    ranges = sorted((*byte_range(ref), layer) for layer, ref in enumerate(refs) if ref.size)
    open_layers: list[tuple[int, int]] = []  # end of the range, and the layer
    for low, high, layer in ranges:
        open_layers = [(end, other) for end, other in open_layers if end > low]
        for _, other in open_layers:
            first, second = sorted((layer, other))
            if refs[first].looks() == refs[second].looks():
                continue
            check_disjoint(
                operation,
                f"{argument}[{second}]",
                refs[second],
                f"{argument}[{first}]",
                refs[first],
            )
        open_layers.append((high, layer))


@dataclass(frozen=True, slots=True)
class Written:
    """Caches that a call writes, as inputs are held against them.

    Attributes
    ----------
    caches : tuple of (str, ArrayRef, int, int)
        Name for messages, cache, its first byte and the one behind its last.
    """

    caches: tuple[tuple[str, ArrayRef, int, int], ...]

    @classmethod
    def of(cls, names: Iterable[str], refs: Iterable[ArrayRef]) -> Written:
        """Find the bytes once, for all calls."""
        return cls(
            tuple((name, ref, *byte_range(ref)) for name, ref in zip(names, refs, strict=True))
        )

    def check_apart(self, operation: str, *sources: tuple[str, ArrayRef | None]) -> None:
        """Refuse what is read from memory that is written.

        Parameters
        ----------
        operation : str
            For messages.
        *sources : (str, ArrayRef or None)
            Names for messages, and what is read.
        """
        for name, ref in sources:
            if ref is None or not ref.size:
                continue
            low, high = byte_range(ref)
            for cache_name, cache, first, end in self.caches:
                if low < end and first < high:
                    check_disjoint(operation, name, ref, cache_name, cache)


def whole_rows(operation: str, layout: CacheLayout, name_argument: str = "kv_cache_dtype") -> None:
    """Refuse a layout that keeps the parts of its rows apart, which this operation cannot write."""
    if layout.is_planar:
        reject_value(
            operation,
            name_argument,
            "be a layout of kv_c and k_pe rows",
            f"{layout.name}, the keys of an indexer",
        )


def _width_text(ref: ArrayRef, layout: CacheLayout) -> str:
    width = ref.shape[-1]
    text = f"{width} in {shape_text(ref.shape)}"
    if width == BLOCK_PLANAR_WIDTH and layout.is_fp8:
        text += " (DeepSeek-V4's rows keep their scales behind the block: an unsupported layout)"
    return text


def _layout_of(
    operation: str,
    argument: str,
    ref: ArrayRef,
    kv_cache_dtype: str | CacheLayout,
    sizes: tuple[int, int] | None,
    scale_format: str,
    name_argument: str,
    planar: bool,
) -> CacheLayout:
    chosen_format = check_scale_format(operation, scale_format)
    if isinstance(kv_cache_dtype, CacheLayout):
        layout = kv_cache_dtype
        own = (layout.kv_lora_rank, layout.rope_dim)
        if sizes is not None and own != sizes:
            reject_value(
                operation,
                name_argument,
                f"be a layout of kv_lora_rank {sizes[0]} and rope_dim {sizes[1]}",
                f"one of {own[0]} and {own[1]}",
            )
        check_dtype(operation, argument, ref, layout.accepted_dtypes, f" for {layout.name}")
        return layout
    return _named_layout(
        operation, argument, ref, kv_cache_dtype, sizes, chosen_format, name_argument, planar
    )


#: Rows of fp8 with scales among the bytes, by width: no flat row is as wide in any known model.
_TILED_WIDTHS = {get_layout(name).row_bytes: name for name in FIXED_SIZES} | {
    BLOCK_PLANAR_WIDTH: "DeepSeek-V4's block-planar rows, which are unsupported"
}


def _refuse_tiled_width(operation: str, argument: str, ref: ArrayRef, name: str) -> None:
    """Refuse to read tiled rows as flat fp8: without a known size anything would pass as codes."""
    owner = _TILED_WIDTHS.get(ref.shape[-1])
    if name in ("fp8_e4m3", "fp8_e5m2") and owner is not None:
        reject_value(
            operation,
            argument,
            f"hold flat {name} rows (for rows of this width pass a CacheLayout with their sizes)",
            f"rows of {ref.shape[-1]} bytes, the width of {owner}",
        )


def _named_layout(
    operation: str,
    argument: str,
    ref: ArrayRef,
    kv_cache_dtype: object,
    sizes: tuple[int, int] | None,
    scale_format: ScaleFormat,
    name_argument: str,
    planar: bool,
) -> CacheLayout:
    name = canonical_name(operation, kv_cache_dtype, name_argument, planar=planar)
    if name == "auto":
        name = ref.dtype.name
        if ref.dtype not in dtypes.INPUT_DTYPES:
            reject_type(
                operation,
                argument,
                f'be bfloat16, float16 or float32 for {name_argument} "auto" (an fp8 cache needs '
                'its layout named: "fp8_e4m3", "fp8_e5m2" or "fp8_ds_mla")'
                + ("" if ref.dtype.isnative else ", in native byte order"),
                dtypes.text(ref.dtype),
            )
    if sizes is None:
        _refuse_tiled_width(operation, argument, ref, name)
        # A reader of flat rows needs no border between latent and rotary part.
        sizes = FIXED_SIZES.get(name) or (max(ref.shape[-1], 1), 0)
    layout = build_layout(operation, name, sizes[0], sizes[1], scale_format)
    check_dtype(operation, argument, ref, layout.accepted_dtypes, f" for {layout.name}")
    return layout
