"""Rows read on a GPU: many and far ones, order on streams, capture in graphs, new arrays."""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np
import pytest

from cupy_mla import (
    audit_cache,
    convert_cache,
    cp_gather_indexer_k_quant_cache,
    gather_cache,
    get_layout,
    read_slots,
)
from tests import oracle
from tests.gpu import ptx75
from tests.gpu.frameworks import cupy, torch
from tests.gpu.test_graphs_and_streams import busy

FORMATS = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "indexer_fp8")
OUTPUTS = ("bfloat16", "float16", "float32")
every_format = pytest.mark.parametrize("fmt", FORMATS)
every_output = pytest.mark.parametrize("output", OUTPUTS)
SCALE = 0.37


@pytest.fixture(params=["own", "sm_75"])
def target(request):
    """The GPU's own instructions, and the software paths of older ones."""
    with ptx75.installed() if request.param == "sm_75" else contextlib.nullcontext():
        yield


every_target = pytest.mark.usefixtures("target")


def storage(fmt):
    return oracle.DTYPES.get(fmt, oracle.UINT8)


def random_cache(rng, fmt, blocks, block_size):
    """A host cache of random bits, NaN and odd scales among them."""
    size = get_layout(fmt).row_bytes
    raw = rng.integers(0, 256, blocks * block_size * size, np.uint8)
    return raw.view(storage(fmt)).reshape(blocks, block_size, -1)


def to_torch(values):
    """Copy a host array to the device, bits as they are."""
    raw = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8)).cuda()
    return raw.view(getattr(torch, values.dtype.name)).view(values.shape)


def to_numpy(tensor):
    """Copy a tensor to the host, bits as they are."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    name = str(tensor.dtype).partition(".")[2]
    dtype = np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    return raw.view(dtype).reshape(tuple(tensor.shape))


def assert_same_bits(got, want):
    """Compare bits; NaN too, since the reference says which one it is."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    bits = f"u{want.dtype.itemsize}"
    different = np.argwhere(got.view(bits) != np.ascontiguousarray(want).view(bits))
    if different.size:
        place = tuple(different[0])
        pytest.fail(
            f"{len(different)} of {got.size} differ, first at {place}: "
            f"{got.view(bits)[place]:X}, not {want.view(bits)[place]:X}"
        )


# --- bits -----------------------------------------------------------------------------------------


@every_format
@every_output
def test_64_requests_of_2048_tokens(fmt, output):
    """Every bit, of random blocks, some of which the cache does not have."""
    rng = np.random.default_rng(64)
    host = random_cache(rng, fmt, 700, 64)
    table = rng.integers(-1, 702, (64, 33)).astype(np.int32)
    cu = np.arange(65, dtype=np.int32) * 2048
    starts = rng.integers(0, 64, 64).astype(np.int32)
    options = {"out_dtype": output, "num_tokens": 131072}
    want = gather_cache(host, table, cu, fmt, SCALE, seq_starts=starts, **options)
    got = gather_cache(
        to_torch(host),
        to_torch(table),
        to_torch(cu),
        fmt,
        SCALE,
        seq_starts=to_torch(starts),
        **options,
    )
    assert_same_bits(to_numpy(got), want)


@every_target
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
@every_output
def test_every_16_bit_number(source, output):
    host = np.arange(65536, dtype=np.uint16).view(oracle.DTYPES[source]).reshape(128, 1, 512)
    slots = np.arange(128)
    want = read_slots(host, slots, source, out_dtype=output)
    got = read_slots(to_torch(host), to_torch(slots), source, out_dtype=output)
    assert_same_bits(to_numpy(got), want)


@every_target
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
@every_output
def test_every_code_with_scales_of_every_size(fmt, output):
    host = np.arange(256, dtype=np.uint8).reshape(1, 1, 256)
    cache, slot = to_torch(host), to_torch(np.array([0]))
    for scale in (1.0, 0.37, 2.0**-149, 2.0**-130, 1.2e-38, 1e-9, 2.0**100, 3.4e38):
        want = read_slots(host, np.array([0]), fmt, scale, out_dtype=output)
        assert_same_bits(to_numpy(read_slots(cache, slot, fmt, scale, out_dtype=output)), want)
        live = torch.full((1,), scale, device="cuda")
        assert_same_bits(to_numpy(read_slots(cache, slot, fmt, live, out_dtype=output)), want)


