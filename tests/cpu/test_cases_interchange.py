"""Arrays that are read-only, empty, or claim to be on a device, judged by attributes alone.

No object here that claims to be CUDA memory is ever valid together with the others of its call, so
nothing is launched even on a machine with a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import (
    BackendUnavailable,
    GroupedCacheWriter,
    concat_and_cache_mla,
    concat_and_cache_mla_grouped,
    read_slots,
)
from tests import helpers, oracle
from tests.helpers import FakeDevice, OnlyDLPack, make_cache, unchanged


def host_arrays(tokens=2):
    return (
        np.ones((tokens, 512), oracle.BFLOAT16),
        np.ones((tokens, 64), oracle.BFLOAT16),
        np.arange(tokens),
    )


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


# --- dtype of an array that speaks __cuda_array_interface__ ---------------------------------------


def test_the_dtype_attribute_decides_over_a_two_byte_typestr():
    """A tensor of bfloat16 that exports "<f2": the inputs must then be bfloat16, not float16."""
    cache = FakeDevice((4, 4, 576), "<f2", dtype="torch.bfloat16")
    kv_c = FakeDevice((2, 512), "<f4", device=0)
    k_pe = FakeDevice((2, 64), "<f4", device=0)
    slots = FakeDevice((2,), "<i8")
    with helpers.rejected(
        TypeError, "concat_and_cache_mla", ["kv_c", "kv_cache"], "bfloat16", "float32"
    ):
        concat_and_cache_mla(kv_c, k_pe, cache, slots)
    kv_c = FakeDevice((2, 512), "<f2", dtype="torch.bfloat16")
    k_pe = FakeDevice((2, 64), "<f2", dtype="torch.bfloat16")
    cache = FakeDevice((4, 4, 576), "<f4")
    with helpers.rejected(
        TypeError, "concat_and_cache_mla", ["kv_c", "kv_cache"], "bfloat16", "float32"
    ):
        concat_and_cache_mla(kv_c, k_pe, cache, slots)


def test_a_two_byte_typestr_alone_is_float16():
    cache = FakeDevice((4, 4, 576), "<f2")
    kv_c = FakeDevice((2, 512), "<f4")
    k_pe = FakeDevice((2, 64), "<f4")
    with helpers.rejected(
        TypeError, "concat_and_cache_mla", ["kv_c", "kv_cache"], "float16", "float32"
    ) as _:
        concat_and_cache_mla(kv_c, k_pe, cache, FakeDevice((2,), "<i8"))


def test_empty_device_arrays_without_pointer_and_strides_are_accepted():
    """A pointer of 0 is what exporters give for no elements; at most the backend is missing."""
    kv_c = FakeDevice((0, 512), "<f4", pointer=0)
    k_pe = FakeDevice((0, 64), "<f4", pointer=0)
    slots = FakeDevice((0,), "<i8", pointer=0)
    cache = FakeDevice((4, 4, 576), "<f4")
    try:
        assert concat_and_cache_mla(kv_c, k_pe, cache, slots) is None
    except BackendUnavailable as error:
        assert "cupy" in str(error).lower()


# --- devices --------------------------------------------------------------------------------------


def test_arrays_of_two_devices_are_refused():
    kv_c = FakeDevice((2, 512), "<f4", device=0)
    k_pe = FakeDevice((2, 64), "<f4", device=0)
    cache = FakeDevice((4, 4, 576), "<f4", device=1)
    slots = FakeDevice((2,), "<i8", device=0)
    with helpers.rejected(
        ValueError,
        "concat_and_cache_mla",
        ["kv_c", "k_pe", "kv_cache", "slot_mapping"],
        "same CUDA device",
        "cuda:0",
        "cuda:1",
    ):
        concat_and_cache_mla(kv_c, k_pe, cache, slots)
    with helpers.rejected(ValueError, "read_slots", ["kv_cache", "slots"], "same CUDA device"):
        read_slots(cache, slots)
    other = FakeDevice((4, 4, 576), "<f4", device=0)
    with helpers.rejected(ValueError, "GroupedCacheWriter", "kv_caches", "same CUDA device"):
        GroupedCacheWriter([cache, other])


@pytest.mark.parametrize("alien", ["kv_c", "k_pe", "kv_cache", "slot_mapping"])
def test_host_and_device_are_never_mixed(backend, alien):
    kv_c, k_pe, slots = host_arrays()
    cache = make_cache(backend)
    arrays = {"kv_c": kv_c, "k_pe": k_pe, "kv_cache": cache.array, "slot_mapping": slots}
    fakes = {
        "kv_c": FakeDevice((2, 512), "<f2", dtype="torch.bfloat16"),
        "k_pe": FakeDevice((2, 64), "<f2", dtype="torch.bfloat16"),
        "kv_cache": FakeDevice((4, 4, 576), "<f2", dtype="torch.bfloat16"),
        "slot_mapping": FakeDevice((2,), "<i8"),
    }
    with helpers.rejected(
        ValueError, "concat_and_cache_mla", list(arrays), "same CUDA device", caches=[cache]
    ):
        concat_and_cache_mla(**{**arrays, alien: fakes[alien]})
    if alien == "kv_cache":
        return
    arrays.pop("kv_cache")
    arrays["kv_c"], arrays["k_pe"] = kv_c[None], k_pe[None]
    fakes["kv_c"] = FakeDevice((1, 2, 512), "<f2", dtype="torch.bfloat16")
    fakes["k_pe"] = FakeDevice((1, 2, 64), "<f2", dtype="torch.bfloat16")
    writer = GroupedCacheWriter([cache.array])
    with helpers.rejected(ValueError, "insert", list(arrays), "same CUDA device", caches=[cache]):
        writer.insert(**{**arrays, alien: fakes[alien]})


def test_one_device_cache_among_host_caches_is_refused(backend):
    cache = make_cache(backend)
    fake = FakeDevice((4, 4, 576), "<f2", dtype="torch.bfloat16")
    with helpers.rejected(
        ValueError, "GroupedCacheWriter", "kv_caches", "same CUDA device", caches=[cache]
    ):
        GroupedCacheWriter([cache.array, fake])


def test_a_device_scale_for_a_host_cache_is_refused(backend):
    cache = make_cache(backend, "fp8_e4m3")
    kv_c, k_pe, slots = host_arrays()
    with helpers.rejected(
        ValueError, "concat_and_cache_mla", "scale", "same CUDA device", caches=[cache]
    ):
        concat_and_cache_mla(kv_c, k_pe, cache.array, slots, "fp8", FakeDevice((1,), "<f4"))
    with helpers.rejected(
        ValueError, "GroupedCacheWriter", "kv_scales", "same CUDA device", caches=[cache]
    ):
        GroupedCacheWriter([cache.array], "fp8", FakeDevice((1,), "<f4"))


def test_the_grouped_operation_needs_a_device(backend):
    cache = make_cache(backend)
    kv_c, k_pe, slots = host_arrays()
    pointers = np.array([cache.array.ctypes.data], np.int64)
    with (
        unchanged(cache),
        pytest.raises(TypeError, match=r"^concat_and_cache_mla_grouped: .* must .*, got "),
    ):
        concat_and_cache_mla_grouped(
            kv_c[None], k_pe[None], pointers, slots, 4, 4 * 576, 576, num_blocks=4
        )


# --- read-only arrays -----------------------------------------------------------------------------


def test_a_read_only_cache_is_not_written_but_read(backend):
    kv_c, k_pe, slots = host_arrays()
    cache = make_cache(backend)
    frozen = cache.array.view()
    frozen.flags.writeable = False
    with helpers.rejected(
        ValueError, "concat_and_cache_mla", "kv_cache", "read-only", caches=[cache]
    ):
        concat_and_cache_mla(kv_c, k_pe, frozen, slots)
    writable = make_cache(backend)
    with helpers.rejected(
        ValueError, "GroupedCacheWriter", "kv_caches", "read-only", layer=1, caches=[cache]
    ):
        GroupedCacheWriter([writable.array, frozen])
    writer = GroupedCacheWriter([writable.array])
    with helpers.rejected(ValueError, "rebind", "kv_caches", "read-only", layer=0, caches=[cache]):
        writer.rebind([frozen])
    concat_and_cache_mla(kv_c, k_pe, cache.array, slots)
    assert np.all(read_slots(frozen, read_only(slots)) == 1)


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_read_only_inputs_are_ordinary_inputs(backend, insert_path, rng, fmt):
    kv_c = helpers.random_rows(rng, (1, 2, 512), oracle.BFLOAT16)
    k_pe = helpers.random_rows(rng, (1, 2, 64), oracle.BFLOAT16)
    slots = np.array([5, 0])
    assert helpers.check_insert(
        insert_path,
        [make_cache(backend, fmt)],
        kv_c,
        k_pe,
        slots,
        kv_c_array=read_only(kv_c),
        k_pe_array=read_only(k_pe),
        slots_array=read_only(slots),
    )


class OnlyArrayInterface:
    """A host array seen through __array_interface__ alone."""

    def __init__(self, array):
        self.keep = array
        self.__array_interface__ = array.__array_interface__


def test_host_arrays_that_speak_only_the_array_interface(rng):
    kv_c = helpers.random_rows(rng, (2, 600), np.float32)[:, 3:515]
    k_pe = helpers.random_rows(rng, (2, 64), np.float32)
    slots = np.array([5, 0], np.int32)
    pool = np.full((4, 6, 576), 7, np.float32)
    cache = pool[:, 1:5]
    concat_and_cache_mla(*map(OnlyArrayInterface, (kv_c, k_pe, cache, slots)))
    expected = np.full((4, 4, 576), 7, np.float32)
    expected[slots // 4, slots % 4] = np.concatenate([kv_c, k_pe], axis=1)
    assert np.array_equal(cache, expected)
    assert np.all(pool[:, [0, 5]] == 7)
    rows = np.asarray(read_slots(OnlyArrayInterface(cache), OnlyArrayInterface(slots)))
    assert np.array_equal(rows, expected[slots // 4, slots % 4])
    frozen = OnlyArrayInterface(read_only(cache))
    with helpers.rejected(ValueError, "concat_and_cache_mla", "kv_cache", "read-only"):
        concat_and_cache_mla(kv_c, k_pe, frozen, slots)


def test_host_arrays_that_speak_only_dlpack(rng):
    kv_c = helpers.random_rows(rng, (2, 512), np.float32)
    k_pe = helpers.random_rows(rng, (2, 64), np.float32)
    slots = np.array([5, 0])
    cache = np.full((4, 4, 576), 7, np.float32)
    concat_and_cache_mla(OnlyDLPack(kv_c), OnlyDLPack(k_pe), OnlyDLPack(cache), OnlyDLPack(slots))
    expected = np.full((16, 576), 7, np.float32)
    expected[slots] = np.concatenate([kv_c, k_pe], axis=1)
    assert np.array_equal(cache.reshape(16, 576), expected)
    rows = np.asarray(read_slots(OnlyDLPack(cache), OnlyDLPack(slots)))
    assert np.array_equal(rows, expected[slots])


def test_a_read_only_dlpack_export_is_not_written_but_read():
    cache = np.full((4, 4, 576), 7, np.float32)
    cache.flags.writeable = False
    kv_c = np.ones((2, 512), np.float32)
    k_pe = np.ones((2, 64), np.float32)
    slots = np.array([5, 0])
    with helpers.rejected(ValueError, "concat_and_cache_mla", "kv_cache", "read-only"):
        concat_and_cache_mla(kv_c, k_pe, OnlyDLPack(cache), slots)
    assert np.all(cache == 7)
    assert np.all(np.asarray(read_slots(OnlyDLPack(cache), slots)) == 7)
    rows = OnlyDLPack(read_only(kv_c))
    writable = np.zeros((4, 4, 576), np.float32)
    concat_and_cache_mla(rows, OnlyDLPack(read_only(k_pe)), writable, slots)
    assert np.all(writable.reshape(16, 576)[slots] == 1)
    assert np.count_nonzero(writable) == 2 * 576
