"""`cupy-mla demo` as a whole, and that it notices faults."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from cupy_mla import get_layout
from cupy_mla.cli import _device, demo, main
from tests.cli.helpers import DEMO_ROWS, ROW_BYTES, SMALL, run_json, table_rows


def test_demo_checks_every_format_and_finds_nothing(capsys):
    status, document = run_json(capsys, "demo", "--device", "cpu")
    assert status == 0
    assert document["ok"] is True
    assert [(f["format"], f["scale_format"]) for f in document["formats"]] == DEMO_ROWS
    assert (document["layers"], document["kv_lora_rank"], document["rope_dim"]) == (5, 512, 64)
    assert document["block_size"] == 64
    for entry in document["formats"]:
        assert entry["bytes_per_token"] == ROW_BYTES[entry["format"]]
        assert entry["differences"] == 0
        assert entry["first_difference"] is None
        assert entry["layers"] == 5
        assert entry["tokens"] == 512
        assert entry["rows_written"] == 5 * (512 - 64)
        assert entry["rows_checked"] == 5 * (512 + 128)
        assert entry["bytes_checked"] == entry["rows_checked"] * entry["bytes_per_token"]
        assert entry["seconds_grouped"] > 0
        assert entry["seconds_per_layer"] > 0


def test_demo_table_says_what_its_json_says(capsys):
    _, document = run_json(capsys, "demo", *SMALL)
    assert main(["demo", *SMALL]) == 0
    text = capsys.readouterr().out
    rows = table_rows(text, "Format ")
    assert len(rows) == len(DEMO_ROWS)
    for row, entry in zip(rows, document["formats"], strict=True):
        label = " ".join(filter(None, (entry["format"], entry["scale_format"])))
        keys = ("layers", "tokens", "bytes_per_token", "rows_checked", "differences")
        assert row[:6] == [label, *(str(entry[key]) for key in keys)]
        assert all(re.fullmatch(r"\d+(\.\d+)? (s|ms|us)", cell) for cell in row[6:])
        assert len(row) == 8
    total = sum(entry["bytes_checked"] for entry in document["formats"])
    assert f"No difference in {total:,} bytes" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.34, "12.3 s"),
        (1.0, "1.00 s"),
        (0.12345, "123 ms"),
        (0.0012345, "1.23 ms"),
        (0.000999, "999 us"),
        (4.5e-6, "4.50 us"),
    ],
)
def test_durations(seconds, text):
    assert demo._duration(seconds) == text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--format", "fp8"], [("fp8_e4m3", None)]),
        (
            ["--format", "fp8_ds_mla", "--format", "float16", "--format", "fp8_ds_mla"],
            [("fp8_ds_mla", "float32"), ("fp8_ds_mla", "ue8m0"), ("float16", None)],
        ),
        (["--scale-format", "ue8m0"], [*DEMO_ROWS[:5], DEMO_ROWS[6]]),
    ],
)
def test_demo_of_chosen_formats(capsys, options, expected):
    status, document = run_json(capsys, "demo", *SMALL, *options)
    assert status == 0
    assert [(f["format"], f["scale_format"]) for f in document["formats"]] == expected


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 8, 3), (4, 9, 64)])
def test_demo_of_other_sizes(capsys, sizes):
    options = [
        word
        for name, value in zip(("--layers", "--tokens", "--block-size"), sizes, strict=True)
        for word in (name, str(value))
    ]
    status, document = run_json(capsys, "demo", "--device", "cpu", *options)
    assert status == 0
    layers, tokens, block_size = sizes
    blocks = -(-tokens // block_size) + 2
    assert {f["rows_checked"] for f in document["formats"]} == {layers * blocks * block_size}


def test_demo_inserts_strided_views_of_one_projection(monkeypatch):
    seen = []

    def record(writer, kv_c, k_pe, slots):
        seen.append((kv_c, k_pe))
        writer.insert(kv_c, k_pe, slots)

    monkeypatch.setattr(demo, "insert_grouped", record)
    assert main(["demo", *SMALL, "--format", "fp8"]) == 0
    kv_c, k_pe = seen[0]
    assert (kv_c.shape, k_pe.shape) == ((3, 40, 512), (3, 40, 64))
    assert kv_c.strides == k_pe.strides == (576 * 2, 3 * 576 * 2, 2)
    assert np.shares_memory(kv_c.base, k_pe.base)


@pytest.fixture
def break_single(monkeypatch):
    """Return a function that spoils one byte of a layer's cache after each insert by layer."""
    real = demo.insert_per_layer

    def install_fault(layer, block, row, byte):
        def broken(layout, caches, *rest):
            real(layout, caches, *rest)
            cache = caches[layer].view(np.uint8)
            cache[block, row, byte] = 0x5A if cache[block, row, byte] != 0x5A else 0x5B

        monkeypatch.setattr(demo, "insert_per_layer", broken)

    return install_fault


