"""GroupedCacheWriter.insert_context: what it refuses, and in which words."""

from __future__ import annotations

import numpy as np
import pytest

from tests import helpers, oracle
from tests.context_helpers import Step
from tests.fused_helpers import cos_sin, odd_address
from tests.helpers import (
    rejected,
)

F32 = np.float32
WIDE = 3 * 576


def bf16(*shape):
    return np.zeros(shape, oracle.BFLOAT16)


REFUSED = [
    ("kv", bf16(4, 3, 575), ValueError, ["[T, 3, 576]", "[4, 3, 575]"]),
    ("kv", bf16(4, WIDE + 1), ValueError, [f"[T, 3, 576] or [T, {WIDE}]", f"[4, {WIDE + 1}]"]),
    ("kv", bf16(3, 3, 576), ValueError, ["4 tokens", "[3, 3, 576]"]),
    ("kv", bf16(3, WIDE), ValueError, ["4 tokens"]),
    ("kv", bf16(WIDE), ValueError, [f"[{WIDE}]"]),
    ("kv", bf16(4, 3, 1152)[..., ::2], ValueError, ["stride 1"]),
    ("kv", np.zeros((4, 3, 576), F32), TypeError, ["bfloat16", "layer 0", "float32"]),
    ("kv", np.zeros((4, 3, 576), np.int16), TypeError, ["int16"]),
    ("kv", None, TypeError, ["NoneType"]),
    ("kv", odd_address((4, 3, 576), oracle.BFLOAT16), ValueError, ["multiples", "2-byte"]),
    ("cos_sin_cache", odd_address((16, 64), F32), ValueError, ["multiples", "4-byte"]),
    ("positions", odd_address((4,), np.int64), ValueError, ["multiples", "8-byte"]),
    ("positions", np.zeros(3, np.int64), ValueError, ["4 tokens", "[3]"]),
    ("positions", np.zeros(4, F32), TypeError, ["int32 or int64", "float32"]),
    ("positions", np.zeros((1, 4), np.int64), ValueError, ["[T]", "[1, 4]"]),
    ("positions", None, TypeError, ["NoneType"]),
    ("slot_mapping", np.zeros((2, 4), np.int64), ValueError, ["[3, T]", "[2, 4]"]),
    ("slot_mapping", [np.zeros(4, np.int64)] * 2, ValueError, ["3 layers", "2"]),
    ("slot_mapping", np.zeros(4, np.uint64), TypeError, ["uint64"]),
    ("norm_weight", bf16(512), ValueError, ["[3, 512]", "[512]"]),
    ("norm_weight", bf16(2, 512), ValueError, ["[3, 512]", "[2, 512]"]),
    ("norm_weight", np.zeros((3, 512)), TypeError, ["float64"]),
    ("norm_weight", None, TypeError, ["NoneType"]),
    ("cos_sin_cache", np.zeros((16, 32), F32), ValueError, ["[positions, 64]", "[16, 32]"]),
    ("cos_sin_cache", np.zeros((16, 64), np.int64), TypeError, ["int64"]),
    ("cos_sin_cache", None, ValueError, ["rope_dim is 64", "None"]),
    ("eps", -1.0, ValueError, ["at least 0", "-1"]),
    ("eps", None, TypeError, ["number", "NoneType"]),
    ("is_neox", "no", TypeError, ["be a bool", "str"]),
    ("is_neox", np.array([True, False]), TypeError, ["be a bool", "ndarray"]),
    ("rounding", "none", ValueError, ["staged", "'none'"]),
    ("stream", object(), ValueError, ["host memory"]),
    (
        "kv",
        helpers.FakeDevice((4, 3, 576), "<f2", dtype="torch.bfloat16"),
        ValueError,
        ["same CUDA device", "cuda:0"],
    ),
]


@pytest.mark.parametrize(
    ("name", "value", "exception", "fragments"),
    REFUSED,
    ids=[f"{case[0]}-{number}" for number, case in enumerate(REFUSED)],
)
def test_what_does_not_fit_is_refused_and_nothing_written(rng, name, value, exception, fragments):
    step = Step(helpers.Backend(), rng)
    given = step.arguments()
    given[name] = value
    writer = step.writer()
    with rejected(exception, "insert_context", name, *fragments, caches=step.caches):
        writer.insert_context(**given)
    assert not writer.stats()["slots_out_of_range"].any()


def test_a_table_without_a_rotary_part_is_refused(rng):
    step = Step(helpers.Backend(), rng, rope=0)
    with rejected(ValueError, "insert_context", "cos_sin_cache", "rope_dim is 0", "ndarray"):
        step.writer().insert_context(**step.arguments(cos_sin_cache=cos_sin(4, 64)))


def test_a_layout_that_cannot_take_the_dtype_is_named(rng):
    step = Step(helpers.Backend(), rng, ["fp8_e4m3", "fp8_ds_mla"], dtype=np.float16)
    with rejected(TypeError, "insert_context", "kv", "bfloat16", "fp8_ds_mla", layer=1):
        step.writer().insert_context(**step.arguments())
