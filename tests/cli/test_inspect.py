"""`cupy-mla inspect`: what it finds in files, and that a bad file is one clear message."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla.cli import main
from cupy_mla.inspection import open_cache
from tests.cli.helpers import run_json, table_rows

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def ds_mla_cache(blocks=4, block_size=8):
    """Every code 1.0, scales 0.75, rotary part 1.0."""
    cache = np.full((blocks, block_size, 656), 0x38, np.uint8)
    cache[..., 512:528] = np.tile(np.frombuffer(bytes.fromhex("0000403F"), np.uint8), 4)
    cache[..., 528:] = np.tile(np.frombuffer(bytes.fromhex("803F"), np.uint8), 64)
    return cache


def safetensors_bytes(tensors, *, gap=0):
    """A file as its format says: length of the header, JSON, then the tensors."""
    header, data = {"__metadata__": {"by": "test"}}, b""
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * gap + data


def save_safetensors(path, tensors):
    path.write_bytes(safetensors_bytes(tensors))
    return str(path)


@pytest.fixture
def saved(tmp_path):
    """Save an array as .npy; give the path as text."""

    def save(array, name="cache.npy"):
        path = tmp_path / name
        np.save(path, array)
        return str(path)

    return save


def refused(capsys, *arguments):
    """Run a command that has to fail; give its message."""
    assert main(["inspect", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert lines[-1].startswith("cupy-mla inspect: error: ")
    assert "Traceback" not in captured.err
    return lines[-1]


# --- audit ----------------------------------------------------------------------------------------


def test_places_in_a_file_by_slot_part_and_element(capsys, saved):
    cache = ds_mla_cache()
    cache[3, 1, 600:602] = [0xC1, 0x7F]
    cache[3, 1, 516:520] = [0x00, 0x00, 0x80, 0x7F]
    cache[0, 2, 7] = 0xFF
    status, document = run_json(capsys, "inspect", saved(cache), "--layout", "fp8_ds_mla")
    assert status == 0
    assert document["audit"]["nonfinite"] == [
        {"slot": 2, "part": "nope", "element": 7},
        {"slot": 25, "part": "scale", "element": 1},
        {"slot": 25, "part": "rope", "element": 36},
    ]
    assert document["audit"]["rows"] == 32
    assert document["audit"]["scale_format"] == "float32"
    assert (document["num_blocks"], document["block_size"]) == (4, 8)
    assert document["layout"]["row_bytes"] == 656
    assert document["memory"]["total_bytes"] == 32 * 656
    assert document["memory"]["bytes_per_token"] == 656
    assert "row" not in document
    assert "compare" not in document


def test_the_audit_in_words(capsys, saved):
    cache = ds_mla_cache()
    cache[1, 0, 0] = 0x7F
    path = saved(cache)
    assert main(["inspect", path, "--layout", "fp8_ds_mla", "--slots", "0:9,8,31,32:40,-1"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].strip() == path
    assert "10 of 32 (4 blocks of 8, 20992 bytes)" in text
    assert "slots outside  9 of those given" in text
    assert "1: slot 8 nope[0]" in text
    assert "float32 (40 tiles seen: 40 only float32 scales leave" in text
    assert "amax of rope   1" in text


def test_a_range_far_beyond_the_file_is_of_its_slots(capsys, saved):
    arguments = ["inspect", saved(ds_mla_cache()), "--layout", "fp8_ds_mla"]
    assert main([*arguments, "--slots", f"30:{2**70}"]) == 0
    assert f"slots outside {2**70 - 32} of those given" in " ".join(capsys.readouterr().out.split())


def test_a_slot_far_beyond_the_file_is_outside(capsys, saved):
    arguments = ["inspect", saved(ds_mla_cache()), "--layout", "fp8_ds_mla"]
    assert main([*arguments, "--slots", f"{10**22},{-(10**22)},3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rows 1 of 32 (4 blocks of 8, 20992 bytes)" in text
    assert "slots outside 2 of those given" in text


@pytest.mark.parametrize("slots", ["8", "0:9", "5:100,8:9", "31,8"])
def test_slots_are_numbers_and_ranges(capsys, saved, slots):
    cache = ds_mla_cache()
    cache[1, 0, 0] = 0x7F
    cache[1, 1, 0] = 0x7F
    found = {"8": 1, "0:9": 1, "5:100,8:9": 2, "31,8": 1}[slots]
    arguments = ("inspect", saved(cache), "--layout", "fp8_ds_mla", "--slots", slots)
    assert run_json(capsys, *arguments)[1]["audit"]["nonfinite_count"] == found


@pytest.mark.parametrize(
    ("layout", "dtype", "stored"),
    [
        ("bfloat16", BFLOAT16, None),
        ("auto", BFLOAT16, None),
        ("bfloat16", BFLOAT16, np.uint16),
        ("bfloat16", BFLOAT16, np.uint8),
        ("float16", np.float16, None),
        ("auto", np.float16, None),
        ("float32", np.float32, None),
        ("auto", np.float32, None),
    ],
)
def test_caches_of_16_and_32_bits_as_numpy_saves_them(capsys, saved, layout, dtype, stored):
    """NumPy writes bfloat16 as raw elements of two bytes; uint16 and bytes are common too."""
    cache = np.zeros((2, 4, 576), dtype)
    cache[1, 2, 513] = np.nan
    cache[0, 0, 0] = -5
    path = saved(cache if stored is None else cache.view(stored))
    document = run_json(capsys, "inspect", path, "--layout", layout)[1]
    assert document["audit"]["nonfinite"] == [{"slot": 6, "part": "rope", "element": 1}]
    assert document["audit"]["amax"] == {"nope": [5.0], "rope": [0.0]}
    assert document["layout"]["name"] == np.dtype(dtype).name


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ml_dtypes.float8_e4m3fn])
def test_fp8_caches_as_bytes_of_any_name(capsys, saved, dtype):
    cache = np.zeros((1, 2, 576), np.uint8)
    cache[0, 1, 3] = 0x7F
    document = run_json(capsys, "inspect", saved(cache.view(dtype)), "--layout", "fp8")[1]
    assert document["audit"]["nonfinite"] == [{"slot": 1, "part": "nope", "element": 3}]


def test_other_sizes_flat_files_and_an_axis_for_one_head(capsys, saved):
    rows = np.zeros((12, 40), np.float32)
    rows[7, 33] = np.inf
    expected = [{"slot": 7, "part": "rope", "element": 1}]
    sizes = ("--layout", "float32", "--kv-lora-rank", "32", "--rope-dim", "8")
    for array, options, blocks in (
        (rows, (), (12, 1)),
        (rows, ("--block-size", "4"), (3, 4)),
        (rows.reshape(3, 4, 40), (), (3, 4)),
        (rows.reshape(3, 4, 40), ("--block-size", "4"), (3, 4)),
        (rows.reshape(2, 6, 1, 40), (), (2, 6)),
    ):
        document = run_json(capsys, "inspect", saved(array), *sizes, *options)[1]
        assert document["audit"]["nonfinite"] == expected
        assert (document["num_blocks"], document["block_size"]) == blocks


def test_indexer_keys_keep_their_scales_behind_the_block(capsys, saved):
    """4 rows a block: 512 bytes of codes, then 16 bytes of scales."""
    blocks = np.full((2, 528), 0x38, np.uint8)
    blocks[:, 512:] = np.tile(np.array([1.5], "<f4").view(np.uint8), 4)
    blocks[1, 520:524] = np.array([np.nan], "<f4").view(np.uint8)
    path = saved(blocks.reshape(2, 4, 132))
    status, document = run_json(capsys, "inspect", path, "--layout", "indexer_fp8", "--row", "7")
    assert status == 0
    assert document["audit"]["nonfinite"] == [{"slot": 6, "part": "scale", "element": 0}]
    parts = {part["name"]: part for part in document["row"]["parts"]}
    assert (parts["nope"]["offset"], parts["scale"]["offset"]) == (384, 524)
    assert set(parts["nope"]["values"]) == {1.5}


def test_memory_does_not_hold_the_file(saved, capsys):
    """A file of 300 MB, most of it a hole; what is mapped of it is not traced."""
    path = saved(np.zeros((1, 1, 576), np.uint8))
    shape = (32768, 16, 576)
    np.lib.format.open_memmap(path, "w+", np.uint8, shape)[-1, -1, -1] = 0x7F
    tracemalloc.start()
    arguments = ("inspect", path, "--layout", "fp8", "--row", "5", "--compare", path)
    document = run_json(capsys, *arguments)[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert document["audit"]["rows"] == 524288
    assert document["audit"]["nonfinite"] == [{"slot": 524287, "part": "rope", "element": 63}]
    assert document["compare"]["equal"] is True
    assert peak < 64 << 20


# --- safetensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "kind", "dtype"),
    [
        ("fp8", "U8", np.uint8),
        ("fp8", "F8_E4M3", np.uint8),
        ("fp8_e5m2", "F8_E5M2", np.uint8),
        ("bfloat16", "BF16", BFLOAT16),
        ("float16", "F16", np.float16),
        ("float32", "F32", np.float32),
        ("auto", "BF16", BFLOAT16),
    ],
)
def test_a_tensor_of_each_type(capsys, tmp_path, layout, kind, dtype):
    """The tensor before it has an odd number of bytes, so that it begins at an odd address."""
    cache = np.zeros((2, 4, 576), dtype)
    cache[1, 3, 574] = np.uint8(0x7F) if dtype is np.uint8 else np.nan
    path = save_safetensors(
        tmp_path / "a.safetensors",
        {
            "first": ("U8", (7,), b"\x7f" * 7),
            "kv": (kind, (2, 4, 576), cache.tobytes()),
            "last": ("I64", (1,), b"\xff" * 8),
        },
    )
    status, document = run_json(capsys, "inspect", path, "--layout", layout, "--tensor", "kv")
    assert status == 0
    assert document["audit"]["nonfinite"] == [{"slot": 7, "part": "rope", "element": 62}]


def test_the_only_tensor_needs_no_name(capsys, tmp_path):
    raw = ds_mla_cache().tobytes()
    path = save_safetensors(tmp_path / "a.safetensors", {"kv": ("U8", (4, 8, 656), raw)})
    document = run_json(capsys, "inspect", path, "--layout", "fp8_ds_mla")[1]
    assert document["audit"]["rows"] == 32


def test_tensors_that_cannot_be_chosen(capsys, tmp_path):
    raw = np.zeros((1, 1, 576), np.float32).tobytes()
    tensors = {
        "one": ("F32", (1, 1, 576), raw),
        "two": ("F32", (1, 1, 576), raw),
        "long": ("I64", (1, 1, 288), raw),
    }
    path = save_safetensors(tmp_path / "a.safetensors", tensors)
    assert "'one', 'two', 'long'" in refused(capsys, path, "--layout", "float32")
    text = refused(capsys, path, "--layout", "float32", "--tensor", "three")
    assert "'three'" in text
    assert "I64" in refused(capsys, path, "--layout", "float32", "--tensor", "long")
    empty = save_safetensors(tmp_path / "b.safetensors", {})
    assert "none" in refused(capsys, empty, "--layout", "float32")


def test_safetensors_without_its_package(capsys, tmp_path, monkeypatch):
    path = save_safetensors(tmp_path / "a.safetensors", {"kv": ("U8", (1, 1, 576), bytes(576))})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install 'cupy-mla[inspect]'" in refused(capsys, path, "--layout", "fp8")


def test_damaged_safetensors(capsys, tmp_path):
    good = safetensors_bytes({"kv": ("U8", (1, 1, 576), bytes(576))})
    overlap = {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in ("a", "b")}
    text = json.dumps(overlap).encode()
    for content in (
        b"",
        good[:5],
        good[:-1],
        good + b"\0",
        struct.pack("<Q", 1 << 60) + good[8:],
        struct.pack("<Q", 3) + b"{]}",
        good.replace(b"[1, 1, 576]", b"[1, 2, 576]"),
        good.replace(b'"U8"', b'"Q8"'),
        safetensors_bytes({"kv": ("U8", (1, 1, 576), bytes(576))}, gap=8),
        struct.pack("<Q", len(text)) + text + b"\0" * 4,
        pickle.dumps({"kv": [1, 2]}),
    ):
        path = tmp_path / "bad.safetensors"
        path.write_bytes(content)
        assert "undamaged .safetensors file" in refused(capsys, str(path), "--layout", "fp8")


# --- one row --------------------------------------------------------------------------------------


def test_one_row_in_full(capsys, saved):
    cache = ds_mla_cache()
    cache[2, 3, :3] = [0xC4, 0x7F, 0x01]
    cache[2, 3, 516:520] = np.array([-2.5], "<f4").view(np.uint8)
    cache[2, 3, 130] = 0x40
    cache[2, 3, 654:656] = [0x80, 0xFF]
    path = saved(cache)
    status, document = run_json(capsys, "inspect", path, "--layout", "fp8_ds_mla", "--row", "19")
    assert status == 0
    row = document["row"]
    assert (row["slot"], row["block"], row["row"]) == (19, 2, 3)
    parts = {part["name"]: part for part in row["parts"]}
    assert [(part["offset"], part["nbytes"], part["dtype"]) for part in row["parts"]] == [
        (0, 512, "float8_e4m3fn"),
        (512, 16, "float32"),
        (528, 128, "bfloat16"),
    ]
    assert b"".join(bytes.fromhex(part["bytes"]) for part in row["parts"]) == cache[2, 3].tobytes()
    assert parts["nope"]["values"][:4] == [-2.25, "nan", 0.00146484375, 0.75]
    assert parts["nope"]["values"][130] == -5.0
    assert parts["scale"]["values"] == [0.75, -2.5, 0.75, 0.75]
    assert parts["rope"]["values"][62:] == [1.0, "-inf"]


def test_the_row_as_a_table(capsys, saved):
    cache = ds_mla_cache()
    cache[2, 3, 8] = 0xC4
    main(["inspect", saved(cache), "--layout", "fp8_ds_mla", "--row", "19"])
    text = capsys.readouterr().out
    assert "Slot 19: block 2, row 3" in text
    rows = table_rows(text, "Part")
    assert len(rows) == 512 // 8 + 1 + 64 // 8
    assert rows[1] == [
        "nope",
        "8",
        "8",
        "C4 38 38 38 38 38 38 38",
        "-2.25 0.75 0.75 0.75 0.75 0.75 0.75 0.75",
    ]
    assert rows[64] == [
        "scale",
        "0",
        "512",
        "0000403F 0000403F 0000403F 0000403F",
        "0.75 0.75 0.75 0.75",
    ]
    assert rows[66][:4] == ["rope", "8", "544", "803F 803F 803F 803F 803F 803F 803F 803F"]


def test_a_flat_row_with_and_without_its_scale(capsys, saved):
    path = saved(np.full((1, 1, 576), 0x38, np.uint8))
    arguments = ("inspect", path, "--layout", "fp8", "--row", "0")
    plain = run_json(capsys, *arguments)[1]["row"]["parts"]
    assert {part["values"][0] for part in plain} == {1.0}
    scaled = run_json(capsys, *arguments, "--scale", "0.1")[1]["row"]["parts"]
    assert {part["values"][0] for part in scaled} == {float(np.float32(0.1))}
    main(list(arguments))
    assert "before the layer's scale" in capsys.readouterr().out
    main([*arguments, "--scale", "0.1"])
    assert "Values as stored" not in capsys.readouterr().out


# --- comparison -----------------------------------------------------------------------------------


def test_where_two_files_differ(capsys, saved):
    first = ds_mla_cache()
    second = first.copy()
    second[1, 2, 523] = 0x41
    second[1, 2, 600] = 0x7F
    second[2, 1, 3] = 0x40
    paths = saved(first, "a.npy"), saved(second, "b.npy")
    arguments = ("inspect", paths[0], "--layout", "fp8_ds_mla", "--compare", paths[1])
    status, document = run_json(capsys, *arguments)
    assert status == 1
    assert document["compare"] == {
        "file": paths[1],
        "layout": "fp8_ds_mla",
        "equal": False,
        "rows": 32,
        "rows_differing": 2,
        "elements_differing": {"nope": 1, "scale": 1, "rope": 1},
        "first": {
            "slot": 10,
            "block": 1,
            "row": 2,
            "part": "scale",
            "element": 2,
            "first": "0.75 (00 00 40 3F)",
            "second": "12 (00 00 40 41)",
        },
    }
    assert main(list(arguments)) == 1
    text = capsys.readouterr().out
    assert f"Compared with {paths[1]}" in text
    assert "block 1, row 2 (slot 10), scale[2]: 0.75 (00 00 40 3F) and 12 (00 00 40 41)" in text
    assert run_json(capsys, *arguments, "--slots", "0:10,11:17,18:32")[0] == 0
    assert run_json(capsys, *arguments, "--slots", "17")[0] == 1


def test_equal_files_of_different_kinds(capsys, saved, tmp_path):
    cache = ds_mla_cache()
    other = save_safetensors(
        tmp_path / "b.safetensors",
        {"x": ("U8", (1,), b"1"), "kv": ("U8", (8, 4, 656), cache.tobytes())},
    )
    arguments = ("--layout", "fp8_ds_mla", "--compare", other, "--compare-tensor", "kv")
    status, document = run_json(capsys, "inspect", saved(cache), *arguments)
    assert status == 0
    assert document["compare"]["equal"] is True
    assert document["compare"]["first"] is None


def test_two_tensors_of_one_file(capsys, tmp_path):
    cache = ds_mla_cache()
    changed = cache.copy()
    changed[0, 0, 0] = 0
    shape = (4, 8, 656)
    path = save_safetensors(
        tmp_path / "a.safetensors",
        {"a": ("U8", shape, cache.tobytes()), "b": ("U8", shape, changed.tobytes())},
    )
    arguments = ("inspect", path, "--layout", "fp8_ds_mla", "--tensor", "a", "--compare", path)
    assert run_json(capsys, *arguments)[0] == 0
    assert run_json(capsys, *arguments, "--compare-tensor", "b")[0] == 1


# --- progress -------------------------------------------------------------------------------------


def test_progress_goes_to_a_terminal_on_stderr_only(capsys, saved, monkeypatch):
    cache = np.zeros((1000, 16, 656), np.uint8)
    arguments = ["inspect", saved(cache), "--layout", "fp8_ds_mla", "--json"]
    assert main(arguments) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == json.loads(quiet.out)
    assert "audit row 12,786" in shown.err
    assert "/3" in shown.err


# --- what is refused ------------------------------------------------------------------------------


def test_files_that_are_none(capsys, tmp_path, saved):
    missing = str(tmp_path / "none.npy")
    assert "exist" in refused(capsys, missing, "--layout", "fp8")
    assert missing in refused(capsys, missing, "--layout", "fp8")
    assert "regular file" in refused(capsys, str(tmp_path), "--layout", "fp8")
    (tmp_path / "cache.pt").write_bytes(b"\x80\x02}q\x00.")
    text = refused(capsys, str(tmp_path / "cache.pt"), "--layout", "fp8")
    assert ".npy or .safetensors" in text
    good = saved(ds_mla_cache())
    assert missing in refused(capsys, good, "--layout", "fp8_ds_mla", "--compare", missing)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickles_are_never_loaded(capsys, tmp_path):
    trace = tmp_path / "trace"
    objects = np.empty((1, 1, 576), object)
    objects[:] = [[[Bomb(trace)] * 576]]
    np.save(tmp_path / "objects.npy", objects, allow_pickle=True)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Bomb(trace)))
    np.savez(tmp_path / "archive", objects)
    os.rename(tmp_path / "archive.npz", tmp_path / "archive.npy")
    for name in ("objects.npy", "pickle.npy", "archive.npy"):
        text = refused(capsys, str(tmp_path / name), "--layout", "fp8")
        assert "pickles are not loaded" in text
        assert name in text
    assert not trace.exists()
    pickle.loads((tmp_path / "pickle.npy").read_bytes()).close()
    assert trace.exists()  # so the bomb does work


def test_damaged_and_truncated_npy(capsys, saved):
    path = saved(ds_mla_cache())
    with open(path, "rb") as file:
        good = file.read()
    header = good[:128]
    for content in (
        b"",
        good[:4],
        good[:60],
        good[:-1],
        good[:128],
        b"\x93NUMPX" + good[6:],
        header.replace(b"'|u1'", b"'|x1'") + good[128:],
        header.replace(b"(4, 8, 656)", b"(4, 8, -56)") + good[128:],
        header.replace(b"(4, 8, 656)", b"(4, 8, 657)") + good[128:],
        header.replace(b"'shape'", b"'shxpe'") + good[128:],
        header.replace(b"{", b"[") + good[128:],
    ):
        with open(path, "wb") as file:
            file.write(content)
        refused(capsys, path, "--layout", "fp8_ds_mla")


@given(data=st.data())
def test_any_damage_to_a_header_is_one_kind_of_error(tmp_path_factory, data):
    """Never anything but a ValueError or TypeError, which the program turns into a message."""
    suffix = data.draw(st.sampled_from([".npy", ".safetensors"]))
    folder = tmp_path_factory.mktemp("damage")
    if suffix == ".npy":
        np.save(folder / "good.npy", np.zeros((2, 2, 576), np.uint8))
        good = bytearray((folder / "good.npy").read_bytes())
    else:
        good = bytearray(safetensors_bytes({"kv": ("U8", (2, 2, 576), bytes(2304))}))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, 130))] = data.draw(st.integers(0, 255))
    path = folder / f"bad{suffix}"
    path.write_bytes(good[: data.draw(st.integers(0, len(good)) | st.just(len(good)))])
    try:
        cache = open_cache(path, "fp8")
    except (ValueError, TypeError):
        return
    assert cache.nbytes <= len(good)
    assert cache.shape[2] == 576


def test_arrays_that_do_not_fit_the_layout(capsys, saved):
    bytes_ = np.zeros((2, 4, 576), np.uint8)
    wide = np.zeros((2, 4, 656), np.uint8)
    for array, layout, options, fragments in (
        (bytes_, "fp8_ds_mla", (), ["656", "[2, 4, 576]"]),
        (wide, "fp8", (), ["576", "[2, 4, 656]", "kv_lora_rank 512"]),
        (np.zeros((2, 4, 584), np.uint8), "fp8_ds_mla", (), ["656", "584"]),
        (bytes_, "fp8", ("--rope-dim", "0"), ["512", "rope_dim 0"]),
        (np.zeros((2, 4, 576), np.float16), "bfloat16", (), ["bfloat16", "float16"]),
        (np.zeros((2, 4, 576), np.float32), "fp8", (), ["float32"]),
        (np.zeros((2, 4, 576), ">f4"), "float32", (), ["float32"]),
        (np.zeros((2, 4, 576), np.float64), "auto", (), ["float64", "auto"]),
        (bytes_, "auto", (), ["uint8", "auto"]),
        (np.zeros(576, np.uint8), "fp8", (), ["[576]"]),
        (np.zeros((2, 4, 2, 576), np.uint8), "fp8", (), ["[2, 4, 2, 576]"]),
        (np.zeros((0, 4, 576), np.uint8), "fp8", (), ["row"]),
        (np.asfortranarray(np.zeros((2, 4, 576), np.uint8)), "fp8", (), ["C order"]),
        (np.zeros((10, 576), np.uint8), "fp8", ("--block-size", "4"), ["divide", "10", "4"]),
        (bytes_, "fp8", ("--block-size", "8"), ["be the 4", "8"]),
        (bytes_, "fp8", ("--tensor", "kv"), ["tensor", "kv"]),
        (bytes_, "fp8", ("--row", "8"), ["--row", "8 slots"]),
        (bytes_, "fp8", ("--compare-tensor", "kv"), ["--compare-tensor", "--compare"]),
        (bytes_, "fp8_ds_mla", ("--rope-dim", "0"), ["fp8_ds_mla", "64"]),
    ):
        text = refused(capsys, saved(array), "--layout", layout, *options)
        for fragment in fragments:
            assert fragment in text, text


def test_files_of_another_size_are_not_compared(capsys, saved):
    first, second = saved(ds_mla_cache(), "a.npy"), saved(ds_mla_cache(2), "b.npy")
    text = refused(capsys, first, "--layout", "fp8_ds_mla", "--compare", second)
    assert "32 and 16" in text


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "FILE"),
        (["x.npy"], "--layout"),
        (["x.npy", "--layout", "fp4"], "'fp4'"),
        (["x.npy", "--layout", "fp8", "--row", "-1"], "'-1'"),
        (["x.npy", "--layout", "fp8", "--slots", "1-2"], "'1-2'"),
        (["x.npy", "--layout", "fp8", "--slots", "1:2:3"], "'1:2:3'"),
        (["x.npy", "--layout", "fp8", "--slots", ""], "''"),
        (["x.npy", "--layout", "fp8", "--scale", "0"], "'0'"),
        (["x.npy", "--layout", "fp8", "--scale", "nan"], "'nan'"),
        (["x.npy", "--layout", "fp8", "--block-size", "0"], "'0'"),
    ],
)
def test_arguments_that_are_wrong(capsys, arguments, fragment):
    assert main(["inspect", *arguments]) == 2
    assert fragment in capsys.readouterr().err


@pytest.mark.parametrize("slots", ["5:2", "0:4,7:7"])
def test_a_range_without_slots_is_a_usage_error(capsys, tmp_path, slots):
    path = tmp_path / "cache.npy"
    np.save(path, np.zeros((4, 4, 656), np.uint8))
    assert main(["inspect", str(path), "--layout", "fp8_ds_mla", "--slots", slots]) == 2
    assert "range without slots" in capsys.readouterr().err


def test_an_error_names_the_command_once(capsys, tmp_path):
    path = tmp_path / "cache.txt"
    path.write_text("no cache")
    assert main(["inspect", str(path), "--layout", "fp8_ds_mla"]) == 2
    assert capsys.readouterr().err.startswith("cupy-mla inspect: error: file must be")
