"""One decode step of a DeepSeek-V3.2 attention layer around its caches, for two backends.

    python tests/examples/decode_step.py

Everything but the caches and what lies around them is plain NumPy here: projections are matrix
products of random weights, the indexer's top-k and the attention are written out. The layer is
small, except for what the caches fix: a latent part of 512, a rotary part of 64, indexer keys of
128. For two attention backends, one with a bfloat16 and one with an fp8 query, the step is

    projections -> fused_norm_rope -> queries -> fused_q -> top-k of the indexer -> attention

and the output is compared with that of the same step over an unquantised cache.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from cupy_mla import (
    CachePolicy,
    FusedNormRope,
    cp_gather_indexer_k_quant_cache,
    fused_q,
    read_slots,
    select_cache_policy,
)

BF16 = ml_dtypes.bfloat16
RANK, ROPE, NOPE, VALUE = 512, 64, 32, 32
HEADS, INDEX_HEADS, INDEX_DIM = 4, 4, 128
HIDDEN, Q_RANK = 256, 192
BLOCK, TOP_K, MAX_POSITION = 64, 64, 256
EPS = 1e-6
SOFTMAX_SCALE = (NOPE + ROPE) ** -0.5
K_SCALE, Q_SCALE = 0.02, 0.02  # of flat fp8: what calibration would give


def product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiply as a GPU does: bfloat16 in, float32 sums, bfloat16 out."""
    return (x.astype(np.float32) @ weight.astype(np.float32)).astype(BF16)


def rope_table(rows: int, width: int) -> np.ndarray:
    """Make a cos/sin table, a row being cos half, then sin half."""
    angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@dataclass
class Weights:
    """Random weights of the layer."""

    rng: np.random.Generator
    q_a: np.ndarray = field(init=False)
    kv_a: np.ndarray = field(init=False)
    q_b: np.ndarray = field(init=False)
    k_b: np.ndarray = field(init=False)
    v_b: np.ndarray = field(init=False)
    index_q: np.ndarray = field(init=False)
    index_k: np.ndarray = field(init=False)
    index_w: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        def matrix(*shape: int, fan_in: int | None = None) -> np.ndarray:
            values = self.rng.standard_normal(shape) * (fan_in or shape[-2]) ** -0.5
            return values.astype(BF16)

        self.q_a = matrix(HIDDEN, Q_RANK)
        self.kv_a = matrix(HIDDEN, RANK + ROPE)
        self.q_b = matrix(Q_RANK, HEADS * (NOPE + ROPE))
        # Up-projection of keys from RANK to NOPE, applied to the query instead.
        self.k_b = matrix(HEADS, NOPE, RANK, fan_in=RANK)
        self.v_b = matrix(HEADS, RANK, VALUE)
        self.index_q = matrix(Q_RANK, INDEX_HEADS * INDEX_DIM)
        self.index_k = matrix(HIDDEN, INDEX_DIM)
        self.index_w = matrix(HIDDEN, INDEX_HEADS)


