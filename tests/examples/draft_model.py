"""A draft model of five MLA layers that stores the context of accepted tokens, step by step.

    python tests/examples/draft_model.py [--arrays numpy|cupy|torch] [--device cpu|cuda]

A draft model for speculative decoding attends to what the target model has accepted. Its layers'
rows need nothing but the target's hidden states, so each step makes them all at once:

    hidden states -> one product, kv [T, L, R + P] -> insert_context -> five paged caches

The buffers of a step have a fixed number of tokens a sequence; behind those that were accepted,
slots are -1. After each step, what the caches hold is compared with a norm and RoPE in plain NumPy,
and with caches that got the same tokens one layer and one operation after another.
"""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla, gather_cache, get_layout

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("bfloat16", "fp8_e4m3", "fp8_ds_mla")
LAYERS, RANK, ROPE, HIDDEN = 5, 512, 64, 256
BLOCK, PAGES = 16, 4  # rows a block, blocks a sequence
PROMPTS, DRAFTED, STEPS = (37, 20, 5), 4, 6  # the first step stores the prompts
EPS = np.float32(1e-6)
K_SCALES = np.linspace(0.02, 0.03, LAYERS, dtype=np.float32)  # flat fp8: 448 * 0.02 is enough


class NumpyArrays:
    """NumPy arrays, and what the other frameworks do otherwise."""

    def put(self, host: np.ndarray) -> Any:
        return host.copy()

    def get(self, array: Any) -> np.ndarray:
        return array

    def product(self, x: Any, weight: Any) -> Any:
        """Multiply bfloat16 with float32 sums, rounded to bfloat16."""
        return (x.astype(np.float32) @ weight.astype(np.float32)).astype(BF16)


