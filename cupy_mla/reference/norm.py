"""RMSNorm and LayerNorm in float32, with sums whose order is fixed.

Every operation is a float32 operation rounded to nearest even; nothing is contracted to a fused
multiply-add. So whoever repeats the operations in this order gets the same bits.

The sum over a row of W elements is a tree, shaped after 32 lanes that load V neighbours at a time:

- V is 16 where W >= 512, else 4.
- Element e belongs to lane ``(e // V) % 32``, in chunk ``e // (32 * V)``, at place ``e % V``.
- Each lane begins with +0 and adds its elements in order of chunk, then place.
- The 32 sums are combined by a butterfly: every lane i takes ``s[i] + s[i ^ 16]``, then the same
  with 8, 4, 2 and 1. Addition is commutative, so all lanes end with the same sum.
"""

from __future__ import annotations

import numpy as np

from .fp8 import Floats

LANES = 32
#: Rows this wide are loaded 16 elements at a time by a lane, narrower ones 4.
WIDE = 512


def elements_per_lane(width: int) -> int:
    """Return V: how many neighbouring elements of a row of `width` a lane takes at a time."""
    return 16 if width >= WIDE else 4


def tree_sum(terms: Floats) -> Floats:
    """Sum each row by the tree of this module.

    Parameters
    ----------
    terms : float32 array [n, W]

    Returns
    -------
    float32 array [n]

    Examples
    --------
    >>> float(tree_sum(np.array([[2.0**24, 1.0, 1.0, 0.0, 1.0, 1.0]], np.float32))[0]) - 2**24
    2.0
    """
    rows, width = terms.shape
    places = elements_per_lane(width)
    chunks = -(-width // (LANES * places))
    # A lane's sum is never -0 (it begins with +0), so adding +0 for what is missing changes none.
    padded = np.zeros((rows, chunks * LANES * places), np.float32)
    padded[:, :width] = terms
    shaped = padded.reshape(rows, chunks, LANES, places)
    sums = np.zeros((rows, LANES), np.float32)
    lanes = np.arange(LANES)
    with np.errstate(all="ignore"):
        for chunk in range(chunks):
            for place in range(places):
                sums += shaped[:, chunk, :, place]
        for distance in (16, 8, 4, 2, 1):
            sums = sums + sums[:, lanes ^ distance]
    total: Floats = sums[:, 0]
    return total


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return ``(x * r) * weight`` with ``r = 1 / sqrt(sum(x * x) / W + eps)``.

    Parameters
    ----------
    x : float32 array [n, W]
    weight : float32 array [W]
    eps : float
        Rounded to float32.

    Returns
    -------
    float32 array [n, W]
        Not rounded any further.
    """
    with np.errstate(all="ignore"):
        r = _reciprocal_root(x, eps)
        return (x * r) * weight


def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float) -> Floats:
    """Return ``((d * r) * weight) + bias`` with ``d = x - mean``, ``r = 1 / sqrt(var + eps)``.

    ``mean`` is ``sum(x) / W`` and ``var`` is ``sum(d * d) / W``.

    Parameters
    ----------
    x : float32 array [n, W]
    weight, bias : float32 array [W]
    eps : float
        Rounded to float32.

    Returns
    -------
    float32 array [n, W]
        Not rounded any further.
    """
    with np.errstate(all="ignore"):
        mean = tree_sum(x) / np.float32(x.shape[1])
        d = x - mean[:, None]
        r = _reciprocal_root(d, eps)
        return ((d * r) * weight) + bias


def _reciprocal_root(x: Floats, eps: float) -> Floats:
    """Return ``1 / sqrt(mean(x * x) + eps)`` as a column."""
    mean = tree_sum(x * x) / np.float32(x.shape[1])
    root: Floats = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return root[:, None]
