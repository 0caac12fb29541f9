"""Quotients and the scales of tiles, for every number that matters: see quotients.cpp."""

from __future__ import annotations

import subprocess

import pytest

from cupy_mla._cuda import sources
from tests.emulator import device as emulator

# For this machine alone, so that loops become vector instructions; IEEE in every other respect.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
)


@pytest.fixture(scope="module")
def differences(tmp_path_factory) -> dict[str, int]:
    """Compile the program behind the kernels' own header, run it, and read its lines."""
    folder = tmp_path_factory.mktemp("quotients")
    program = emulator.RUNTIME.with_name("quotients.cpp").read_text()
    code = folder / "quotients.cpp"
    code.write_text(f'{sources.flatten(("quotients.cuh",))}#line 1 "quotients.cpp"\n{program}')
    command = [emulator.compiler()[0], *FLAGS, "-include", str(emulator.RUNTIME), str(code)]
    subprocess.run([*command, "-o", str(folder / "quotients")], check=True)
    output = subprocess.run([folder / "quotients"], check=True, capture_output=True, text=True)
    return {name: int(count) for name, count in map(str.split, output.stdout.splitlines())}


def test_no_code_is_another_one_than_by_division(differences):
    assert differences["by_reciprocal"] > 1_000_000  # they are hard
    assert differences["without_the_odd_one"] == 1
    assert differences["wrong_sides"] == 0


def test_codes_by_scales_of_every_size(differences):
    assert differences["wrong_codes"] == 0


def test_the_scales_of_all_magnitudes_are_correctly_rounded(differences):
    assert differences["tile_scales_float32"] == 0
    assert differences["tile_powers_of_two"] == 0
    assert differences["index_powers_of_two"] == 0
