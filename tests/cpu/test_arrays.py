"""What an array is: objects that look like one, and memory that its owner gives away."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from cupy_mla import BackendUnavailable, GroupedCacheWriter, _arrays, concat_and_cache_mla
from cupy_mla._cuda import cupy_device
from tests import helpers
from tests.helpers import make_cache


def rows(count=3):
    return np.ones((count, 512), np.float32), np.ones((count, 64), np.float32)


@pytest.mark.parametrize("kind", [np.ndarray, int, type])
def test_a_class_is_no_array(kind):
    cache = make_cache(helpers.Backend(), "float32")
    kv_c, k_pe = rows()
    for _ in range(20):  # CPython 3.11 crashed in the sixth round of calls that it had optimised
        with helpers.rejected(TypeError, "concat_and_cache_mla", "kv_c", "array", caches=[cache]):
            concat_and_cache_mla(kind, k_pe, cache.array, np.arange(3))
        with helpers.rejected(TypeError, "concat_and_cache_mla", "k_pe", "array", caches=[cache]):
            concat_and_cache_mla(kv_c, kind, cache.array, np.arange(3))


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_a_matrix_is_read_as_the_array_it_is():
    cache, plain = (make_cache(helpers.Backend(), "float32") for _ in range(2))
    kv_c, k_pe = rows()
    concat_and_cache_mla(np.asmatrix(kv_c), np.asmatrix(k_pe), cache.array, np.arange(3))
    concat_and_cache_mla(kv_c, k_pe, plain.array, np.arange(3))
    helpers.assert_bytes_equal(cache.bytes(), plain.bytes(), cache.geometry)


def test_a_mask_is_not_ignored():
    cache = make_cache(helpers.Backend(), "float32")
    kv_c, k_pe = rows()
    with helpers.rejected(TypeError, "concat_and_cache_mla", "kv_c", "mask", caches=[cache]):
        concat_and_cache_mla(np.ma.masked_array(kv_c), k_pe, cache.array, np.arange(3))


class Interface:
    """An object with an array interface and, maybe, a dtype."""

    def __init__(self, interface, dtype=None):
        self.__array_interface__ = interface
        if dtype is not None:
            self.dtype = dtype


def interface_of(array, **changed):
    return {**array.__array_interface__, **changed}


def test_a_dtype_of_another_size_than_the_interface_says_is_not_believed():
    """Elements of four bytes over an array of two would be read beyond its end."""
    cache = make_cache(helpers.Backend(), "float16")
    kv_c, k_pe = (part.astype(np.float16) for part in rows())
    concat_and_cache_mla(Interface(interface_of(kv_c), "float32"), k_pe, cache.array, np.arange(3))
    assert np.all(cache.row(2).view(np.float16) == 1)


@pytest.mark.parametrize(
    "changed",
    [{"data": None}, {"shape": None}, {"strides": (2048,)}, {"shape": ("3", 512)}],
    ids=str,
)
def test_incomplete_interfaces_are_refused(changed):
    cache = make_cache(helpers.Backend(), "float32")
    kv_c, k_pe = rows()
    broken = Interface(interface_of(kv_c, **changed))
    with helpers.rejected(TypeError, "concat_and_cache_mla", "kv_c", caches=[cache]):
        concat_and_cache_mla(broken, k_pe, cache.array, np.arange(3))


@pytest.mark.parametrize("way", ["data", "set_"])
def test_a_tensor_that_changes_its_storage_leaves_the_writer_its_memory(way):
    torch = pytest.importorskip("torch")
    cache = torch.zeros(20000, 16, 576)
    before = cache.view(-1)
    writer = GroupedCacheWriter([cache])
    if way == "data":
        cache.data = torch.empty(0)
    else:
        cache.set_()
    gc.collect()
    row = torch.ones(1, 4, 576)
    writer.insert(row[..., :512], row[..., 512:], torch.tensor([0, 5, 100, 319999]))
    assert before.view(-1, 576)[319999].eq(1).all()


@pytest.mark.parametrize("caches", [{1, 2}, "ab", np.zeros((2, 4, 1, 576)), {}], ids=type)
def test_layers_come_in_an_order(caches):
    with helpers.rejected(TypeError, "GroupedCacheWriter", "kv_caches", "list or tuple"):
        GroupedCacheWriter(caches)
    with helpers.rejected(TypeError, "GroupedCacheWriter", "kv_cache_dtype", "list or tuple"):
        GroupedCacheWriter([np.zeros((2, 4, 576), np.float32)], {"float32"})


def test_an_interface_that_names_no_device_is_asked_for_at_the_driver(monkeypatch):
    """Its address alone says on which of several devices it lies."""
    asked = []

    def pointer_device(address):
        asked.append(address)
        return 3

    monkeypatch.setattr(_arrays, "pointer_device", pointer_device)

    class OnDevice:
        def __init__(self):
            self.__cuda_array_interface__ = {
                "shape": (3, 512),
                "typestr": "<f4",
                "data": (0x7F0000001000, False),
                "version": 3,
            }

    cache = make_cache(helpers.Backend(), "float32")
    _, k_pe = rows()
    with helpers.rejected(
        ValueError, "concat_and_cache_mla", "kv_c", "same CUDA device", "cuda:3", caches=[cache]
    ):
        concat_and_cache_mla(OnDevice(), k_pe, cache.array, np.arange(3))
    assert asked == [0x7F0000001000]


def test_without_cupy_a_device_array_that_names_no_device_is_one_clear_error(monkeypatch):
    def missing(ordinal):
        raise BackendUnavailable("CuPy is needed")

    monkeypatch.setattr(cupy_device, "device", missing)
    with pytest.raises(BackendUnavailable, match="CuPy"):
        _arrays.pointer_device(0x7F0000001000)
