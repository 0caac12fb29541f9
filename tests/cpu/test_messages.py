"""Rejected calls: the exception, its text, and that nothing at all was written."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cupy_mla
from cupy_mla import GroupedCacheWriter, concat_and_cache_mla, get_layout, read_slots
from tests import oracle
from tests.helpers import Cache, make_cache, rejected

BF16 = oracle.BFLOAT16
E4M3 = oracle.E4M3
E5M2 = oracle.E5M2


def ones(*shape, dtype=BF16):
    return np.ones(shape, dtype)


def strided(array):
    """The same shape with every other element of the last axis."""
    return np.repeat(array, 2, axis=-1)[..., ::2]


def reversed_axis(array):
    return array[..., ::-1]


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def swapped(array):
    """The same values in the byte order of another machine."""
    return array.astype(array.dtype.newbyteorder(">"))


def misaligned(array):
    """The same values one byte further than their elements may lie."""
    room = np.zeros(array.nbytes + 1, np.uint8)
    moved = np.ndarray(array.shape, array.dtype, room, 1)
    moved[...] = array
    return moved


class Rejected:
    """Arguments that replace those of a right call, and what the message must say."""

    def __init__(self, exception, blamed, *fragments, layer=None, **arguments):
        self.exception = exception
        self.blamed = blamed
        self.fragments = fragments
        self.layer = layer
        self.arguments = arguments


def parametrised(cases):
    return pytest.mark.parametrize("case", [pytest.param(cases[key], id=key) for key in cases])


# --- one layer ------------------------------------------------------------------------------------

SINGLE = {
    # shapes
    "rows of another width": Rejected(
        ValueError, ["kv_c", "kv_cache"], "576", "320", kv_c=ones(3, 256)
    ),
    "rows of one dimension": Rejected(ValueError, "kv_c", "[512]", kv_c=ones(512)),
    "rows of three dimensions": Rejected(ValueError, "kv_c", "[1, 3, 512]", kv_c=ones(1, 3, 512)),
    "rows of no dimension": Rejected(ValueError, "kv_c", "[]", kv_c=ones()),
    "rows of no width": Rejected(ValueError, ["kv_c", "kv_cache"], kv_c=ones(3, 0)),
    "rotary part of one dimension": Rejected(ValueError, "k_pe", "[64]", k_pe=ones(64)),
    "rotary part of three dimensions": Rejected(
        ValueError, "k_pe", "[3, 1, 64]", k_pe=ones(3, 1, 64)
    ),
    "rotary part of another width": Rejected(
        ValueError, ["k_pe", "kv_cache"], "576", "544", k_pe=ones(3, 32)
    ),
    "no rotary part for a cache with one": Rejected(
        ValueError, ["k_pe", "kv_cache"], "576", "512", k_pe=None
    ),
    "fewer rows than slots": Rejected(ValueError, "kv_c", "3", "[2, 512]", kv_c=ones(2, 512)),
    "fewer rotary parts than slots": Rejected(ValueError, "k_pe", "3", "[2, 64]", k_pe=ones(2, 64)),
    "no rows for three slots": Rejected(ValueError, "kv_c", "[0, 512]", kv_c=ones(0, 512)),
    "slots of two dimensions": Rejected(
        ValueError, "slot_mapping", "[1, 3]", slot_mapping=np.array([[0, 1, 2]])
    ),
    "slots of no dimension": Rejected(ValueError, "slot_mapping", "[]", slot_mapping=np.array(3)),
    "cache of one dimension": Rejected(ValueError, "kv_cache", "[576]", kv_cache=ones(576)),
    "cache of two dimensions": Rejected(
        ValueError, "kv_cache", "[16, 576]", kv_cache=ones(16, 576)
    ),
    "cache of five dimensions": Rejected(
        ValueError, "kv_cache", "[4, 4, 1, 1, 576]", kv_cache=ones(4, 4, 1, 1, 576)
    ),
    "cache of two heads": Rejected(
        ValueError, "kv_cache", "[4, 4, 2, 576]", kv_cache=ones(4, 4, 2, 576)
    ),
    "cache of a smaller width": Rejected(
        ValueError, "kv_cache", "576", "575", kv_cache=ones(4, 4, 575)
    ),
    "cache of a larger width": Rejected(
        ValueError, "kv_cache", "576", "640", kv_cache=ones(4, 4, 640)
    ),
    "blocks without rows": Rejected(
        ValueError, "kv_cache", "[4, 0, 576]", kv_cache=ones(4, 0, 576)
    ),
    # strides
    "rows with a strided last axis": Rejected(
        ValueError, "kv_c", "stride", kv_c=strided(ones(3, 512))
    ),
    "rotary parts with a strided last axis": Rejected(
        ValueError, "k_pe", "stride", k_pe=strided(ones(3, 64))
    ),
    "rotary parts with a reversed last axis": Rejected(
        ValueError, "k_pe", "stride", k_pe=reversed_axis(ones(3, 64))
    ),
    "rotary parts with a broadcast last axis": Rejected(
        ValueError, "k_pe", "stride", k_pe=np.broadcast_to(ones(3, 1), (3, 64))
    ),
    "cache with a reversed last axis": Rejected(
        ValueError, "kv_cache", "stride", kv_cache=reversed_axis(ones(4, 4, 576))
    ),
    # alignment
    "rows one byte off": Rejected(ValueError, "kv_c", "2-byte", kv_c=misaligned(ones(3, 512))),
    "rotary parts one byte off": Rejected(
        ValueError, "k_pe", "2-byte", k_pe=misaligned(ones(3, 64))
    ),
    "cache one byte off": Rejected(
        ValueError, "kv_cache", "2-byte", kv_cache=misaligned(ones(4, 4, 576))
    ),
    "cache with an odd number of bytes between rows": Rejected(
        ValueError,
        "kv_cache",
        "2-byte",
        kv_cache=np.ndarray((4, 4, 576), BF16, np.zeros(20_000, np.uint8), 0, (4612, 1153, 2)),
    ),
    "slots one byte off": Rejected(
        ValueError, "slot_mapping", "8-byte", slot_mapping=misaligned(np.array([0, 1, 2]))
    ),
    # dtypes
    "float16 rows for a bfloat16 cache": Rejected(
        TypeError,
        "kv_c",
        "bfloat16",
        "float16",
        kv_c=ones(3, 512, dtype=np.float16),
        k_pe=ones(3, 64, dtype=np.float16),
    ),
    "float32 rows for a bfloat16 cache": Rejected(
        TypeError,
        "kv_c",
        "bfloat16",
        "float32",
        kv_c=ones(3, 512, dtype=np.float32),
        k_pe=ones(3, 64, dtype=np.float32),
        kv_cache_dtype="bfloat16",
    ),
    "rows and rotary parts of two dtypes": Rejected(
        TypeError, "k_pe", "bfloat16", "float32", k_pe=ones(3, 64, dtype=np.float32)
    ),
    "float64 rows": Rejected(
        TypeError,
        "kv_c",
        "float64",
        kv_c=ones(3, 512, dtype=np.float64),
        k_pe=ones(3, 64, dtype=np.float64),
    ),
    "rows of integers": Rejected(
        TypeError,
        "kv_c",
        "uint16",
        kv_c=ones(3, 512, dtype=np.uint16),
        k_pe=ones(3, 64, dtype=np.uint16),
    ),
    "rows of fp8": Rejected(
        TypeError,
        "kv_c",
        "float8_e4m3fn",
        kv_c=ones(3, 512, dtype=E4M3),
        k_pe=ones(3, 64, dtype=E4M3),
        kv_cache=np.zeros((4, 4, 576), E4M3),
        kv_cache_dtype="fp8",
        scale=1.0,
    ),
    "rows of another byte order": Rejected(
        TypeError,
        "kv_c",
        kv_c=swapped(ones(3, 512, dtype=np.float32)),
        k_pe=swapped(ones(3, 64, dtype=np.float32)),
        kv_cache=ones(4, 4, 576, dtype=np.float32),
    ),
    "cache of another byte order": Rejected(
        TypeError,
        ["kv_cache", "kv_c"],
        kv_c=ones(3, 512, dtype=np.float32),
        k_pe=ones(3, 64, dtype=np.float32),
        kv_cache=swapped(ones(4, 4, 576, dtype=np.float32)),
    ),
    "slots of another byte order": Rejected(
        TypeError, "slot_mapping", slot_mapping=swapped(np.array([0, 1, 2]))
    ),
    "cache of bytes with auto": Rejected(
        TypeError, "kv_cache", "uint8", kv_cache=ones(4, 4, 576, dtype=np.uint8)
    ),
    "cache of bytes named bfloat16": Rejected(
        TypeError,
        "kv_cache",
        "bfloat16",
        "uint8",
        kv_cache=ones(4, 4, 1152, dtype=np.uint8),
        kv_cache_dtype="bfloat16",
    ),
    "cache of 16-bit integers named bfloat16": Rejected(
        TypeError,
        "kv_cache",
        "bfloat16",
        "uint16",
        kv_cache=ones(4, 4, 576, dtype=np.uint16),
        kv_cache_dtype="bfloat16",
    ),
    "float16 cache named bfloat16": Rejected(
        TypeError,
        "kv_cache",
        "bfloat16",
        "float16",
        kv_cache=ones(4, 4, 576, dtype=np.float16),
        kv_cache_dtype="bfloat16",
    ),
    "cache of float64 with auto": Rejected(
        TypeError, "kv_cache", "float64", kv_cache=ones(4, 4, 576, dtype=np.float64)
    ),
    "cache of signed bytes for fp8": Rejected(
        TypeError,
        "kv_cache",
        "uint8",
        "int8",
        kv_cache=ones(4, 4, 576, dtype=np.int8),
        kv_cache_dtype="fp8",
        scale=1.0,
    ),
    "bfloat16 cache for fp8": Rejected(
        TypeError, "kv_cache", "uint8", "bfloat16", kv_cache_dtype="fp8", scale=1.0
    ),
    "e5m2 cache for e4m3": Rejected(
        TypeError,
        "kv_cache",
        "e4m3",
        "e5m2",
        kv_cache=np.zeros((4, 4, 576), E5M2),
        kv_cache_dtype="fp8_e4m3",
        scale=1.0,
    ),
    "e4m3 cache for e5m2": Rejected(
        TypeError,
        "kv_cache",
        "e5m2",
        "e4m3",
        kv_cache=np.zeros((4, 4, 576), E4M3),
        kv_cache_dtype="fp8_e5m2",
        scale=1.0,
    ),
    # arrays that are none
    "rows as a list": Rejected(TypeError, "kv_c", "list", kv_c=[[1.0] * 512] * 3),
    "rotary parts as a list": Rejected(TypeError, "k_pe", "list", k_pe=[[1.0] * 64] * 3),
    "cache as a list": Rejected(TypeError, "kv_cache", "list", kv_cache=[[[1.0] * 576]]),
    "slots as a list": Rejected(TypeError, "slot_mapping", "list", slot_mapping=[0, 1, 2]),
    "slots as a tuple": Rejected(TypeError, "slot_mapping", "tuple", slot_mapping=(0, 1, 2)),
    "a number as slots": Rejected(TypeError, "slot_mapping", "int", slot_mapping=3),
    "rows as None": Rejected(TypeError, "kv_c", "None", kv_c=None),
    "cache as None": Rejected(TypeError, "kv_cache", "None", kv_cache=None),
    "rows as text": Rejected(TypeError, "kv_c", "str", kv_c="rows"),
    "rows of objects": Rejected(TypeError, "kv_c", "object", kv_c=np.full((3, 512), None, object)),
    # names
    "an unknown name": Rejected(
        ValueError, "kv_cache_dtype", "fp8_ds_mla", "fp9", kv_cache_dtype="fp9"
    ),
    "an empty name": Rejected(ValueError, "kv_cache_dtype", "bfloat16", kv_cache_dtype=""),
    "a name in capitals": Rejected(
        ValueError, "kv_cache_dtype", "BFLOAT16", kv_cache_dtype="BFLOAT16"
    ),
    "no name": Rejected(TypeError, "kv_cache_dtype", "None", kv_cache_dtype=None),
    "a number as name": Rejected(TypeError, "kv_cache_dtype", "int", kv_cache_dtype=8),
    # scales
    "no scale": Rejected(
        ValueError,
        "scale",
        "fp8_e4m3",
        "None",
        kv_cache=ones(4, 4, 576, dtype=np.uint8),
        kv_cache_dtype="fp8",
    ),
    "a scale of text": Rejected(
        TypeError,
        "scale",
        "str",
        "a number or an array",
        kv_cache=ones(4, 4, 576, dtype=np.uint8),
        kv_cache_dtype="fp8",
        scale="1.0",
    ),
    "a complex scale": Rejected(
        TypeError,
        "scale",
        "complex",
        kv_cache=ones(4, 4, 576, dtype=np.uint8),
        kv_cache_dtype="fp8",
        scale=1 + 0j,
    ),
    "a scale of two dimensions": Rejected(
        ValueError,
        "scale",
        "[1, 2]",
        kv_cache=ones(4, 4, 576, dtype=np.uint8),
        kv_cache_dtype="fp8",
        scale=ones(1, 2, dtype=np.float32),
    ),
    "a scale of NumPy text": Rejected(
        TypeError,
        "scale",
        "str",
        kv_cache=ones(4, 4, 576, dtype=np.uint8),
        kv_cache_dtype="fp8",
        scale=np.str_("1.0"),
    ),
    "a scale of an array of text": Rejected(
        TypeError,
        "scale",
        kv_cache=ones(4, 4, 576, dtype=np.uint8),
        kv_cache_dtype="fp8",
        scale=np.array("1.0"),
    ),
    "a complex scale of NumPy": Rejected(
        TypeError,
        "scale",
        "complex",
        kv_cache=ones(4, 4, 576, dtype=np.uint8),
        kv_cache_dtype="fp8",
        scale=np.complex64(1),
    ),
    "an unknown scale format": Rejected(
        ValueError,
        "scale_format",
        "ue8m0",
        "bf16",
        kv_cache=ones(4, 4, 656, dtype=np.uint8),
        kv_cache_dtype="fp8_ds_mla",
        scale_format="bf16",
    ),
    # streams
    "a stream on NumPy": Rejected((ValueError, TypeError), "stream", "None", stream=7),
}


@parametrised(SINGLE)
def test_one_layer(backend, case):
    arguments = {
        "kv_c": ones(3, 512),
        "k_pe": ones(3, 64),
        "kv_cache": None,
        "slot_mapping": np.array([0, 1, 2]),
    }
    cache = make_cache(backend)
    arguments["kv_cache"] = cache.array
    replaced = case.arguments.get("kv_cache", cache.array)
    before = replaced.copy() if isinstance(replaced, np.ndarray) else None
    with rejected(
        case.exception, "concat_and_cache_mla", case.blamed, *case.fragments, caches=[cache]
    ):
        concat_and_cache_mla(**{**arguments, **case.arguments})
    if before is not None:
        assert replaced.tobytes() == before.tobytes()


def test_the_right_call_of_this_file_is_accepted(backend):
    cache = make_cache(backend)
    slots = np.array([0, 1, 2])
    assert concat_and_cache_mla(ones(3, 512), ones(3, 64), cache.array, slots) is None
    assert np.all(cache.values(2) == 0x3F80)


# --- construction of a writer ---------------------------------------------------------------------


def fp8_caches(count=2):
    return [np.zeros((4, 4, 576), np.uint8) for _ in range(count)]


WRITER = {
    "no caches": Rejected(ValueError, "kv_caches", kv_caches=[]),
    "None as caches": Rejected(TypeError, "kv_caches", "None", kv_caches=None),
    "a cache that is a list": Rejected(
        TypeError, "kv_caches", "list", layer=1, kv_caches=[ones(4, 4, 576), [1.0]]
    ),
    "a cache that is None": Rejected(
        TypeError, "kv_caches", "None", layer=1, kv_caches=[ones(4, 4, 576), None]
    ),
    "a cache of two dimensions": Rejected(
        ValueError, "kv_caches", "[4, 576]", layer=1, kv_caches=[ones(4, 4, 576), ones(4, 576)]
    ),
    "a cache of five dimensions": Rejected(
        ValueError, "kv_caches", layer=0, kv_caches=[ones(4, 4, 1, 1, 576), ones(4, 4, 576)]
    ),
    "a cache of two heads": Rejected(
        ValueError, "kv_caches", layer=0, kv_caches=[ones(4, 4, 2, 576), ones(4, 4, 576)]
    ),
    "a cache of another width": Rejected(
        ValueError, "kv_caches", "576", "575", layer=1, kv_caches=[ones(4, 4, 576), ones(4, 4, 575)]
    ),
    "a cache without rows in its blocks": Rejected(
        ValueError, "kv_caches", layer=1, kv_caches=[ones(4, 4, 576), ones(4, 0, 576)]
    ),
    "a cache with a strided last axis": Rejected(
        ValueError,
        "kv_caches",
        "stride",
        layer=1,
        kv_caches=[ones(4, 4, 576), strided(ones(4, 4, 576))],
    ),
    "a cache of another dtype than its name": Rejected(
        TypeError,
        "kv_caches",
        "bfloat16",
        "float32",
        layer=1,
        kv_caches=[ones(4, 4, 576), ones(4, 4, 576, dtype=np.float32)],
        kv_cache_dtype="bfloat16",
    ),
    "a read-only cache": Rejected(
        ValueError,
        "kv_caches",
        "read-only",
        layer=1,
        kv_caches=[ones(4, 4, 576), read_only(ones(4, 4, 576))],
    ),
    "another number of names": Rejected(
        ValueError, "kv_cache_dtype", "2", "3", kv_cache_dtype=["auto", "auto", "auto"]
    ),
    "no names": Rejected(ValueError, "kv_cache_dtype", kv_cache_dtype=[]),
    "an unknown name": Rejected(ValueError, "kv_cache_dtype", "fp9", kv_cache_dtype="fp9"),
    "an unknown name for one layer": Rejected(
        ValueError, "kv_cache_dtype", "fp9", kv_cache_dtype=["auto", "fp9"]
    ),
    "a number as name": Rejected(TypeError, "kv_cache_dtype", "int", kv_cache_dtype=8),
    "no scales": Rejected(
        ValueError, "kv_scales", "None", kv_caches=fp8_caches(), kv_cache_dtype="fp8"
    ),
    "no scale for one layer": Rejected(
        ValueError,
        "kv_scales",
        "None",
        layer=1,
        kv_caches=fp8_caches(),
        kv_cache_dtype="fp8",
        kv_scales=[1.0, None],
    ),
    "a scale of text": Rejected(
        TypeError,
        "kv_scales",
        "str",
        "a number or an array",
        layer=1,
        kv_caches=fp8_caches(),
        kv_cache_dtype="fp8",
        kv_scales=[1.0, "2"],
    ),
    "scales of text": Rejected(
        TypeError,
        "kv_scales",
        "a list of scales or an array",
        "str",
        kv_caches=fp8_caches(),
        kv_cache_dtype="fp8",
        kv_scales="12",
    ),
    "scales for layers without one": Rejected(ValueError, "kv_scales", kv_scales=[1.0, 1.0]),
    "a scale for one layer without one": Rejected(
        ValueError,
        "kv_scales",
        "None",
        layer=1,
        kv_caches=[np.zeros((4, 4, 576), np.uint8), np.zeros((4, 4, 656), np.uint8)],
        kv_cache_dtype=["fp8", "fp8_ds_mla"],
        kv_scales=[1.0, 1.0],
    ),
    "scales with a stride": Rejected(
        ValueError,
        "kv_scales",
        "must be contiguous",
        kv_caches=fp8_caches(),
        kv_cache_dtype="fp8",
        kv_scales=ones(4, dtype=np.float32)[::2],
    ),
    "scales broadcast with stride 0": Rejected(
        ValueError,
        "kv_scales",
        "must be contiguous",
        kv_caches=fp8_caches(),
        kv_cache_dtype="fp8",
        kv_scales=np.broadcast_to(np.float32(1), (2,)),
    ),
    "scales one byte off": Rejected(
        ValueError,
        "kv_scales",
        "4-byte",
        kv_caches=fp8_caches(),
        kv_cache_dtype="fp8",
        kv_scales=misaligned(ones(2, dtype=np.float32)),
    ),
    "scales of two dimensions": Rejected(
        ValueError,
        "kv_scales",
        "[2, 1]",
        kv_caches=fp8_caches(),
        kv_cache_dtype="fp8",
        kv_scales=ones(2, 1, dtype=np.float32),
    ),
    "scales of float64 in one array": Rejected(
        TypeError,
        "kv_scales",
        "float32",
        "float64",
        kv_caches=fp8_caches(),
        kv_cache_dtype="fp8",
        kv_scales=ones(2, dtype=np.float64),
    ),
    "a rank of zero": Rejected(ValueError, "kv_lora_rank", "0", kv_lora_rank=0),
    "a negative rank": Rejected(ValueError, "kv_lora_rank", "-1", kv_lora_rank=-1),
    "a rank that is no integer": Rejected(TypeError, "kv_lora_rank", "float", kv_lora_rank=512.0),
    "a negative rotary dimension": Rejected(ValueError, "rope_dim", "-1", rope_dim=-1),
    "an unknown scale format": Rejected(
        ValueError,
        "scale_format",
        "ue8m0",
        "e8m0",
        kv_caches=[np.zeros((4, 4, 656), np.uint8)],
        kv_cache_dtype="fp8_ds_mla",
        scale_format="e8m0",
    ),
}


@parametrised(WRITER)
def test_construction_of_a_writer(case):
    arguments = {"kv_caches": [ones(4, 4, 576), ones(4, 4, 576)], **case.arguments}
    with rejected(
        case.exception, "GroupedCacheWriter", case.blamed, *case.fragments, layer=case.layer
    ):
        GroupedCacheWriter(**arguments)


# --- insert and bind ------------------------------------------------------------------------------


class Unhelpful:
    """An object that NumPy could convert but that is no array."""

    def __array__(self, dtype=None, copy=None):
        return np.ones((2, 3, 512), dtype)


INSERT = {
    "rows of another width": Rejected(
        ValueError, "kv_c", "[2, T, 512]", "[2, 3, 256]", kv_c=ones(2, 3, 256)
    ),
    "rows of another number of layers": Rejected(
        ValueError, "kv_c", "[2, T, 512]", "[3, 3, 512]", kv_c=ones(3, 3, 512)
    ),
    "rows with layers and tokens exchanged": Rejected(
        ValueError, "kv_c", "[3, 2, 512]", kv_c=ones(3, 2, 512)
    ),
    "rows of two dimensions": Rejected(ValueError, "kv_c", "[3, 512]", kv_c=ones(3, 512)),
    "rows of four dimensions": Rejected(
        ValueError, "kv_c", "[2, 3, 1, 512]", kv_c=ones(2, 3, 1, 512)
    ),
    "rotary parts of another width": Rejected(
        ValueError, "k_pe", "[2, T, 64]", "[2, 3, 32]", k_pe=ones(2, 3, 32)
    ),
    "rotary parts of another number of layers": Rejected(
        ValueError, "k_pe", "[2, T, 64]", "[1, 3, 64]", k_pe=ones(1, 3, 64)
    ),
    "no rotary parts": Rejected((TypeError, ValueError), "k_pe", "None", k_pe=None),
    "fewer rows than slots": Rejected(ValueError, "kv_c", "[2, 2, 512]", kv_c=ones(2, 2, 512)),
    "fewer rotary parts than slots": Rejected(
        ValueError, "k_pe", "[2, 2, 64]", k_pe=ones(2, 2, 64)
    ),
    "rows with a strided last axis": Rejected(
        ValueError, "kv_c", "stride", kv_c=strided(ones(2, 3, 512))
    ),
    "rotary parts with a reversed last axis": Rejected(
        ValueError, "k_pe", "stride", k_pe=reversed_axis(ones(2, 3, 64))
    ),
    "float16 rows": Rejected(
        TypeError,
        "kv_c",
        "bfloat16",
        "float16",
        kv_c=ones(2, 3, 512, dtype=np.float16),
        k_pe=ones(2, 3, 64, dtype=np.float16),
    ),
    "rotary parts of another dtype": Rejected(
        TypeError, "k_pe", "bfloat16", "float32", k_pe=ones(2, 3, 64, dtype=np.float32)
    ),
    "rows as a list of layers": Rejected(
        TypeError, "kv_c", "list", kv_c=[ones(3, 512), ones(3, 512)]
    ),
    "an object that could be converted": Rejected(TypeError, "kv_c", "Unhelpful", kv_c=Unhelpful()),
    "slots for another number of layers": Rejected(
        ValueError, "slot_mapping", "[3, 3]", slot_mapping=np.zeros((3, 3), np.int64)
    ),
    "slots of one row of two dimensions": Rejected(
        ValueError, "slot_mapping", "[1, 3]", slot_mapping=np.zeros((1, 3), np.int64)
    ),
    "slots of three dimensions": Rejected(
        ValueError, "slot_mapping", "[1, 2, 3]", slot_mapping=np.zeros((1, 2, 3), np.int64)
    ),
    "slots of no dimension": Rejected(ValueError, "slot_mapping", "[]", slot_mapping=np.array(1)),
    "slots of floats": Rejected(
        TypeError, "slot_mapping", "float64", slot_mapping=np.array([0.0, 1.0, 2.0])
    ),
    "a list of slots of another length": Rejected(
        ValueError, "slot_mapping", "2", "3", slot_mapping=[np.array([0]), None, None]
    ),
    "an empty list of slots": Rejected(ValueError, "slot_mapping", "2", slot_mapping=[]),
    "a list of numbers": Rejected(TypeError, "slot_mapping", "int", slot_mapping=[0, 1]),
    "a list with slots of floats": Rejected(
        TypeError,
        "slot_mapping",
        "float32",
        layer=1,
        slot_mapping=[np.array([0]), np.array([1], np.float32)],
    ),
    "a list with more slots than rows": Rejected(
        ValueError, "kv_c", "4", slot_mapping=[np.arange(4), None]
    ),
    "a list of slots of two lengths": Rejected(
        ValueError, "slot_mapping", "2", "3", layer=1, slot_mapping=[np.arange(2), np.arange(3)]
    ),
    "a list with slots of two dimensions": Rejected(
        ValueError, "slot_mapping", "[1, 2]", layer=1, slot_mapping=[None, np.array([[0, 1]])]
    ),
    "a stream on NumPy": Rejected((ValueError, TypeError), "stream", "None", stream=7),
}


def a_writer(backend) -> tuple[GroupedCacheWriter, list[Cache]]:
    caches = [make_cache(backend), make_cache(backend)]
    return GroupedCacheWriter([cache.array for cache in caches]), caches


def right_arguments():
    return {"kv_c": ones(2, 3, 512), "k_pe": ones(2, 3, 64), "slot_mapping": np.array([0, 1, 2])}


@parametrised(INSERT)
def test_insert(backend, case):
    writer, caches = a_writer(backend)
    with rejected(
        case.exception, "insert", case.blamed, *case.fragments, layer=case.layer, caches=caches
    ):
        writer.insert(**{**right_arguments(), **case.arguments})
    writer.insert(**right_arguments())  # the failure left nothing behind
    assert np.all(caches[1].values(2) == 0x3F80)


@parametrised({key: case for key, case in INSERT.items() if "stream" not in case.arguments})
def test_bind(backend, case):
    writer, caches = a_writer(backend)
    with rejected(
        case.exception, "bind", case.blamed, *case.fragments, layer=case.layer, caches=caches
    ):
        writer.bind(**{**right_arguments(), **case.arguments})


def test_the_message_of_a_wrong_shape_is_exactly_this():
    writer = GroupedCacheWriter([ones(4, 4, 576) for _ in range(5)])
    with pytest.raises(ValueError) as caught:
        writer.insert(ones(5, 42, 256), ones(5, 42, 64), np.arange(42))
    assert str(caught.value) == "insert: kv_c must have shape [5, T, 512], got [5, 42, 256]"


def test_a_wrong_call_after_a_right_one_is_still_refused(backend):
    """What is remembered about a right call must not stand in for checks of another one."""
    writer, caches = a_writer(backend)
    writer.insert(**right_arguments())
    for case in INSERT.values():
        with rejected(case.exception, "insert", case.blamed, layer=case.layer, caches=caches):
            writer.insert(**{**right_arguments(), **case.arguments})
    cache = make_cache(backend)
    arguments = {
        "kv_c": ones(3, 512),
        "k_pe": ones(3, 64),
        "kv_cache": cache.array,
        "slot_mapping": np.array([0, 1, 2]),
    }
    concat_and_cache_mla(**arguments)
    for case in SINGLE.values():
        with rejected(case.exception, "concat_and_cache_mla", case.blamed, caches=[cache]):
            concat_and_cache_mla(**{**arguments, **case.arguments})


# --- rebind, update_scales ------------------------------------------------------------------------

REBIND = {
    "another number of caches": Rejected(
        ValueError, "kv_caches", "2", "3", kv_caches=[ones(4, 4, 576)] * 3
    ),
    "no caches": Rejected(ValueError, "kv_caches", "2", kv_caches=[]),
    "a cache of another dtype": Rejected(
        TypeError,
        "kv_caches",
        "bfloat16",
        "float32",
        layer=1,
        kv_caches=[ones(4, 4, 576), ones(4, 4, 576, dtype=np.float32)],
    ),
    "a cache of another width": Rejected(
        ValueError, "kv_caches", "576", "640", layer=0, kv_caches=[ones(4, 4, 640), ones(4, 4, 576)]
    ),
    "a read-only cache": Rejected(
        ValueError,
        "kv_caches",
        "read-only",
        layer=1,
        kv_caches=[ones(4, 4, 576), read_only(ones(4, 4, 576))],
    ),
    "a cache that is None": Rejected(
        TypeError, "kv_caches", "None", layer=1, kv_caches=[ones(4, 4, 576), None]
    ),
}


@parametrised(REBIND)
def test_rebind(backend, case):
    writer, caches = a_writer(backend)
    with rejected(
        case.exception, "rebind", case.blamed, *case.fragments, layer=case.layer, caches=caches
    ):
        writer.rebind(**case.arguments)
    writer.insert(**right_arguments())  # still into the caches of before
    assert np.all(caches[0].values(2) == 0x3F80)
    assert np.all(caches[1].values(2) == 0x3F80)


UPDATE = {
    "no scales": Rejected(ValueError, "kv_scales", "None", kv_scales=None),
    "too few scales": Rejected(ValueError, "kv_scales", "2", "1", kv_scales=[1.0]),
    "too many scales": Rejected(ValueError, "kv_scales", "2", "3", kv_scales=[1.0, 1.0, 1.0]),
    "no scale for one layer": Rejected(
        ValueError, "kv_scales", "None", layer=1, kv_scales=[1.0, None]
    ),
    "a scale that is not finite": Rejected(
        ValueError, "kv_scales", "nan", layer=1, kv_scales=[1.0, math.nan]
    ),
    "a scale of text": Rejected(TypeError, "kv_scales", "str", layer=1, kv_scales=[1.0, "1"]),
    "an array with a stride": Rejected(
        ValueError, "kv_scales", "must be contiguous", kv_scales=ones(4, dtype=np.float32)[::2]
    ),
    "an array of another length": Rejected(
        ValueError, "kv_scales", "[3]", kv_scales=ones(3, dtype=np.float32)
    ),
    "an array of float64": Rejected(
        TypeError, "kv_scales", "float64", kv_scales=ones(2, dtype=np.float64)
    ),
}


@parametrised(UPDATE)
def test_update_scales(backend, case):
    caches = [make_cache(backend, "fp8_e4m3") for _ in range(2)]
    writer = GroupedCacheWriter([cache.array for cache in caches], "fp8", [0.5, 2.0])
    with rejected(
        case.exception,
        "update_scales",
        case.blamed,
        *case.fragments,
        layer=case.layer,
        caches=caches,
    ):
        writer.update_scales(**case.arguments)
    writer.insert(**right_arguments())  # still with the scales of before
    assert np.all(caches[0].row(1) == 0x40)
    assert np.all(caches[1].row(1) == 0x30)


def test_update_scales_of_layers_without_scales(backend):
    writer, caches = a_writer(backend)
    with rejected(ValueError, "update_scales", "kv_scales", caches=caches):
        writer.update_scales([1.0, 1.0])


# --- read_slots, get_layout -----------------------------------------------------------------------

READ = {
    "cache of two dimensions": Rejected(
        ValueError, "kv_cache", "[16, 576]", kv_cache=ones(16, 576)
    ),
    "cache of five dimensions": Rejected(ValueError, "kv_cache", kv_cache=ones(4, 4, 1, 1, 576)),
    "cache of two heads": Rejected(ValueError, "kv_cache", kv_cache=ones(4, 4, 2, 576)),
    "blocks without rows": Rejected(ValueError, "kv_cache", kv_cache=ones(4, 0, 576)),
    "cache with a reversed last axis": Rejected(
        ValueError, "kv_cache", "stride", kv_cache=reversed_axis(ones(4, 4, 576))
    ),
    "cache as a list": Rejected(TypeError, "kv_cache", "list", kv_cache=[1.0]),
    "cache of bytes with auto": Rejected(
        TypeError, "kv_cache", "uint8", kv_cache=ones(4, 4, 576, dtype=np.uint8)
    ),
    "cache of another dtype than its name": Rejected(
        TypeError, "kv_cache", "float32", "bfloat16", kv_cache_dtype="float32"
    ),
    "slots as a list": Rejected(TypeError, "slots", "list", slots=[0, 1]),
    "slots of floats": Rejected(TypeError, "slots", "float64", slots=np.array([0.0])),
    "slots of uint64": Rejected(TypeError, "slots", "uint64", slots=np.array([0], np.uint64)),
    "slots of two dimensions": Rejected(ValueError, "slots", "[1, 1]", slots=np.array([[0]])),
    "slots of no dimension": Rejected(ValueError, "slots", "[]", slots=np.array(0)),
    "no scale": Rejected(
        ValueError,
        "scale",
        "None",
        kv_cache=ones(4, 4, 576, dtype=np.uint8),
        kv_cache_dtype="fp8",
    ),
    "an unknown name": Rejected(ValueError, "kv_cache_dtype", "fp9", kv_cache_dtype="fp9"),
    "an unknown output dtype": Rejected(
        (ValueError, TypeError), "out_dtype", "float128", out_dtype="float128"
    ),
    "fp8 as output dtype": Rejected(
        (ValueError, TypeError), "out_dtype", "fp8_e4m3", out_dtype="fp8_e4m3"
    ),
}


@parametrised(READ)
def test_read_slots(case):
    arguments = {"kv_cache": ones(4, 4, 576), "slots": np.array([0, 1])}
    with rejected(case.exception, "read_slots", case.blamed, *case.fragments):
        read_slots(**{**arguments, **case.arguments})


LAYOUT = {
    "an unknown name": Rejected(
        ValueError, "kv_cache_dtype", "fp8_ds_mla", "fp9", kv_cache_dtype="fp9"
    ),
    "a number": Rejected(TypeError, "kv_cache_dtype", "int", kv_cache_dtype=8),
    "no name": Rejected(TypeError, "kv_cache_dtype", "None", kv_cache_dtype=None),
    "another rank of fp8_ds_mla": Rejected(
        ValueError, "kv_lora_rank", "512", "256", kv_cache_dtype="fp8_ds_mla", kv_lora_rank=256
    ),
    "another rotary dimension of fp8_ds_mla": Rejected(
        ValueError, "rope_dim", "64", "32", kv_cache_dtype="fp8_ds_mla", rope_dim=32
    ),
    "an unknown scale format": Rejected(
        ValueError, "scale_format", "ue8m0", "x", kv_cache_dtype="fp8_ds_mla", scale_format="x"
    ),
    "an unknown dtype for auto": Rejected(
        (ValueError, TypeError), "dtype", "float64", kv_cache_dtype="auto", dtype="float64"
    ),
    "a rank of zero": Rejected(ValueError, "kv_lora_rank", "0", kv_lora_rank=0),
    "a negative rank": Rejected(ValueError, "kv_lora_rank", "-512", kv_lora_rank=-512),
    "a rank that is no integer": Rejected(TypeError, "kv_lora_rank", "float", kv_lora_rank=512.0),
    "a negative rotary dimension": Rejected(ValueError, "rope_dim", "-1", rope_dim=-1),
}


@parametrised(LAYOUT)
def test_get_layout(case):
    with rejected(case.exception, "get_layout", case.blamed, *case.fragments):
        get_layout(**{"kv_cache_dtype": "bfloat16", **case.arguments})


def test_errors_of_the_package_are_runtime_errors():
    assert issubclass(cupy_mla.CompileError, RuntimeError)
    assert issubclass(cupy_mla.BackendUnavailable, RuntimeError)