@every_target
@pytest.mark.parametrize("source", FORMATS[:6])
@pytest.mark.parametrize("destination", FORMATS[:6])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_conversions_of_any_bits(source, destination, scale_format):
    rng = np.random.default_rng(5)
    src = random_cache(rng, source, 40, 64)
    layout = get_layout(destination)
    dst = np.full((80, 32, layout.width), 0, storage(destination))
    device = to_torch(dst)
    options = {"src_scale": SCALE, "dst_scale": 1.5, "scale_format": scale_format}
    convert_cache(src, dst, source, destination, **options)
    convert_cache(to_torch(src), device, source, destination, **options)
    assert_same_bits(to_numpy(device), dst)


def test_70_000_requests():
    requests = 70_000
    rng = np.random.default_rng(7)
    host = random_cache(rng, "fp8_ds_mla", 64, 16)
    lengths = rng.integers(0, 4, requests) // 2
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    table = rng.integers(0, 64, (requests, 1)).astype(np.int32)
    starts = rng.integers(0, 16, requests).astype(np.int32)
    args = (table, cu, "fp8_ds_mla")
    want = gather_cache(host, *args, seq_starts=starts)
    got = gather_cache(
        to_torch(host), to_torch(table), to_torch(cu), "fp8_ds_mla", seq_starts=to_torch(starts)
    )
    assert_same_bits(to_numpy(got), want)


