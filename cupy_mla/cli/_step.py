"""One step of a model with several MLA layers: made-up rows, slots and scales for the demo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_mla.layouts import CacheLayout

Array = np.ndarray[Any, Any]

#: One token in this many is padding (slot -1).
PADDING = 8
#: Each kind of special row comes once in this many tokens, the first ones at the start.
_SPECIAL_EVERY = 97


@dataclass(frozen=True)
class Step:
    """What one step of the model stores: host arrays.

    Attributes
    ----------
    projection : numpy.ndarray
        ``[T, L, R + P]``, as a fused projection of all layers leaves it.
    slots : numpy.ndarray
        int64 ``[L, T]``, -1 for padding, no slot twice in a layer.
    scales : tuple of float or None
        One a layer where the format has no scales in its rows.
    num_blocks : int
        Blocks of each layer's cache.
    """

    projection: Array
    slots: Array
    scales: tuple[float, ...] | None
    num_blocks: int

    def scale(self, layer: int) -> float | None:
        """Return the scale of a layer."""
        return None if self.scales is None else self.scales[layer]


def make_step(layout: CacheLayout, layers: int, tokens: int, block_size: int, seed: int) -> Step:
    """Make the rows, slots and scales of one step.

    Magnitudes spread over ten powers of two, and some rows hold what goes wrong first: zeros of
    both signs, values beyond the format's largest, NaN and infinities.
    """
    rng = np.random.default_rng(seed)
    width = layout.kv_lora_rank + layout.rope_dim
    values = rng.standard_normal((tokens, layers, width), dtype=np.float32)
    values *= np.exp2(rng.integers(-7, 4, (tokens, layers, 1))).astype(np.float32)
    for number, special in enumerate(_special_rows(width)):
        values[number::_SPECIAL_EVERY] = special
    num_blocks = -(-tokens // block_size) + 2
    slots = np.empty((layers, tokens), np.int64)
    for row in slots:
        row[:] = rng.permutation(num_blocks * block_size)[:tokens]
        row[rng.choice(tokens, tokens // PADDING, replace=False)] = -1
    scales = tuple(0.0375 * (layer + 1) for layer in range(layers))
    return Step(
        values.astype(layout.input_dtypes[0]),
        slots,
        scales if layout.needs_scale else None,
        num_blocks,
    )


def _special_rows(width: int) -> list[Array]:
    ramp = np.linspace(-1.0, 1.0, width, dtype=np.float32)
    with_nan, with_infinity = ramp.copy(), ramp.copy()
    with_nan[::31] = np.nan
    with_infinity[5::53] = np.inf
    with_infinity[7::59] = -np.inf
    signed_zeros = np.zeros(width, np.float32)
    signed_zeros[1::2] = -0.0
    return [
        ramp,
        np.zeros(width, np.float32),
        signed_zeros,
        ramp * np.float32(60000.0),
        ramp * np.float32(2.0**-20),
        with_nan,
        with_infinity,
    ]
