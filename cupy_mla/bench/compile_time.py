"""How long the first call of a kernel waits: compiled, and found in the cache on disk.

``python -m cupy_mla.bench.compile_time insert_fp8_e4m3_bfloat16 ...`` loads these kernels in a new
process and prints their times as JSON. `measure` runs it twice over an empty cache folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from cupy_mla import backends
from cupy_mla._arrays import DeviceId
from cupy_mla._cuda import compiler, registry
from cupy_mla.layouts import get_layout

_SECONDS = 600


@dataclass(frozen=True)
class CompileRow:
    """The waiting time of one kernel, in seconds.

    Attributes
    ----------
    entry : str
        Name of the kernel's specialisation.
    cold : float
        Compiled by NVRTC.
    cached : float
        Found in CuPy's cache on disk.
    """

    entry: str
    cold: float
    cached: float

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {"kernel": self.entry, "cold_s": self.cold, "cached_s": self.cached}


def entries(kernels: Iterable[str], formats: Iterable[str]) -> list[str]:
    """Return the kernels of given names for given formats, a dtype each."""
    wanted, names = set(formats), set(kernels)
    chosen: dict[tuple[str, str], str] = {}
    for special in registry.specialisations():
        key = special.kernel.name, special.format.layout
        if key[0] in names and key[1] in wanted:
            chosen.setdefault(key, special.entry)
    return list(chosen.values())


def load_times(device: Any, wanted: Iterable[str]) -> dict[str, float]:
    """Load kernels on a device; return seconds by entry."""
    by_entry = {special.entry: special for special in registry.specialisations()}
    times = {}
    for entry in wanted:
        special = by_entry[entry]
        begin = perf_counter()
        compiler.load(device, special, get_layout(special.format.layout))
        times[entry] = perf_counter() - begin
    return times


def measure(wanted: Sequence[str]) -> list[CompileRow]:
    """Measure kernels over an empty cache folder, and over the folder that this leaves.

    Raises
    ------
    RuntimeError
        Where the process that loads them fails; the text is its last line.
    """
    if not wanted:
        return []
    with tempfile.TemporaryDirectory() as folder:
        cold, cached = (_in_new_process(wanted, folder) for _ in range(2))
    return [CompileRow(entry, cold[entry], cached[entry]) for entry in wanted]


def _in_new_process(wanted: Sequence[str], folder: str) -> dict[str, float]:
    environment = {name: os.environ[name] for name in os.environ if name != "CUPY_CACHE_IN_MEMORY"}
    # The package is found as it was found here, from a checkout too.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", __name__, *wanted],
        env=environment | {"CUPY_CACHE_DIR": folder},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise RuntimeError(f"compile time: the process failed: {lines[-1]}")
    times: dict[str, float] = json.loads(done.stdout)
    return times


def main(wanted: Sequence[str]) -> None:
    """Load kernels on the first CUDA device and print their times."""
    device = backends.cuda(DeviceId("cuda", 0)).device
    device.allocate(1)  # the context, which any program has before its first launch
    sys.stdout.write(json.dumps(load_times(device, wanted)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
