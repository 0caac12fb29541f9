"""torch and JAX arrays on the CPU: read and written in place, given back in their framework."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla, read_slots
from tests import helpers, oracle
from tests.helpers import FORMATS, INPUT_DTYPES, SCALED_FORMATS

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402  (after JAX is known to be there)

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchBackend(helpers.Backend):
    """torch tensors in host memory."""

    name = "torch"

    def array(self, values):
        values = np.asarray(values)
        if values.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            bits = values.view(np.int16 if values.dtype.itemsize == 2 else np.uint8)
            return torch.from_numpy(bits.copy()).view(TORCH_DTYPES[values.dtype.name])
        return torch.from_numpy(values.copy())

    def to_numpy(self, array):
        assert isinstance(array, torch.Tensor)
        name = str(array.dtype).partition(".")[2]
        bits = array.detach().contiguous().view(SIGNED[array.dtype.itemsize]).numpy()
        dtype = oracle.BFLOAT16 if name == "bfloat16" else np.dtype(name)
        return bits.view(dtype)

    def buffer(self, data):
        return torch.from_numpy(super().buffer(data))

    def view(self, buffer, shape, dtype, strides, offset=0):
        size = np.dtype(dtype).itemsize
        assert offset % size == 0
        typed = torch.empty(0, dtype=TORCH_DTYPES[np.dtype(dtype).name])
        strides = [stride // size for stride in strides]
        start = buffer.data_ptr() - buffer.untyped_storage().data_ptr() + offset
        return typed.set_(buffer.untyped_storage(), start // size, tuple(shape), strides)


@pytest.fixture
def backend():
    """Give torch in place of NumPy."""
    return TorchBackend()


def random_inputs(rng, fmt, layers, tokens):
    dtype = INPUT_DTYPES[fmt]
    return helpers.random_rows(rng, (layers, tokens, 512), dtype), helpers.random_rows(
        rng, (layers, tokens, 64), dtype
    )


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_torch_caches_are_written_in_place(backend, insert_path, rng, fmt):
    kv_c, k_pe = random_inputs(rng, fmt, 2, 5)
    caches = [helpers.make_cache(backend, fmt, block_pad=64) for _ in range(2)]
    assert isinstance(caches[0].array, torch.Tensor)
    assert helpers.check_insert(
        insert_path,
        caches,
        kv_c,
        k_pe,
        np.array([[5, 0, -1, 14, 99], [1, 2, 3, 4, -7]]),
        kv_c_array=helpers.surrounded(backend, kv_c, lead=2, pad=3),
    )


@pytest.mark.parametrize("fmt", SCALED_FORMATS)
def test_torch_float8_caches(backend, insert_path, rng, fmt):
    dtype = {"fp8_e4m3": oracle.E4M3, "fp8_e5m2": oracle.E5M2}[fmt]
    kv_c, k_pe = random_inputs(rng, fmt, 1, 3)
    cache = helpers.make_cache(backend, fmt, dtype=dtype, block_pad=7)
    assert cache.array.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    slots = np.array([5, 0, 14])
    assert helpers.check_insert(insert_path, [cache], kv_c, k_pe, slots)
    got = read_slots(cache.array, backend.array(slots), fmt, 0.37)
    expected = oracle.read(cache.bytes(), cache.geometry, slots, 576, fmt, 0.37)
    helpers.assert_values_equal(backend.to_numpy(got), expected)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_torch_caches_are_read_back_as_torch(backend, rng, fmt, out_dtype):
    kv_c, k_pe = random_inputs(rng, fmt, 1, 3)
    cache = helpers.make_cache(backend, fmt)
    slots = np.array([5, 0, 14])
    helpers.check_insert(helpers.insert_grouped, [cache], kv_c, k_pe, slots)
    scale = 0.37 if fmt in SCALED_FORMATS else None
    wanted = np.array([14, -1, 5, 16, 0])
    got = read_slots(cache.array, backend.array(wanted), fmt, scale, out_dtype=out_dtype)
    assert got.dtype == TORCH_DTYPES[out_dtype]
    expected = oracle.read(cache.bytes(), cache.geometry, wanted, 576, fmt, scale, out_dtype)
    helpers.assert_values_equal(backend.to_numpy(got), expected)


def test_torch_results_own_their_memory(backend):
    cache = helpers.make_cache(backend)
    got = read_slots(cache.array, backend.array(np.array([0])))
    first = got.clone()
    read_slots(cache.array, backend.array(np.array([-1])))
    assert torch.equal(got, first)
    got.zero_()
    assert np.all(cache.row(0) == helpers.SENTINEL)


def test_torch_inputs_that_require_grad(backend, insert_path, rng):
    kv_c, k_pe = random_inputs(rng, "bfloat16", 1, 2)
    cache = helpers.make_cache(backend)
    leaf = torch.nn.Parameter(backend.array(kv_c))
    derived = backend.array(k_pe).requires_grad_() * 1
    assert leaf.requires_grad
    assert derived.grad_fn is not None
    assert helpers.check_insert(
        insert_path,
        [cache],
        kv_c,
        k_pe,
        np.array([5, 0]),
        kv_c_array=leaf,
        k_pe_array=derived,
    )


def test_torch_views_of_one_projection(backend, insert_path):
    output = torch.arange(5 * 2 * 576).remainder(251).to(torch.bfloat16).reshape(5, 2, 576)
    kv_c, k_pe = output.transpose(0, 1).split([512, 64], dim=-1)
    caches = [helpers.make_cache(backend) for _ in range(2)]
    assert helpers.check_insert(
        insert_path,
        caches,
        backend.to_numpy(kv_c),
        backend.to_numpy(k_pe),
        np.array([5, 0, -1, 14, 2]),
        kv_c_array=kv_c,
        k_pe_array=k_pe,
    )


def test_torch_block_of_one_with_a_rewritten_stride(backend, insert_path, rng):
    kv_c, k_pe = random_inputs(rng, "bfloat16", 1, 3)
    cache = helpers.make_cache(backend, num_blocks=8, block_size=1)
    assert cache.array.shape == (8, 1, 576)
    cache.array = cache.array.as_strided((8, 1, 576), (576, 1, 1))
    assert helpers.check_insert(insert_path, [cache], kv_c, k_pe, np.array([7, 0, 3]))


def test_torch_slots_expanded_to_all_layers(backend, rng):
    kv_c, k_pe = random_inputs(rng, "bfloat16", 3, 2)
    caches = [helpers.make_cache(backend) for _ in range(3)]
    slots = torch.tensor([5, 14]).expand(3, 2)
    assert slots.stride() == (0, 1)
    assert helpers.check_insert(
        helpers.insert_grouped, caches, kv_c, k_pe, np.array([5, 14]), slots_array=slots
    )


@pytest.mark.parametrize("shape", [(), (1,)])
def test_torch_scales_are_live(backend, shape):
    caches = [helpers.make_cache(backend, "fp8_e4m3") for _ in range(2)]
    scales = [torch.full(shape, value) for value in (0.5, 2.0)]
    writer = GroupedCacheWriter([cache.array for cache in caches], "fp8", scales)
    kv_c, k_pe = torch.ones(2, 1, 512), torch.ones(2, 1, 64)
    writer.insert(kv_c, k_pe, torch.tensor([3]))
    assert [cache.row(3)[0] for cache in caches] == [0x40, 0x30]
    scales[1].fill_(1.0)
    writer.insert(kv_c, k_pe, torch.tensor([3]))
    assert [cache.row(3)[0] for cache in caches] == [0x40, 0x38]
    concat_and_cache_mla(kv_c[0], k_pe[0], caches[0].array, torch.tensor([3]), "fp8", scales[1])
    assert caches[0].row(3)[0] == 0x38


def test_one_torch_tensor_of_scales_is_live(backend):
    caches = [helpers.make_cache(backend, "fp8_e4m3") for _ in range(2)]
    scales = torch.tensor([0.5, 2.0])
    writer = GroupedCacheWriter([cache.array for cache in caches], "fp8", scales)
    scales[0] = 1.0
    writer.insert(torch.ones(2, 1, 512), torch.ones(2, 1, 64), torch.tensor([3]))
    assert [cache.row(3)[0] for cache in caches] == [0x38, 0x30]


@pytest.mark.parametrize(
    "scale", [torch.tensor(0.5, requires_grad=True), torch.tensor([0.5])], ids=["0-d", "1-d"]
)
def test_torch_scale_of_one_layer(backend, scale):
    cache = helpers.make_cache(backend, "fp8_e4m3")
    slots = torch.tensor([3])
    concat_and_cache_mla(torch.ones(1, 512), torch.ones(1, 64), cache.array, slots, "fp8", scale)
    assert np.all(cache.row(3) == 0x40)
    assert torch.all(read_slots(cache.array, slots, "fp8", scale) == 1)


def test_torch_dtypes_that_no_cache_has(backend):
    cache = helpers.make_cache(backend)
    slots = torch.tensor([3])
    with helpers.rejected(TypeError, "concat_and_cache_mla", "kv_c", "float64", caches=[cache]):
        concat_and_cache_mla(
            torch.ones(1, 512, dtype=torch.float64),
            torch.ones(1, 64, dtype=torch.float64),
            cache.array,
            slots,
        )
    with helpers.rejected(TypeError, "concat_and_cache_mla", "kv_c", "complex64", caches=[cache]):
        concat_and_cache_mla(
            torch.ones(1, 512, dtype=torch.complex64),
            torch.ones(1, 64, dtype=torch.complex64),
            cache.array,
            slots,
        )


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_torch_tensors_without_strided_memory(backend, kind):
    cache = helpers.make_cache(backend)
    rows = torch.ones(1, 512, dtype=torch.bfloat16)
    rows = rows.to_sparse() if kind == "sparse" else rows.to("meta")
    with helpers.rejected((TypeError, ValueError), "concat_and_cache_mla", "kv_c", caches=[cache]):
        concat_and_cache_mla(
            rows, torch.ones(1, 64, dtype=torch.bfloat16), cache.array, torch.tensor([3])
        )


def test_torch_negated_and_conjugated_views_are_not_read_as_they_lie(backend):
    """A lazily negated view holds other bits than its values: right bytes or an error."""
    cache = helpers.make_cache(backend, "float32")
    rows = torch.complex(torch.zeros(1, 512), torch.ones(1, 512)).conj().imag
    assert rows.is_neg()
    rows = torch._neg_view(torch.ones(1, 512))
    assert rows.is_neg()
    before = cache.bytes()
    try:
        concat_and_cache_mla(rows, torch.ones(1, 64), cache.array, torch.tensor([3]))
    except (TypeError, ValueError) as error:
        helpers.assert_message(str(error), "concat_and_cache_mla", ["kv_c"])
        helpers.assert_bytes_equal(cache.bytes(), before, cache.geometry)
    else:
        assert np.all(cache.row(3).view(np.float32)[:512] == -1)


# --- frameworks together --------------------------------------------------------------------------


def test_torch_rows_for_numpy_caches_and_back(rng):
    kv_c, k_pe = random_inputs(rng, "bfloat16", 1, 2)
    numpy_backend, torch_backend = helpers.Backend(), TorchBackend()
    slots = np.array([5, 0])
    cache = helpers.make_cache(numpy_backend, "fp8_ds_mla")
    assert helpers.check_insert(
        helpers.insert_grouped,
        [cache],
        kv_c,
        k_pe,
        slots,
        kv_c_array=torch_backend.array(kv_c),
        k_pe_array=torch_backend.array(k_pe),
        slots_array=torch_backend.array(slots.astype(np.int32)),
    )
    assert type(read_slots(cache.array, torch.tensor(slots), "fp8_ds_mla")) is np.ndarray
    cache = helpers.make_cache(torch_backend, "fp8_ds_mla")
    assert helpers.check_insert(
        helpers.insert_one_by_one,
        [cache],
        kv_c,
        k_pe,
        slots,
        kv_c_array=kv_c,
        k_pe_array=k_pe,
        slots_array=slots,
    )
    assert isinstance(read_slots(cache.array, slots, "fp8_ds_mla"), torch.Tensor)


# --- JAX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_jax_rows_and_32_bit_slots(insert_path, rng, fmt):
    backend = helpers.Backend()
    kv_c, k_pe = random_inputs(rng, fmt, 2, 3)
    caches = [helpers.make_cache(backend, fmt) for _ in range(2)]
    slots = jnp.asarray(np.array([5, -1, 2], np.int32))
    assert slots.dtype == jnp.int32
    assert helpers.check_insert(
        insert_path,
        caches,
        kv_c,
        k_pe,
        np.array([5, -1, 2]),
        kv_c_array=jnp.asarray(kv_c),
        k_pe_array=jnp.asarray(k_pe),
        slots_array=slots,
    )


def test_jax_caches_are_immutable_but_read(rng):
    kv_c, k_pe = random_inputs(rng, "bfloat16", 1, 2)
    host = np.ones((4, 4, 576), oracle.BFLOAT16)
    cache = jnp.asarray(host)
    slots = np.array([5, 0])
    with helpers.rejected(ValueError, "concat_and_cache_mla", "kv_cache", "read-only"):
        concat_and_cache_mla(kv_c[0], k_pe[0], cache, slots)
    with helpers.rejected(ValueError, "GroupedCacheWriter", "kv_caches", "read-only"):
        GroupedCacheWriter([cache])
    assert np.array_equal(np.asarray(cache), host)
    got = read_slots(cache, jnp.asarray(slots))
    assert isinstance(got, jax.Array)
    assert got.dtype == jnp.float32
    assert np.array_equal(np.asarray(got), np.ones((2, 576), np.float32))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_jax_caches_are_read_back_as_jax(rng, fmt, out_dtype):
    cache = helpers.make_cache(helpers.Backend(), fmt, offset=0)
    kv_c, k_pe = random_inputs(rng, fmt, 1, 2)
    slots = np.array([5, 0])
    helpers.check_insert(helpers.insert_grouped, [cache], kv_c, k_pe, slots)
    scale = 0.37 if fmt in SCALED_FORMATS else None
    array = jnp.asarray(np.ascontiguousarray(cache.array))
    wanted = np.array([0, -1, 5], np.int32)
    got = read_slots(array, jnp.asarray(wanted), fmt, scale, out_dtype=out_dtype)
    assert isinstance(got, jax.Array)
    expected = oracle.read(cache.bytes(), cache.geometry, wanted, 576, fmt, scale, out_dtype)
    helpers.assert_values_equal(np.asarray(got), expected)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_jax_float8_caches_are_read(dtype):
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 256)
    cache = jnp.asarray(codes.view(np.dtype(dtype)))
    fmt = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}[np.dtype(dtype).name]
    got = read_slots(cache, jnp.asarray([0], jnp.int32), fmt, 2.0)
    expected = codes.view(np.dtype(dtype)).astype(np.float32)[0] * 2
    helpers.assert_values_equal(np.asarray(got), expected)


def test_jax_scales(rng):
    cache = helpers.make_cache(helpers.Backend(), "fp8_e4m3")
    rows = jnp.ones((1, 512)), jnp.ones((1, 64))
    slots = np.array([3])
    for scale in (jnp.float32(0.5), jnp.asarray([0.5])):
        concat_and_cache_mla(*rows, cache.array, slots, "fp8", scale)
        assert np.all(cache.row(3) == 0x40)
    writer = GroupedCacheWriter([cache.array], "fp8", jnp.asarray([2.0]))
    writer.insert(rows[0][None], rows[1][None], slots)
    assert np.all(cache.row(3) == 0x30)


def test_jax_tracers_are_refused():
    cache = helpers.make_cache(helpers.Backend(), "float32")

    def traced(rows):
        concat_and_cache_mla(rows, np.ones((1, 64), np.float32), cache.array, np.array([3]))
        return rows

    with helpers.rejected(TypeError, "concat_and_cache_mla", "kv_c", caches=[cache]):
        jax.jit(traced)(jnp.ones((1, 512)))
