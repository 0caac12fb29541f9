"""A device that compiles as if it were an sm_75: the driver turns that PTX into its own code.

So the software paths of older GPUs run on the GPU at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cupy_mla._arrays import DeviceId
from cupy_mla._cuda import backend, cupy_device
from cupy_mla.errors import CompileError
from tests.gpu.frameworks import cupy


class Ptx75Device(cupy_device.CupyDevice):
    """The product's device, but for the target of the compiler."""

    def compile(self, source: str, entry: str) -> int:
        from cupy_backends.cuda.libs import nvrtc

        program = nvrtc.createProgram(source, f"{entry}.cu", (), ())
        try:
            options = ("-arch=compute_75", *cupy_device.OPTIONS, "-ftz=true")
            nvrtc.compileProgram(program, options)
            ptx = nvrtc.getPTX(program)
        except nvrtc.NVRTCError as error:
            raise CompileError(nvrtc.getProgramLog(program)) from error
        finally:
            nvrtc.destroyProgram(program)
        with self.current():
            module = cupy.cuda.function.Module()
            module.load(ptx)
            function = module.get_function(entry)
        self._modules.append((module, function))
        return int(function.ptr)


FIRST = DeviceId("cuda", 0)
_devices: list[Any] = []


@contextmanager
def installed() -> Iterator[None]:
    """Let the backend compile for sm_75 within a block; its functions stay for the next one."""
    if not _devices:
        _devices.append(Ptx75Device(cupy, 0))
    backend.install(_devices[0])
    try:
        yield
    finally:
        backend.install(cupy_device.device(0))