class CupyArrays(NumpyArrays):
    """CuPy arrays; it has no products of bfloat16, so both conversions are shifts of bits."""

    def put(self, host: np.ndarray) -> Any:
        import cupy

        raw = cupy.asarray(np.ascontiguousarray(host).view(np.uint8))
        return cupy.ndarray(host.shape, host.dtype, raw.data)

    def get(self, array: Any) -> np.ndarray:
        import cupy

        return cupy.asnumpy(array.view(f"u{array.dtype.itemsize}")).view(array.dtype)

    def product(self, x: Any, weight: Any) -> Any:
        import cupy

        wide = [(a.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for a in (x, weight)]
        bits = cupy.matmul(*wide).view(np.uint32)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest even
        return cupy.ndarray(bits.shape, BF16, bits.data)


class TorchArrays(NumpyArrays):
    """Tensors of torch on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def put(self, host: np.ndarray) -> Any:
        import torch

        bits = torch.from_numpy(np.ascontiguousarray(host).view(np.uint8).copy())
        return bits.to(self.device).view(getattr(torch, host.dtype.name))

    def get(self, array: Any) -> np.ndarray:
        import torch

        name = str(array.dtype).removeprefix("torch.")
        return array.cpu().view(torch.uint8).numpy().view(BF16 if name == "bfloat16" else name)

    def product(self, x: Any, weight: Any) -> Any:
        return x @ weight


# --- the same in plain NumPy ----------------------------------------------------------------------


def norm(x: np.ndarray, weight: np.ndarray, *, tree: bool = False) -> np.ndarray:
    """RMSNorm of float32 rows; with `tree` a warp's sum, 32 lanes of 16 and a butterfly."""
    squares = x * x
    if tree:
        lanes = squares.reshape(-1, 32, RANK // 32)
        sums = sum(lanes[..., place] for place in range(RANK // 32))
        for half in (16, 8, 4, 2, 1):
            sums = sums[:, :half] + sums[:, half:]
        mean = sums / np.float32(RANK)
    else:
        mean = squares.mean(axis=1, keepdims=True)
    return x * (np.float32(1) / np.sqrt(mean + EPS)) * weight


def rotate(x: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Rotate pairs (2i, 2i + 1) of float32 rows [T, P] by the RoPE table's rows [T, P]."""
    cos, sin, a, b = row[:, : ROPE // 2], row[:, ROPE // 2 :], x[:, ::2], x[:, 1::2]
    return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def bounds(fmt: str, layer: int, rows: np.ndarray) -> np.ndarray:
    """Bound the error of stored rows against the float32 rows [T, R + P] that `norm` gives.

    float32, with u = 2^-24: a sum of 512 squares is off by 22 u at most in either order (one for
    the square; 20 or 21 additions on the way of a term), which the root halves. With eps 1/2, the
    root 1, the reciprocal 1 and two products 2, an element is off by 15.5 u on each side, 31 u
    together: less than 2^-19. RoPE is the same operations on both sides, so the same bits.

    Stored: a bfloat16 has 8 bits, so it is off by 2^-8 of itself at most. An e4m3 has 4: 2^-4 of
    itself, or where it is subnormal half of its step 2^-9 times the scale, 2^-10 s. For fp8_ds_mla
    s is the largest magnitude of a tile of 128 over 448. Roundings of s, x / s and code * s add a
    few u; 2^-18 is enough for them and the float32 part, 2^-126 for what float32 cannot hold.
    """
    size = np.abs(rows)
    bound = size * 2.0**-8
    if fmt == "fp8_e4m3":
        bound = np.maximum(size * 2.0**-4, 2.0**-10 * K_SCALES[layer])
    elif fmt == "fp8_ds_mla":
        scales = np.repeat(size[:, :RANK].reshape(-1, RANK // 128, 128).max(axis=2) / 448, 128, 1)
        bound[:, :RANK] = np.maximum(size[:, :RANK] * 2.0**-4, 2.0**-10 * scales)
    return bound * (1 + 2.0**-18) + size * 2.0**-18 + 2.0**-126


# --- the model ------------------------------------------------------------------------------------


class Draft:
    """Weights of five layers in a framework's arrays, made the same for each."""

    def __init__(self, arrays: NumpyArrays, rng: np.random.Generator) -> None:
        self.arrays = arrays
        weight = rng.standard_normal((HIDDEN, LAYERS * (RANK + ROPE))) * HIDDEN**-0.5
        self.projection = arrays.put(weight.astype(BF16))
        self.norms = rng.uniform(0.5, 1.25, (LAYERS, RANK)).astype(BF16)
        angles = np.arange(BLOCK * PAGES)[:, None] * 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE)
        self.table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    def project(self, hidden: np.ndarray) -> Any:
        """Make the rows of all layers, kv [T, L, R + P], by one product."""
        kv = self.arrays.product(self.arrays.put(hidden), self.projection)
        return kv.reshape(len(hidden), LAYERS, RANK + ROPE)

    def layers(self, fmt: str, num_blocks: int) -> list[SimpleNamespace]:
        """Make attention layers as engines have them, with caches of their own."""
        put, layout = self.arrays.put, get_layout(fmt)
        rotary = SimpleNamespace(cos_sin_cache=put(self.table), is_neox_style=False)
        shape = (num_blocks, BLOCK, layout.width)
        return [
            SimpleNamespace(
                kv_cache=put(np.zeros(shape, layout.storage_dtype)),
                kv_cache_dtype=fmt,
                k_scale=put(K_SCALES[layer : layer + 1]) if layout.needs_scale else None,
                kv_lora_rank=RANK,
                qk_rope_head_dim=ROPE,
                kv_a_layernorm=SimpleNamespace(
                    weight=put(self.norms[layer]), variance_epsilon=float(EPS)
                ),
                rotary_emb=rotary,
            )
            for layer in range(LAYERS)
        ]

    def rows(self, kv: np.ndarray, positions: np.ndarray, layer: int, tree: bool = False) -> Any:
        """Norm and rotate a layer's part of the host's float32 kv, without another rounding."""
        weight = self.norms[layer].astype(np.float32)
        latent = norm(kv[:, layer, :RANK], weight, tree=tree)
        return latent, rotate(kv[:, layer, RANK:], self.table[positions])


class Result(NamedTuple):
    """What the steps of a format showed."""

    rows: int  # stored in each cache
    saturated: int  # elements beyond what the format holds, for which no bound is known
    error: float  # the largest of a row read back, over its bound
    different_bytes: int  # between a staged insert_context and separate operations

    @property
    def good(self) -> bool:
        return self.error <= 1 and not self.different_bytes and not self.saturated


def run(fmt: str, arrays: NumpyArrays, seed: int = 0) -> Result:
    """Run all steps over caches of a format."""
    rng = np.random.default_rng(seed)
    model = Draft(arrays, rng)
    sequences = len(PROMPTS)
    blocks = rng.permutation(sequences * PAGES + 1)[:-1].reshape(sequences, PAGES).astype(np.int32)
    fused, staged, separate = (model.layers(fmt, blocks.size + 1) for _ in range(3))
    fused_writer = GroupedCacheWriter.from_layers(fused, collect_stats=True)
    staged_writer = GroupedCacheWriter.from_layers(staged)
    lengths = np.zeros(sequences, np.int64)
    want = np.zeros((LAYERS, sequences, BLOCK * PAGES, RANK + ROPE), np.float32)
    worst, different = 0.0, 0
    for step in range(STEPS):
        accepted = np.array(PROMPTS) if step == 0 else rng.integers(0, DRAFTED + 1, sequences)
        room = max(PROMPTS) if step == 0 else DRAFTED
        owner, index = np.divmod(np.arange(sequences * room), room)
        stored = index < accepted[owner]
        positions = np.where(stored, lengths[owner] + index, 0)
        slots = blocks[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        slots[~stored] = -1
        kv = model.project(rng.standard_normal((len(slots), HIDDEN)).astype(BF16))
        where = arrays.put(positions), arrays.put(slots)
        fused_writer.insert_context(kv, *where, None, None)
        staged_writer.insert_context(kv, *where, None, None, rounding="staged")

        host = arrays.get(kv).astype(np.float32)
        for number, layer in enumerate(separate):
            parts = [arrays.put(x.astype(BF16)) for x in model.rows(host, positions, number, True)]
            concat_and_cache_mla(*parts, layer.kv_cache, where[1], fmt, layer.k_scale)
            own = arrays.get(staged[number].kv_cache).view(np.uint8)
            different += np.count_nonzero(own != arrays.get(layer.kv_cache).view(np.uint8))
        lengths += accepted

        tables = arrays.put(blocks), arrays.put(np.concatenate([[0], np.cumsum(lengths)]))
        written = np.arange(BLOCK * PAGES) < lengths[:, None]
        for number, layer in enumerate(fused):
            rows = np.concatenate(model.rows(host, positions, number), axis=1)
            want[number, owner[stored], positions[stored]] = rows[stored]
            scale, expected = layer.k_scale, want[number][written]
            got = gather_cache(layer.kv_cache, *tables, fmt, scale, out_dtype="float32")
            error = np.abs(arrays.get(got) - expected) / bounds(fmt, number, expected)
            worst = max(worst, np.nan_to_num(error, nan=np.inf).max())
    fused_writer.check()
    staged_writer.check()
    stats = fused_writer.stats()
    if stats["rows_written"].tolist() != [lengths.sum()] * LAYERS:
        raise RuntimeError(f"{lengths.sum()} tokens were accepted, {stats} counted")
    return Result(int(lengths.sum()), int(stats["saturated_elements"].sum()), worst, different)


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each format; return 1 where what is stored is not what it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arrays", choices=("numpy", "cupy", "torch"), default="numpy")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda for cupy, else cpu")
    given = parser.parse_args(arguments)
    device = given.device or ("cuda" if given.arrays == "cupy" else "cpu")
    if (given.arrays, device) in (("numpy", "cuda"), ("cupy", "cpu")):
        parser.error(f"{given.arrays} has no arrays on {device}")
    made = {"numpy": NumpyArrays, "cupy": CupyArrays, "torch": lambda: TorchArrays(device)}
    try:
        made[given.arrays]().put(np.zeros(1, np.float32))
    except (ImportError, RuntimeError, AssertionError) as error:  # the framework, a driver, a GPU
        parser.error(f"no arrays of {given.arrays} on {device}: {error}")
    results = {fmt: run(fmt, made[given.arrays]()) for fmt in FORMATS}
    for fmt, result in results.items():
        sys.stdout.write(
            f"{fmt:10} {STEPS} steps, {result.rows} rows a layer, "
            f"{result.saturated} elements saturated, error {result.error:.3f} of its bound, "
            f"{result.different_bytes} bytes differ: {'good' if result.good else 'WRONG'}\n"
        )
    return 0 if all(result.good for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
