"""Plans of the fused operations: what kernels get; equal for arrays that look the same."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import _validate, fused_norm_rope, fused_q, indexer_k_quant_and_cache
from cupy_mla._arrays import CPU
from cupy_mla._plan_fused import Operand
from tests import helpers, oracle, query_helpers
from tests.fused_helpers import arguments, make_indexer_cache, make_layer

F32 = np.float32


def context_plan(kv, slots, weight):
    plan, _ = _validate.context(
        "insert_context",
        kv,
        np.arange(4),
        slots,
        weight,
        np.zeros((9, 64), F32),
        eps=1e-6,
        is_neox=True,
        rounding_rule="staged",
        num_layers=3,
        sizes=(512, 64),
        caches=_validate.Written.of([], []),
        device=CPU,
    )
    return plan


def test_strides_of_a_projection_are_bytes_a_layer_and_a_token():
    weight = np.zeros((3, 600), oracle.BFLOAT16)[:, :512]
    one, each = np.arange(4, dtype=np.int32), np.zeros((3, 6), np.int64)[:, :4]
    plan = context_plan(np.zeros((4, 3, 576), F32), one, weight)
    assert plan.kv_strides == (576 * 4, 3 * 576 * 4)
    assert plan.slot_strides == (0, 4)
    assert plan.weight == Operand((3, 512), (1200, 2), oracle.BFLOAT16)
    assert plan.table == Operand((9, 64), (256, 4), np.dtype(F32))
    assert (plan.tokens, plan.kv_lora_rank, plan.rope_dim) == (4, 512, 64)
    assert (plan.is_neox, plan.rounding) == (True, "staged")
    assert plan.eps == float(F32(1e-6))
    flat = context_plan(np.zeros((4, 2000), F32)[:, : 3 * 576], each, weight)
    assert flat.kv_strides == (576 * 4, 2000 * 4)
    assert flat.slot_strides == (48, 8)
    layers_first = np.zeros((3, 4, 576), F32).transpose(1, 0, 2)
    assert context_plan(layers_first, one, weight).kv_strides == (4 * 576 * 4, 576 * 4)


@pytest.fixture
def plans(monkeypatch):
    """Collect the plans that reach the NumPy backend."""
    from cupy_mla._fused_backends import NumpyFused

    seen = []
    for name in ("norm_rope", "fused_q", "insert_indexer"):
        original = getattr(NumpyFused, name)

        def spy(self, plan, *args, original=original):
            seen.append(plan)
            return original(self, plan, *args)

        monkeypatch.setattr(NumpyFused, name, spy)
    return seen


def call_norm_rope():
    backend, rng = helpers.Backend(), np.random.default_rng(0)
    fused_norm_rope(
        **arguments(
            backend,
            make_layer(rng),
            indexer_k_cache=make_indexer_cache(backend, block_pad=64).array,
            mla_kv_cache=helpers.make_cache(backend, "fp8_ds_mla").array,
            mla_kv_cache_dtype="fp8_ds_mla",
            topk_indices_buffer=np.zeros((5, 6), np.int32),
        )
    )


def call_fused_q():
    rng = np.random.default_rng(0)
    fused_q(**query_helpers.arguments(helpers.Backend(), query_helpers.make_query(rng)))


def call_indexer():
    cache = make_indexer_cache(helpers.Backend(), block_pad=64)
    indexer_k_quant_and_cache(np.ones((3, 128), F32), cache.array, np.arange(2))


@pytest.mark.parametrize("call", [call_norm_rope, call_fused_q, call_indexer])
def test_arrays_that_look_the_same_have_equal_plans_that_can_be_keys(plans, call):
    call()
    call()
    assert plans[0] == plans[1]
    assert len({*plans}) == 1
    assert plans[0] is not plans[1]


def test_what_a_kernel_of_fused_norm_rope_needs(plans):
    call_norm_rope()
    plan = plans[0]
    layer = plan.layer
    assert plan.tokens == 5
    assert plan.input_dtype == oracle.BFLOAT16
    assert plan.q_c == Operand((5, 24), (48, 2), oracle.BFLOAT16)
    assert plan.topk == Operand((5, 6), (24, 4), np.dtype(np.int32))
    assert plan.q_c_out is plan.kv_c_out is plan.k_pe_out is None
    assert layer.indexer_cache.block_stride == 4 * 132 + 64
    assert layer.indexer_cache.layout.scale_format == "ue8m0"
    assert layer.mla_cache.row_stride == 656
    assert layer.index_is_neox
    assert layer.kv_eps == float(F32(1e-5))
    assert layer.index_table == Operand((16, 64), (128, 2), oracle.BFLOAT16)


def test_what_a_kernel_of_fused_q_needs(plans):
    call_fused_q()
    plan = plans[0]
    assert plan.mqa_shape == (4, 3, 28)
    assert plan.q_pe == Operand((4, 3, 8), (48, 16, 2), oracle.BFLOAT16)
    assert plan.softmax_scale == float(F32(128**-0.5))
    assert plan.index_weights == Operand((4, 3), (12, 4), np.dtype(F32))
    assert (plan.index_q_out, plan.index_weights_out, plan.mqa_q_out) == (None, None, None)