# --- offsets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_rows_beyond_four_gibibytes(fmt, index):
    layout = get_layout(fmt)
    blocks = (9 << 29) // (16 * layout.row_bytes) + 1  # 4.5 GiB
    cache = torch.zeros(
        (blocks, 16, layout.width), dtype=getattr(torch, storage(fmt).name), device="cuda"
    )
    rows = cache.view(blocks * 16, layout.width)
    middle = (1 << 32) // layout.row_bytes + 1
    chosen = torch.tensor([0, middle, blocks * 16 - 1], device="cuda")
    rng = np.random.default_rng(4)
    packed = random_cache(rng, fmt, 3, 1).reshape(3, layout.width)
    rows[chosen] = to_torch(packed)
    want = read_slots(packed[:, None], np.arange(3), fmt, SCALE, out_dtype="bfloat16")
    slots = torch.cat([chosen, chosen.new_tensor([blocks * 16, -1])]).to(getattr(torch, index))
    got = to_numpy(read_slots(cache, slots, fmt, SCALE, out_dtype="bfloat16"))
    assert_same_bits(got[:3], want)
    assert not got[3:].view(np.uint16).any()
    table = (chosen // 16).to(getattr(torch, index))[:, None]
    out = torch.zeros((3, 576), dtype=torch.bfloat16, device="cuda")
    cu = torch.arange(4, device="cuda", dtype=torch.int32)
    gather_cache(cache, table, cu, fmt, SCALE, seq_starts=chosen % 16, out=out)
    assert_same_bits(to_numpy(out), want)
    audit = audit_cache(cache, fmt, slots=chosen)
    assert audit.rows == 3
    assert audit.nonfinite


def test_an_output_beyond_four_gibibytes():
    """Rows of 2304 bytes, the last of which begins beyond 4.5 GB."""
    tokens = 2_000_000
    cache = torch.arange(16, device="cuda", dtype=torch.float32).repeat_interleave(576)
    cache = cache.to(torch.bfloat16).view(16, 1, 576)
    slots = torch.arange(tokens, device="cuda", dtype=torch.int32) % 16
    rows = read_slots(cache, slots)
    assert rows.numel() * 4 > 1 << 32
    assert bool((rows == slots[:, None]).all())


def test_conversions_beyond_four_gibibytes():
    blocks = (9 << 29) // (64 * 576)
    src = torch.full((blocks, 64, 576), 0x38, dtype=torch.uint8, device="cuda")
    dst = torch.zeros((blocks, 64, 656), dtype=torch.uint8, device="cuda")
    convert_cache(src, dst, "fp8", "fp8_ds_mla", src_scale=3.0)
    rows = dst.view(-1, 656)
    assert bool((rows == rows[0]).all())
    assert rows[0, :512].unique().tolist() == [0x7E]
    assert rows[0, 528:].view(torch.bfloat16).unique().tolist() == [3.0]


# --- new arrays and streams -----------------------------------------------------------------------


@every_output
def test_new_arrays_belong_to_the_framework_of_the_cache(output):
    host = np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    table, cu = np.array([[2, 1]], np.int32), np.array([0, 5], np.int32)
    rows = gather_cache(to_torch(host), to_torch(table), to_torch(cu), out_dtype=output)
    assert isinstance(rows, torch.Tensor)
    assert rows.dtype == getattr(torch, output)
    assert rows.float()[:, 0].tolist() == [16, 18, 20, 22, 8]
    rows = gather_cache(*map(cupy.asarray, (host, table, cu)), out_dtype=output)
    assert isinstance(rows, cupy.ndarray)
    assert rows.dtype == oracle.DTYPES[output]
    rows = read_slots(cupy.asarray(host), cupy.asarray(np.array([8, 99])), out_dtype="float32")
    assert isinstance(rows, cupy.ndarray)
    assert rows.tolist() == [[16, 17], [0, 0]]


def test_lengths_that_end_below_zero():
    cache = torch.zeros((1, 1, 4), device="cuda")
    cu = torch.tensor([0, -3], device="cuda")
    with pytest.raises(ValueError, match="cu_seq_lens must end with the number of tokens, got -3"):
        gather_cache(cache, torch.zeros((1, 1), dtype=torch.int32, device="cuda"), cu)


def test_current_stream_is_the_default():
    """The cache is filled by a slow kernel on a side stream; reads see it, and so do audits."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cache = torch.zeros((4, 16, 576), dtype=torch.bfloat16, device="cuda")
        other = torch.zeros((4, 16, 576), device="cuda")
        table = torch.tensor([[3, 1]], dtype=torch.int32, device="cuda")
        cu = torch.tensor([0, 32], dtype=torch.int32, device="cuda")
        for turn in range(1, 51):
            busy(side, 0.3)
            cache.fill_(turn)
            rows = gather_cache(cache, table, cu, num_tokens=32)
            convert_cache(cache, other, "bfloat16", "float32")
            slots = read_slots(other, table[0])
            assert bool((rows == turn).all())
            assert bool((slots == turn).all())
        busy(side, 3)
        cache.fill_(7)
        assert audit_cache(cache, "bfloat16").amax["nope"] == (7.0,)


@pytest.mark.parametrize("kind", ["torch", "cupy", "raw"])
def test_a_given_stream(kind):
    """New arrays are written there, behind everything that used their memory before."""
    torch_stream = torch.cuda.Stream()
    cupy_stream = cupy.cuda.Stream(non_blocking=True)
    stream, synchronize = {
        "torch": (torch_stream, torch_stream.synchronize),
        "cupy": (cupy_stream, cupy_stream.synchronize),
        "raw": (cupy_stream.ptr, cupy_stream.synchronize),
    }[kind]
    cache = torch.zeros((4, 16, 576), dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[3, 1]], dtype=torch.int32, device="cuda")
    cu = torch.tensor([0, 32], dtype=torch.int32, device="cuda")
    for turn in range(1, 101):
        trash = torch.empty((32, 576), dtype=torch.bfloat16, device="cuda")
        busy(torch.cuda.current_stream(), 0.3)
        trash.fill_(-1)
        del trash  # its memory is given to the new array, though it is yet to be filled
        cache.fill_(turn)
        rows = gather_cache(cache, table, cu, num_tokens=32, stream=stream)
        synchronize()
        assert bool((rows == turn).all())


def test_cupy_tables_for_a_torch_cache():
    """The table is filled by a slow kernel on CuPy's own stream."""
    cache = torch.arange(64, device="cuda").repeat_interleave(576).float().view(4, 16, 576)
    side = cupy.cuda.Stream(non_blocking=True)
    external = torch.cuda.ExternalStream(side.ptr)
    with side:
        table = cupy.zeros((1, 1), cupy.int32)
        cu = cupy.array([0, 16], cupy.int32)
        out = torch.zeros((16, 576), device="cuda")
        for turn in range(100):
            busy(external, 0.3)
            table.fill(turn % 4)
            gather_cache(cache, table, cu, out=out)
            torch.cuda.current_stream().synchronize()
            assert out[:, 0].tolist() == list(range(turn % 4 * 16, turn % 4 * 16 + 16))


def test_a_wrong_stream_is_refused():
    cache = torch.zeros((1, 1, 4), device="cuda")
    table = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
    with pytest.raises(TypeError, match="gather_cache: stream must be"):
        gather_cache(cache, table, torch.tensor([0, 1], device="cuda"), stream="side")


# --- graphs ---------------------------------------------------------------------------------------


@every_format
def test_a_gather_is_captured(fmt):
    """The replay reads caches, tables, lengths and live scales as they are then."""
    rng = np.random.default_rng(11)
    hosts = [random_cache(rng, fmt, 8, 16) for _ in range(3)]
    width = 128 if fmt == "indexer_fp8" else 576
    cache, out = to_torch(hosts[0]), torch.zeros((40, width), dtype=torch.bfloat16, device="cuda")
    table = torch.zeros((3, 2), dtype=torch.int32, device="cuda")
    cu = torch.zeros(4, dtype=torch.int32, device="cuda")
    scale = torch.ones(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    gather_cache(cache, table, cu, fmt, scale, out=out)
    with torch.cuda.graph(graph):
        gather_cache(cache, table, cu, fmt, scale, out=out)
    for host in hosts:
        numbers = rng.integers(-1, 9, (3, 2)).astype(np.int32)
        lengths = np.concatenate([[0], np.cumsum(rng.integers(0, 13, 3))]).astype(np.int32)
        factor = float(np.float32(rng.uniform(0.1, 3)))
        cache.copy_(to_torch(host))
        table.copy_(to_torch(numbers))
        cu.copy_(to_torch(lengths))
        scale.fill_(factor)
        out.zero_()
        graph.replay()
        want = gather_cache(host, numbers, lengths, fmt, factor, num_tokens=40)
        assert_same_bits(to_numpy(out), want)


def test_conversions_and_indexer_gathers_are_captured():
    rng = np.random.default_rng(12)
    src = torch.zeros((4, 16, 576), dtype=torch.bfloat16, device="cuda")
    dst = torch.zeros((8, 8, 656), dtype=torch.uint8, device="cuda")
    keys = torch.zeros((4, 64, 132), dtype=torch.uint8, device="cuda")
    codes = torch.zeros((64, 128), dtype=torch.uint8, device="cuda")
    scales = torch.zeros((64, 1), device="cuda")
    table = torch.tensor([[2]], dtype=torch.int32, device="cuda")
    cu = torch.tensor([0, 64], dtype=torch.int32, device="cuda")

    def step():
        convert_cache(src, dst, "bfloat16", "fp8_ds_mla")
        cp_gather_indexer_k_quant_cache(keys, codes, scales, table, cu)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    host = rng.standard_normal((4, 16, 576)).astype(np.float32).astype(oracle.BFLOAT16)
    planes = rng.integers(0, 256, (4, 64, 132), np.uint8)
    src.copy_(to_torch(host))
    keys.copy_(to_torch(planes))
    graph.replay()
    want = np.zeros((8, 8, 656), np.uint8)
    convert_cache(host, want, "bfloat16", "fp8_ds_mla")
    assert_same_bits(to_numpy(dst), want)
    block = planes[2].reshape(-1)
    assert_same_bits(to_numpy(codes), block[: 64 * 128].reshape(64, 128))
    assert_same_bits(to_numpy(scales).view(np.uint8), block[64 * 128 :].reshape(64, 4))


def test_the_number_of_tokens_is_not_read_in_a_capture():
    cache = cupy.zeros((2, 4, 8), cupy.float32)
    table, cu = cupy.zeros((1, 1), cupy.int32), cupy.array([0, 2], cupy.int32)
    gather_cache(cache, table, cu)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(ValueError, match="num_tokens"):
            gather_cache(cache, table, cu)
        stream.end_capture()
        rows = gather_cache(cache, table, cu, out_dtype="float32")
        assert rows.shape == (2, 8)


def test_gathers_into_out_allocate_nothing_and_never_wait():
    rng = np.random.default_rng(13)
    cache = to_torch(random_cache(rng, "fp8_ds_mla", 8, 16))
    table = to_torch(rng.integers(0, 8, (3, 2)).astype(np.int32))
    cu = to_torch(np.array([0, 20, 30, 60], np.int32))
    out = torch.zeros((60, 576), dtype=torch.bfloat16, device="cuda")
    gather_cache(cache, table, cu, "fp8_ds_mla", out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]

    class Count(cupy.cuda.MemoryHook):
        name = "count"
        calls = 0

        def malloc_preprocess(self, **_):
            self.calls += 1

    with Count() as hook:
        busy(torch.cuda.current_stream(), 30)
        end = torch.cuda.Event()
        for _ in range(20):
            gather_cache(cache, table, cu, "fp8_ds_mla", out=out)
        end.record()
        assert not end.query(), "the device was waited for"
    assert hook.calls == 0
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