@pytest.mark.parametrize(
    ("name", "byte", "part"),
    [
        ("bfloat16", 3, "nope 1"),
        ("float32", 2303, "rope 63"),
        ("fp8_e4m3", 0, "nope 0"),
        ("fp8_e5m2", 575, "rope 63"),
        ("fp8_ds_mla", 519, "scale 1"),
        ("fp8_ds_mla", 530, "rope 1"),
    ],
)
def test_demo_names_the_first_byte_that_differs(capsys, break_single, name, byte, part):
    break_single(2, 1, 13, byte)
    arguments = ["demo", *SMALL, "--format", name, "--scale-format", "float32"]
    assert main(arguments) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"first difference in layer 2, block 1, row 13, byte {byte} ({part}): grouped" in text
    assert "1 difference in" in text
    status, document = run_json(capsys, *arguments)
    assert status == 1
    assert document["ok"] is False
    [entry] = document["formats"]
    assert entry["differences"] == 1
    first = entry["first_difference"]
    assert {key: first[key] for key in ("layer", "block", "row", "byte", "part")} == {
        "layer": 2,
        "block": 1,
        "row": 13,
        "byte": byte,
        "part": part,
    }
    assert first["found"]["per layer"] in ("5A", "5B")
    assert first["found"]["grouped"] == first["found"]["ml_dtypes"] != first["found"]["per layer"]


