"""Rows of a cache to look into: packed bytes by slot, wherever the cache is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupy_mla import _validate, backends
from cupy_mla._arrays import CPU, DeviceId
from cupy_mla.errors import reject_type, reject_value
from cupy_mla.layouts import CacheLayout

Array = np.ndarray[Any, Any]

#: Bytes that are looked at in one go, so that a cache may be larger than memory.
_CHUNK_BYTES = 4 << 20


class CacheRows:
    """Reads the rows of a cache, in host or device memory, as they are.

    Parameters
    ----------
    operation, argument : str
        For messages.
    cache : array
    kv_cache_dtype : str or CacheLayout
    sizes : (int, int) or None
        kv_lora_rank and rope_dim; None where `kv_cache_dtype` is a layout.
    """

    def __init__(
        self,
        operation: str,
        argument: str,
        cache: Any,
        kv_cache_dtype: str | CacheLayout,
        sizes: tuple[int, int] | None,
    ) -> None:
        if isinstance(kv_cache_dtype, CacheLayout) or kv_cache_dtype == "indexer_fp8":
            sizes = None
        ref, plan = _validate.cache(
            operation,
            argument,
            cache,
            kv_cache_dtype,
            sizes,
            "float32",
            writable=False,
            planar=True,
            aligned=False,
        )
        self.layout = plan.layout
        self.block_size = plan.block_size
        self.num_slots = plan.num_slots
        device = ref.device or CPU
        self._backend = backends.for_device(device)
        # A layer's scale plays no part in the bytes.
        self._target = self._backend.call_target(
            ref, plan, 1.0 if plan.layout.needs_scale else None
        )
        self.device = device

    def take(self, slots: Array) -> Array:
        """Return rows as uint8 ``[n, row_bytes]``; the cache has all the slots."""
        return self._backend.host_rows(self._target, slots)

    def chunks(self, slots: Array | None) -> Iterator[tuple[Array, Array]]:
        """Yield slots in rising order, and their rows, a few megabytes at a time.

        Parameters
        ----------
        slots : int64 array or None
            Slots that the cache has; None for all of them.
        """
        step = chunk_rows(self.layout)
        count = self.num_slots if slots is None else slots.size
        for begin in range(0, count, step):
            end = min(begin + step, count)
            chosen = np.arange(begin, end) if slots is None else slots[begin:end]
            yield chosen, self.take(chosen)

    def chunk_count(self, slots: Array | None) -> int:
        """Return how many times `chunks` yields."""
        return -(-(self.num_slots if slots is None else slots.size) // chunk_rows(self.layout))


def chunk_rows(layout: CacheLayout) -> int:
    """Return how many rows are looked at in one go."""
    return max(1, _CHUNK_BYTES // layout.row_bytes)


def slot_numbers(operation: str, slots: Any, rows: CacheRows) -> tuple[Array, int]:
    """Return the distinct slots that the cache has, rising, and how many of those given are none.

    Parameters
    ----------
    operation : str
        For messages.
    slots : int32 or int64 array [n], or sequence of int
        An array in host memory, or on the device of the cache.
    rows : CacheRows
    """
    values = _host_slots(operation, slots, rows.device)
    if values.ndim != 1:
        reject_value(operation, "slots", "have shape [n]", list(values.shape))
    if values.dtype.kind not in "iu" or values.dtype.itemsize > 8:
        reject_type(operation, "slots", "be integers", values.dtype)
    present = (values >= 0) & (values < rows.num_slots)
    found = np.unique(values[present]).astype(np.int64)
    return found, int(np.count_nonzero(~present))


def _host_slots(operation: str, slots: Any, device: DeviceId) -> Array:
    if isinstance(slots, Sequence) and not isinstance(slots, (str, bytes)):
        try:
            values = np.asarray(slots)
        except ValueError:
            reject_value(operation, "slots", "have shape [n]", "a sequence of unequal sequences")
        return values.astype(np.int64) if not values.size else values
    ref = _validate.array(operation, "slots", slots)
    if ref.device is not None and ref.device.kind == "cuda":
        _validate.same_device(operation, "slots", ref, device, "kv_cache")
    return backends.for_device(ref.device or CPU).host_copy(ref)
