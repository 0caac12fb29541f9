"""Division by a scale, for every input there is: see division.cpp."""

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
    folder = tmp_path_factory.mktemp("division")
    program = emulator.RUNTIME.with_name("division.cpp").read_text()
    code = folder / "division.cpp"
    code.write_text(f'{sources.flatten(("fp8.cuh",))}#line 1 "division.cpp"\n{program}')
    command = [emulator.compiler()[0], *FLAGS, "-include", str(emulator.RUNTIME), str(code)]
    subprocess.run([*command, "-o", str(folder / "division")], check=True)
    output = subprocess.run([folder / "division"], check=True, capture_output=True, text=True)
    return {name: int(count) for name, count in map(str.split, output.stdout.splitlines())}


def test_all_quotients_of_short_significands_are_correctly_rounded(differences):
    assert differences["short_significands"] == 0


def test_the_hardest_quotients_of_float32_are_correctly_rounded(differences):
    assert differences["by_reciprocal"] > 1_000_000  # they are hard
    assert differences["hardest_quotients"] == 0


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_the_scales_of_all_magnitudes_are_correctly_rounded(differences, scale_format):
    assert differences[f"tile_scales_{scale_format}"] == 0