def test_demo_with_json_names_the_place_on_stderr_too(capsys, break_single):
    break_single(0, 0, 0, 7)
    assert main(["demo", *SMALL, "--format", "fp8", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ok"] is False
    assert captured.err.startswith(
        "cupy-mla demo: fp8_e4m3: first difference in layer 0, block 0, row 0, byte 7 (nope 7): "
    )


def test_demo_goes_on_after_a_difference_and_marks_the_format(capsys, break_single):
    break_single(1, 0, 5, 20)
    assert main(["demo", *SMALL]) == 1
    text = capsys.readouterr().out
    assert [row[5] for row in table_rows(text, "Format ")] == ["1"] * len(DEMO_ROWS)
    assert text.count("first difference in layer 1, block 0, row 5, byte 20") == len(DEMO_ROWS)


@pytest.mark.parametrize("name", ROW_BYTES)
def test_demo_notices_padding_that_overwrites_the_last_row(capsys, monkeypatch, name):
    def broken(writer, kv_c, k_pe, slots):
        writer.insert(kv_c, k_pe, np.where(slots < 0, 5 * 16 - 1, slots))

    monkeypatch.setattr(demo, "insert_grouped", broken)
    status, document = run_json(capsys, "demo", *SMALL, "--format", name)
    assert status == 1
    first = document["formats"][0]["first_difference"]
    assert (first["layer"], first["block"], first["row"]) == (0, 4, 15)
    assert first["found"]["per layer"] == first["found"]["ml_dtypes"]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_demo_notices_scales_of_another_layer(capsys, monkeypatch, name):
    def broken(writer, kv_c, k_pe, slots):
        writer.update_scales([writer.kv_scales[0]] * writer.num_layers)
        writer.insert(kv_c, k_pe, slots)

    monkeypatch.setattr(demo, "insert_grouped", broken)
    status, document = run_json(capsys, "demo", *SMALL, "--format", name)
    assert status == 1
    assert document["formats"][0]["first_difference"]["layer"] == 1


def test_demo_notices_a_fault_of_the_first_insert_alone(capsys, monkeypatch):
    calls = []

    def broken(writer, kv_c, k_pe, slots):
        calls.append(slots)
        writer.insert(kv_c + kv_c if len(calls) == 1 else kv_c, k_pe, slots)

    monkeypatch.setattr(demo, "insert_grouped", broken)
    status, _ = run_json(capsys, "demo", *SMALL, "--format", "fp8")
    assert status == 1
    assert len(calls) > 1


def test_demo_notices_slots_of_another_layer(capsys, monkeypatch):
    def broken(writer, kv_c, k_pe, slots):
        writer.insert(kv_c, k_pe, slots[0])

    monkeypatch.setattr(demo, "insert_grouped", broken)
    status, document = run_json(capsys, "demo", *SMALL, "--format", "float16")
    assert status == 1
    assert document["formats"][0]["first_difference"]["layer"] == 1


@pytest.mark.parametrize("name", ROW_BYTES)
def test_demo_notices_a_fault_that_both_inserts_share(capsys, monkeypatch, name):
    """Such as one of the reference, which serves both: only ml_dtypes' rows show it."""

    def off_by_a_bit(array):
        bits = np.dtype(f"u{array.dtype.itemsize}")
        return (array.view(bits) ^ bits.type(1)).view(array.dtype)

    grouped, single = demo.insert_grouped, demo.insert_per_layer

    def shifted_grouped(writer, kv_c, k_pe, slots):
        grouped(writer, off_by_a_bit(kv_c), off_by_a_bit(k_pe), slots)

    def shifted_single(layout, caches, kv_c, k_pe, slots, scales):
        single(layout, caches, off_by_a_bit(kv_c), off_by_a_bit(k_pe), slots, scales)

    monkeypatch.setattr(demo, "insert_grouped", shifted_grouped)
    monkeypatch.setattr(demo, "insert_per_layer", shifted_single)
    status, document = run_json(capsys, "demo", *SMALL, "--format", name)
    assert status == 1
    for entry in document["formats"]:
        found = entry["first_difference"]["found"]
        assert found["grouped"] == found["per layer"] != found["ml_dtypes"]


def test_demo_notices_a_row_that_both_inserts_should_have_left_alone(capsys, monkeypatch):
    grouped, single = demo.insert_grouped, demo.insert_per_layer
    step = demo.make_step(get_layout("fp8"), 3, 40, 16, seed=0)
    free = min(set(range(5 * 16)) - set(step.slots[0].tolist()))

    def free_row_for_padding(slots):
        return np.where(slots < 0, free, slots)

    monkeypatch.setattr(
        demo,
        "insert_grouped",
        lambda writer, kv_c, k_pe, slots: grouped(writer, kv_c, k_pe, free_row_for_padding(slots)),
    )
    monkeypatch.setattr(
        demo,
        "insert_per_layer",
        lambda layout, caches, kv_c, k_pe, slots, scales: single(
            layout, caches, kv_c, k_pe, free_row_for_padding(slots), scales
        ),
    )
    status, document = run_json(capsys, "demo", *SMALL, "--format", "fp8")
    assert status == 1
    first = document["formats"][0]["first_difference"]
    assert (first["layer"], first["block"], first["row"]) == (0, *divmod(free, 16))
    assert first["found"]["grouped"] == first["found"]["per layer"] != "A5"
    assert first["found"]["ml_dtypes"] == "A5"


@pytest.mark.parametrize("name", ROW_BYTES)
def test_demo_notices_rows_that_are_read_back_wrong(capsys, monkeypatch, name):
    real = demo.read_slots
    spoilt = []

    def broken(cache, slots, *rest, **options):
        rows = real(cache, slots, *rest, **options)
        token = int(np.flatnonzero(slots >= 0)[3])
        rows[token, 515] = 12345
        spoilt.append(int(slots[token]))
        return rows

    monkeypatch.setattr(demo, "read_slots", broken)
    status, document = run_json(capsys, "demo", *SMALL, "--format", name)
    assert status == 1
    entry = document["formats"][0]
    assert entry["differences"] == 3  # one a layer
    first = entry["first_difference"]
    assert first["layer"] == 0
    assert (first["block"], first["row"]) == divmod(spoilt[0], 16)
    assert first["part"] == "rope 3"
    assert first["byte"] == {1152: 1030, 2304: 2060, 576: 515, 656: 534}[ROW_BYTES[name]]
    assert first["found"]["read_slots"] == "12345.0"


def test_demo_notices_padding_that_reads_back_as_something(capsys, monkeypatch):
    real = demo.read_slots

    def broken(cache, slots, *rest, **options):
        return real(cache, np.where(slots < 0, 0, slots), *rest, **options)

    monkeypatch.setattr(demo, "read_slots", broken)
    status, document = run_json(capsys, "demo", *SMALL, "--format", "float32")
    assert status == 1
    first = document["formats"][0]["first_difference"]
    assert (first["block"], first["row"]) == (None, None)
    assert first["found"]["ml_dtypes"] == "0.0"


@pytest.mark.gpu
def test_demo_on_a_gpu(capsys):
    if (missing := _device.cuda_missing()) is not None:
        pytest.skip(missing)
    status, document = run_json(capsys, "demo", "--device", "cuda", "--tokens", "4096")
    assert status == 0
    assert document["backend"] == "CUDA"
    assert all(entry["differences"] == 0 for entry in document["formats"])
