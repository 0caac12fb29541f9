"""Order on streams, capture in graphs, live scales, and what a writer does in place."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla
from tests import oracle
from tests.gpu.frameworks import cupy, device_count, torch

LAYERS, TOKENS = 3, 24
FORMATS = ["bfloat16", "fp8_e4m3", "fp8_ds_mla"]
any_format = pytest.mark.parametrize("fmt", FORMATS)


def width_of(fmt):
    return {"bfloat16": 576, "fp8_e4m3": 576, "fp8_ds_mla": 656}[fmt]


def make_caches(fmt, layers=LAYERS, blocks=4):
    dtype = torch.bfloat16 if fmt == "bfloat16" else torch.uint8
    return [
        torch.zeros(blocks, 16, width_of(fmt), dtype=dtype, device="cuda") for _ in range(layers)
    ]


def make_writer(fmt, caches=None, scale=0.5, **options):
    caches = make_caches(fmt) if caches is None else caches
    scales = [scale] * len(caches) if fmt == "fp8_e4m3" else None
    return GroupedCacheWriter(caches, fmt, scales, **options), caches


def make_rows(value=None, tokens=TOKENS, layers=LAYERS):
    if value is None:
        return torch.randn(layers, tokens, 576, device="cuda").to(torch.bfloat16)
    return torch.full((layers, tokens, 576), float(value), dtype=torch.bfloat16, device="cuda")


def split(rows):
    return rows[..., :512], rows[..., 512:]


def expected_row(rows, layer, token, fmt, scale=0.5):
    bits = rows[layer, token].view(torch.int16).cpu().numpy().view(oracle.BFLOAT16)
    scale = scale if fmt == "fp8_e4m3" else None
    return np.frombuffer(oracle.encode_row(bits[:512], bits[512:], fmt, scale), np.uint8)


def assert_stored(caches, rows, slots, fmt, scale=0.5):
    for layer, cache in enumerate(caches):
        raw = cache.view(-1, width_of(fmt)).view(torch.uint8).cpu().numpy()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                np.testing.assert_array_equal(
                    raw[slot], expected_row(rows, layer, token, fmt, scale)
                )


def busy(stream, milliseconds=3):
    """Keep a stream busy, so that what is not ordered behind it comes too early."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(milliseconds * 1_800_000))


# --- streams --------------------------------------------------------------------------------------