class Layer:
    """The layer with caches of its own.

    Parameters
    ----------
    weights : Weights
    policy : CachePolicy or None
        None keeps the cache in bfloat16: the reference.
    num_blocks : int
    """

    def __init__(self, weights: Weights, policy: CachePolicy | None, num_blocks: int) -> None:
        self.weights, self.policy = weights, policy
        self.table = rope_table(MAX_POSITION, ROPE)
        self.scale = K_SCALE if policy is not None and policy.layout.needs_scale else None
        if policy is None:
            self.cache = np.zeros((num_blocks, BLOCK, RANK + ROPE), BF16)
        else:
            self.cache = policy.layout.empty(num_blocks, BLOCK)
        self.index_cache = np.zeros((num_blocks, BLOCK, INDEX_DIM + 4), np.uint8)
        self.norm_rope = FusedNormRope(
            np.ones(Q_RANK, BF16),
            EPS,
            np.ones(RANK, BF16),
            EPS,
            self.table,
            np.ones(INDEX_DIM, np.float32),
            np.zeros(INDEX_DIM, np.float32),
            EPS,
            self.table,
            indexer_k_cache=self.index_cache,
            mla_kv_cache=self.cache,
            mla_kv_cache_dtype="auto" if policy is None else policy.layout,
            mla_k_scale=self.scale,
        )

    def store(
        self, hidden: np.ndarray, positions: np.ndarray, slots: np.ndarray, top_k: np.ndarray
    ) -> np.ndarray:
        """Project tokens, store them in both caches, return the normed latent query."""
        kv = product(hidden, self.weights.kv_a)
        return self.norm_rope(
            positions,
            product(hidden, self.weights.q_a),
            kv[:, :RANK],
            kv[:, RANK:],
            product(hidden, self.weights.index_k),
            top_k,
            slots,
        )

    def decode(self, hidden: np.ndarray, positions: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Attend from one new token of each sequence.

        Parameters
        ----------
        hidden : bfloat16 array [T, HIDDEN]
        positions : int64 array [T]
        blocks : int32 array [T, pages]
            Block table.

        Returns
        -------
        float32 array [T, HEADS * VALUE]
        """
        tokens = len(positions)
        slots = blocks[np.arange(tokens), positions // BLOCK] * BLOCK + positions % BLOCK
        top_k = np.empty((tokens, TOP_K), np.int32)
        q_c = self.store(hidden, positions, slots, top_k)
        q = product(q_c, self.weights.q_b).reshape(tokens, HEADS, NOPE + ROPE)
        # A batched product over heads; its transpose goes on without a copy.
        ql_nope = product(q[..., :NOPE].transpose(1, 0, 2), self.weights.k_b).transpose(1, 0, 2)
        fp8_query = self.policy is not None and self.policy.fp8_query
        index_q, index_weights, mqa_q = fused_q(
            positions,
            q[..., NOPE:],
            self.table,
            product(q_c, self.weights.index_q).reshape(tokens, INDEX_HEADS, INDEX_DIM),
            self.table,
            ql_nope,
            Q_SCALE,
            product(hidden, self.weights.index_w),
            INDEX_DIM**-0.5,
            INDEX_HEADS**-0.5,
            quantize_mqa=fp8_query,
        )
        self.select(index_q, index_weights, positions, blocks, top_k)
        pair = (ql_nope, mqa_q)
        query = pair if self.policy is None else self.policy.mqa_query(*pair)
        return self.attend(query, blocks, top_k)

    def select(
        self,
        index_q: np.ndarray,
        index_weights: np.ndarray,
        positions: np.ndarray,
        blocks: np.ndarray,
        top_k: np.ndarray,
    ) -> None:
        """Write the positions with the largest indexer logits; fused_norm_rope left -1 there."""
        ends = np.concatenate([[0], np.cumsum(positions + 1)]).astype(np.int32)
        keys = np.empty((ends[-1], INDEX_DIM), ml_dtypes.float8_e4m3fn)
        scales = np.empty((ends[-1], 1), np.float32)
        cp_gather_indexer_k_quant_cache(
            self.index_cache, keys.view(np.uint8), scales.view(np.uint8), blocks, ends
        )
        keys = keys.astype(np.float32) * scales
        for token, (start, end) in enumerate(itertools.pairwise(ends)):
            dots = np.maximum(index_q[token].astype(np.float32) @ keys[start:end].T, 0)
            logits = index_weights[token] @ dots
            best = np.argsort(-logits, kind="stable")[:TOP_K]
            top_k[token, : best.size] = best

    def attend(
        self,
        query: np.ndarray | tuple[np.ndarray, np.ndarray],
        blocks: np.ndarray,
        top_k: np.ndarray,
    ) -> np.ndarray:
        """Attend to the chosen rows, in float32."""
        if isinstance(query, tuple):
            q = np.concatenate([part.astype(np.float32) for part in query], axis=-1)
        else:
            q = query.astype(np.float32) * np.float32(Q_SCALE)
        layout = "auto" if self.policy is None else self.policy.layout
        out = np.empty((len(q), HEADS, VALUE), np.float32)
        for token, chosen in enumerate(top_k):
            chosen = chosen[chosen >= 0]
            slots = blocks[token, chosen // BLOCK] * BLOCK + chosen % BLOCK
            rows = read_slots(self.cache, slots, layout, self.scale)
            scores = q[token] @ rows.T * np.float32(SOFTMAX_SCALE)
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            latent = scores / scores.sum(axis=1, keepdims=True) @ rows[:, :RANK]
            out[token] = np.einsum("hr,hrv->hv", latent, self.weights.v_b.astype(np.float32))
        return out.reshape(len(q), HEADS * VALUE)


def run(seed: int = 0) -> dict[str, float]:
    """Run the step with each policy; return how far its output is from the reference's.

    Returns
    -------
    dict of str to float
        Norm of the difference over norm of the output, by backend.
    """
    rng = np.random.default_rng(seed)
    weights = Weights(rng)
    lengths = np.array([70, 150, 20])  # tokens of each sequence before this step
    pages = -(-(lengths + 1).max() // BLOCK)
    num_blocks = len(lengths) * pages + 1
    blocks = rng.permutation(num_blocks)[: len(lengths) * pages].reshape(len(lengths), pages)
    blocks = blocks.astype(np.int32)
    # Hidden states after their norm. Tokens of one text resemble each other: a common part, and
    # a smaller one of their own.
    texts = [
        (
            0.9 * rng.standard_normal(HIDDEN) + 0.45 * rng.standard_normal((length + 1, HIDDEN))
        ).astype(BF16)
        for length in lengths
    ]
    outputs = {}
    policies = {
        "reference": None,
        "flashmla_sparse": select_cache_policy("fp8_ds_mla", capability=(9, 0)),
        "flashinfer_sparse": select_cache_policy("fp8", capability=(10, 0)),
    }
    for name, policy in policies.items():
        layer = Layer(weights, policy, num_blocks)
        for sequence, text in enumerate(texts):
            positions = np.arange(len(text) - 1)
            slots = blocks[sequence, positions // BLOCK] * BLOCK + positions % BLOCK
            layer.store(text[:-1], positions, slots, np.empty((len(positions), TOP_K), np.int32))
        last = np.stack([text[-1] for text in texts])
        outputs[name] = layer.decode(last, lengths, blocks)
        layer.norm_rope.check()
    reference = outputs.pop("reference")
    return {
        name: float(np.linalg.norm(output - reference) / np.linalg.norm(reference))
        for name, output in outputs.items()
    }


def main(arguments: list[str] | None = None) -> None:
    """Print how far each backend's output is from that over a bfloat16 cache."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    for name, error in run().items():
        sys.stdout.write(f"{name:18} relative error {100 * error:.2f} %\n")


if __name__ == "__main__":
    main()