def test_current_torch_stream_is_the_default():
    """The producer is slow and on a side stream; 100 of 100 inserts see what it made."""
    writer, caches = make_writer("bfloat16")
    rows = make_rows(0)
    slots = torch.arange(TOKENS, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for turn in range(100):
        with torch.cuda.stream(side):
            busy(side, 0.3)
            rows.fill_(turn + 1)
            writer.insert(*split(rows), slots)
        side.synchronize()
        assert int((caches[0].view(-1, 576)[:TOKENS] == turn + 1).sum()) == TOKENS * 576


def test_cupy_rows_for_torch_caches():
    """Rows that CuPy makes on its own stream are waited for by event."""
    writer, caches = make_writer("fp8_ds_mla")
    slots = torch.arange(TOKENS, device="cuda")
    buffer = cupy.zeros(LAYERS * TOKENS * 576 * 2, cupy.uint8)
    side = cupy.cuda.Stream(non_blocking=True)
    external = torch.cuda.ExternalStream(side.ptr)
    rows = cupy.ndarray((LAYERS, TOKENS, 576), oracle.BFLOAT16, buffer.data)
    seen = torch.as_tensor(buffer, device="cuda").view(torch.bfloat16)
    for turn in range(100):
        with side:
            busy(external, 0.3)
            buffer.view(cupy.uint16)[...] = int(
                np.float32(turn + 1).astype(oracle.BFLOAT16).view(np.uint16)
            )
            writer.insert(rows[..., :512], rows[..., 512:], slots)
        torch.cuda.current_stream().synchronize()
        assert bool((caches[2].view(-1, 656)[:TOKENS, :512] == 0x7E).all())
        last = caches[2].view(-1, 656)[0, 528:].view(torch.bfloat16)
        assert bool((last == turn + 1).all())
    assert seen.numel() == rows.size


@pytest.mark.parametrize("kind", ["torch", "cupy", "raw", "protocol"])
def test_stream_override(kind):
    """On a given stream the insert comes behind the producer's stream, 100 of 100 times."""
    writer, caches = make_writer("bfloat16")
    rows = make_rows(0)
    slots = torch.arange(TOKENS, device="cuda")
    torch_stream = torch.cuda.Stream()
    cupy_stream = cupy.cuda.Stream(non_blocking=True)

    class Protocol:
        def __cuda_stream__(self):
            return (0, cupy_stream.ptr)

    stream, synchronize = {
        "torch": (torch_stream, torch_stream.synchronize),
        "cupy": (cupy_stream, cupy_stream.synchronize),
        "raw": (cupy_stream.ptr, cupy_stream.synchronize),
        "protocol": (Protocol(), cupy_stream.synchronize),
    }[kind]
    torch.cuda.synchronize()
    for turn in range(100):
        busy(torch.cuda.current_stream(), 0.3)
        rows.fill_(turn + 1)
        writer.insert(*split(rows), slots, stream=stream)
        synchronize()
        assert bool((caches[1].view(-1, 576)[:TOKENS] == turn + 1).all())


def test_a_wrong_stream_is_refused():
    writer, caches = make_writer("bfloat16")
    with pytest.raises(TypeError, match="insert: stream must be"):
        writer.insert(*split(make_rows(1)), torch.arange(TOKENS, device="cuda"), stream="side")
    assert not caches[0].any()


def test_rows_freed_at_once_are_kept_until_they_were_read():
    """Rows of another framework may go the moment the call is back."""
    writer, caches = make_writer("bfloat16")
    slots = torch.arange(TOKENS, device="cuda")
    pool = cupy.cuda.MemoryPool()
    side = torch.cuda.Stream()
    with cupy.cuda.using_allocator(pool.malloc):
        for turn in range(50):
            raw = cupy.full(LAYERS * TOKENS * 576, 0x3F80 + turn, cupy.uint16)
            rows = cupy.ndarray((LAYERS, TOKENS, 576), oracle.BFLOAT16, raw.data)
            busy(side, 0.5)
            writer.insert(rows[..., :512], rows[..., 512:], slots, stream=side)
            del raw, rows
            trash = cupy.full(LAYERS * TOKENS * 576, 0x1111, cupy.uint16)
            side.synchronize()
            stored = caches[0].view(torch.int16).view(-1, 576)[:TOKENS]
            assert bool((stored == 0x3F80 + turn).all())
            del trash


def test_jax_rows_for_torch_caches():
    jax = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX sees no GPU")
    torch.cuda.set_device(0)  # JAX leaves the last device current that it has set up
    jnp = jax.numpy
    writer, caches = make_writer("bfloat16")
    slots = jnp.arange(TOKENS, dtype=jnp.int32)
    for turn in range(100):
        ones = jnp.ones((LAYERS, TOKENS, 576), jnp.bfloat16)
        rows = ones * (turn + 1)
        writer.insert(rows[..., :512], rows[..., 512:], slots)
        assert bool((caches[1].view(-1, 576)[:TOKENS] == turn + 1).all())
    with pytest.raises(ValueError, match=r"read-only|writable"):
        GroupedCacheWriter([jnp.zeros((2, 16, 576), jnp.bfloat16)])


# --- graphs ---------------------------------------------------------------------------------------


@any_format
def test_torch_graph_follows_values_slots_and_scales(fmt):
    caches = make_caches(fmt)
    live = torch.full((LAYERS,), 0.5, device="cuda")
    scales = live if fmt == "fp8_e4m3" else None
    writer = GroupedCacheWriter(caches, fmt, scales)
    rows, slots = make_rows(), torch.arange(TOKENS, device="cuda")
    writer.warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writer.insert(*split(rows), slots)
    assert not any(cache.any() for cache in caches)
    for scale in (0.5, 2.0):
        rows.copy_(make_rows())
        slots.copy_(torch.randperm(64, device="cuda")[:TOKENS])
        live.fill_(scale)
        graph.replay()
        assert_stored(caches, rows, slots, fmt, scale)


@any_format
def test_cupy_graph(fmt):
    writer, caches = make_writer(fmt)
    rows, slots = make_rows(), torch.arange(TOKENS, device="cuda")
    bound = writer.bind(*split(rows), slots)
    writer.warmup()
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    bound(stream)
    graph = stream.end_capture()
    assert not any(cache.any() for cache in caches)
    graph.launch(stream)
    stream.synchronize()
    assert_stored(caches, rows, slots, fmt)


def test_first_call_under_capture_works_or_says_what_to_do():
    """A kernel that was never loaded may not be loadable now; the stream stays usable."""
    caches = [torch.zeros(2, 16, 37, dtype=torch.float16, device="cuda")]
    writer = GroupedCacheWriter(caches, kv_lora_rank=32, rope_dim=5)
    rows = torch.ones(1, 4, 37, dtype=torch.float16, device="cuda")
    slots = torch.arange(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            writer.insert(rows[..., :32], rows[..., 32:], slots)
    except RuntimeError as error:
        assert "warmup()" in str(error)
        writer.insert(rows[..., :32], rows[..., 32:], slots)
    else:
        graph.replay()
    torch.cuda.synchronize()
    assert bool((caches[0].view(-1, 37)[:4] == 1).all())


@any_format
def test_graph_follows_rebind_and_update_scales(fmt):
    writer, first = make_writer(fmt)
    rows, slots = make_rows(), torch.arange(TOKENS, device="cuda")
    writer.insert(*split(rows), slots)
    bound = writer.bind(*split(rows), slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writer.insert(*split(rows), slots)
    # Another block size, more blocks, and rows that are not aligned to 16 bytes.
    size = width_of(fmt)
    dtype = first[0].dtype
    second = [
        torch.zeros(9, 8, size + 4, dtype=dtype, device="cuda")[..., 2 : size + 2]
        for _ in range(LAYERS)
    ]
    kept = [cache.clone() for cache in first]
    writer.rebind(second)
    scale = 0.5
    if fmt == "fp8_e4m3":
        scale = 2.0
        writer.update_scales([scale] * LAYERS)
    for run in (graph.replay, bound):
        for cache in second:
            cache.zero_()
        run()
        assert_stored([cache.contiguous() for cache in second], rows, slots, fmt, scale)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_counters_are_counted_in_a_graph():
    writer, _ = make_writer("fp8_e4m3", collect_stats=True)
    rows = make_rows(1)
    rows[1, 3, 5] = float("nan")
    slots = torch.arange(TOKENS, device="cuda")
    slots[0], slots[1] = -1, 64
    writer.warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writer.insert(*split(rows), slots)
    for _ in range(3):
        graph.replay()
    stats = writer.stats()
    assert stats["slots_out_of_range"].tolist() == [3, 3, 3]
    assert stats["slots_padding"].tolist() == [3, 3, 3]
    assert stats["rows_written"].tolist() == [3 * (TOKENS - 2)] * 3
    assert stats["nonfinite_elements"].tolist() == [0, 3, 0]
    with pytest.raises(ValueError, match=r"token 1, slot 64.*layer 1, token 3, slot 3"):
        writer.check()
    writer.check()


# --- live scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["one array", "scalars", "elements"])
def test_device_scales_are_read_at_each_insert(form):
    values = torch.full((LAYERS,), 0.5, device="cuda")
    given = {
        "one array": values,
        "scalars": [values[layer] for layer in range(LAYERS)],
        "elements": [values[layer : layer + 1] for layer in range(LAYERS)],
    }[form]
    caches = make_caches("fp8_e4m3")
    writer = GroupedCacheWriter(caches, "fp8", given)
    rows, slots = make_rows(), torch.arange(TOKENS, device="cuda")
    for scale in (0.5, 0.03125):
        values.fill_(scale)
        writer.insert(*split(rows), slots)
        assert_stored(caches, rows, slots, "fp8_e4m3", scale)
    values[1] = float("nan")
    with pytest.raises(ValueError, match="layer 1"):
        writer.check()


def test_host_scales_are_copied():
    host = np.full(LAYERS, 0.5, np.float32)
    caches = make_caches("fp8_e4m3")
    writer = GroupedCacheWriter(caches, "fp8", host)
    host[:] = 8
    rows, slots = make_rows(), torch.arange(TOKENS, device="cuda")
    writer.insert(*split(rows), slots)
    assert_stored(caches, rows, slots, "fp8_e4m3", 0.5)


# --- hot path -------------------------------------------------------------------------------------


def test_inserts_allocate_nothing_and_never_wait(monkeypatch):
    writer, caches = make_writer("fp8_e4m3")
    rows, slots = make_rows(), torch.arange(TOKENS, device="cuda")
    parts = split(rows)
    writer.insert(*parts, slots)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]

    class Count(cupy.cuda.MemoryHook):
        name = "count"
        calls = 0

        def malloc_preprocess(self, **_):
            self.calls += 1

    def fail(*_):
        raise AssertionError("the hot path synchronises")

    device = writer._backend.device
    with Count() as hook, monkeypatch.context() as patch:
        patch.setattr(device, "download", fail)
        patch.setattr(device, "allocate", fail)
        patch.setattr(device, "upload", fail)
        busy(torch.cuda.current_stream(), 30)
        end = torch.cuda.Event()
        for _ in range(20):
            writer.insert(*parts, slots)
            concat_and_cache_mla(parts[0][0], parts[1][0], caches[0], slots, "fp8", 0.5)
        end.record()
        assert not end.query(), "the device was waited for"
    assert hook.calls == 0
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


def test_threads_share_a_writer():
    """Eight threads with streams of their own insert into rows of their own."""
    writer, caches = make_writer("bfloat16", make_caches("bfloat16", blocks=64))
    failures = []

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                rows = make_rows(number + 1, tokens=16)
                slots = torch.arange(number * 128, number * 128 + 16, device="cuda")
                for shift in range(0, 128, 16):
                    writer.insert(*split(rows), slots + shift)
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for cache in caches:
        stored = cache.view(8, 128 * 576)
        for number in range(8):
            assert bool((stored[number] == number + 1).all())


def test_a_failed_call_leaves_device_and_stream_usable():
    writer, caches = make_writer("fp8_e4m3")
    rows, slots = make_rows(), torch.arange(TOKENS, device="cuda")
    with pytest.raises(ValueError, match="kv_c"):
        writer.insert(rows[:2, :, :512], rows[:2, :, 512:], slots)
    writer.insert(*split(rows), slots)
    assert_stored(caches, rows, slots, "fp8_e4m3")


# --- several devices ------------------------------------------------------------------------------

two_devices = pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")


@two_devices
def test_the_current_device_need_not_be_the_arrays():
    results = []
    for index in (1, 0, 1):
        device = f"cuda:{index}"
        cache = torch.zeros(2, 16, 576, dtype=torch.uint8, device=device)
        rows = torch.ones(1, 4, 576, dtype=torch.bfloat16, device=device)
        slots = torch.arange(4, device=device)
        assert torch.cuda.current_device() == 0
        writer = GroupedCacheWriter([cache], "fp8", [0.5])
        for _ in range(2):
            writer.insert(rows[..., :512], rows[..., 512:], slots)
        concat_and_cache_mla(rows[0, :, :512], rows[0, :, 512:], cache, slots + 8, "fp8", 0.5)
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(index)
        results.append(cache.cpu())
    assert bool((results[0].view(-1, 576)[:4] == 0x40).all())
    assert bool((results[0].view(-1, 576)[8:12] == 0x40).all())
    assert all(torch.equal(result, results[0]) for result in results)


@two_devices
def test_mixed_devices_are_refused():
    caches = make_caches("bfloat16", layers=1)
    rows = torch.ones(1, 4, 576, dtype=torch.bfloat16, device="cuda:1")
    writer = GroupedCacheWriter(caches)
    with pytest.raises(ValueError, match=r"same CUDA device.*cuda:0.*cuda:1"):
        writer.insert(rows[..., :512], rows[..., 512:], torch.arange(4, device="cuda:0"))
    assert not caches[0].any()


# --- what a graph must not hold -------------------------------------------------------------------


def test_tables_are_not_written_while_a_graph_is_captured():
    """The graph would hold a copy from host memory that is gone when it runs."""
    writer, caches = make_writer("fp8_e4m3")
    rows, slots = make_rows(), torch.arange(TOKENS, device="cuda")
    writer.insert(*split(rows), slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writer.insert(*split(rows), slots)
        with pytest.raises(RuntimeError, match="captured"):
            writer.update_scales([2.0] * LAYERS)
        with pytest.raises(RuntimeError, match="captured"):
            writer.rebind(caches)
    graph.replay()
    assert_stored(caches, rows, slots, "fp8_e4m3", 0.5)
