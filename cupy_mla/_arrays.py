"""What an array is: pointer, shape, strides, dtype, device, read without importing its framework.

numpy, cupy, torch and JAX arrays are recognised by the module of their type; anything else goes
by DLPack, ``__cuda_array_interface__`` or ``__array_interface__``. Nothing here copies data.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import _dlpack, dtypes
from .dtypes import DType


@dataclass(frozen=True, slots=True)
class DeviceId:
    """Where memory is: ``DeviceId("cpu", 0)`` or ``DeviceId("cuda", index)``."""

    kind: str
    index: int

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = DeviceId("cpu", 0)


class UnusableArray(TypeError):
    """An array that cannot be read where it lies; its arguments are what is expected, and got."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRef:
    """A strided array in host or device memory.

    Attributes
    ----------
    owner : object
        What keeps the memory alive: the array itself, or its DLPack capsule and the array.
    ptr : int
        Address of the first element; 0 is possible where nothing is stored.
    shape, strides : tuple of int
        Elements and **bytes** a step along each axis.
    dtype : numpy.dtype
    device : DeviceId or None
        None where an empty array does not tell.
    writable : bool
        Whether it may be a destination.
    framework : str
        ``numpy``, ``cupy``, ``torch``, ``jax``, ``dlpack`` or ``interface``.
    """

    owner: Any
    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: DeviceId | None
    writable: bool
    framework: str

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def looks(self) -> tuple[Any, ...]:
        """Return what two descriptions of one and the same array have in common."""
        return self.ptr, self.shape, self.strides, self.dtype

    def without_axis(self, axis: int) -> ArrayRef:
        """Return the array without an axis of one element."""
        return replace(
            self,
            owner=(self.owner,),
            shape=self.shape[:axis] + self.shape[axis + 1 :],
            strides=self.strides[:axis] + self.strides[axis + 1 :],
        )

    def element(self, index: int) -> ArrayRef:
        """Return element `index` of an array of at most one axis, as a 0-d array in place."""
        step = self.strides[0] if self.strides else 0
        return replace(self, owner=(self.owner,), ptr=self.ptr + index * step, shape=(), strides=())

    def host_view(self) -> np.ndarray[Any, Any]:
        """Return a NumPy array over the same host memory, which keeps the owner alive."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        return memory_view(self.owner, self.ptr, self.shape, self.strides, self.dtype)


class _HostMemory:
    """What ``numpy.asarray`` needs to see foreign host memory, and to keep it alive."""

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def memory_view(
    owner: Any, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType
) -> np.ndarray[Any, Any]:
    """Return a NumPy array over host memory at `ptr` that keeps `owner` alive."""
    if 0 in shape:
        return np.empty(shape, dtype)
    raw = np.dtype(f"u{dtype.itemsize}") if dtype.itemsize in (1, 2, 4, 8) else dtype
    memory = _HostMemory(
        owner,
        {
            "version": 3,
            "data": (ptr, False),
            "shape": shape,
            "strides": strides,
            "typestr": raw.str,
        },
    )
    return np.asarray(memory).view(dtype)


def byte_view(ref: ArrayRef, row_bytes: int) -> np.ndarray[Any, Any]:
    """View an array as uint8 with `row_bytes` bytes in place of its last axis.

    Unlike ``ndarray.view`` it takes any strides, so it never copies.
    """
    shape = (*ref.shape[:-1], row_bytes)
    return memory_view(ref.owner, ref.ptr, shape, (*ref.strides[:-1], 1), dtypes.UINT8)


def packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the byte strides of a C-contiguous array."""
    strides = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def describe(obj: Any) -> ArrayRef | None:
    """Return what `obj` is as an array, or None where it is none.

    Raises
    ------
    TypeError
        For an array whose dtype or memory layout has no strided description, with the reason.
    """
    if isinstance(obj, ArrayRef):
        return obj
    if isinstance(obj, type):  # np.ndarray itself has __dlpack__, unbound
        return None
    kind = type(obj)
    reader = _READERS.get(kind)
    if reader is None:
        reader = _reader_for(kind)
        if reader is None:
            return None
        _READERS[kind] = reader
    return reader(obj)


def _reader_for(kind: type) -> Callable[[Any], ArrayRef | None] | None:
    for base in kind.__mro__:
        reader = _BY_MODULE.get(base.__module__.partition(".")[0])
        if reader is not None and not issubclass(kind, (np.generic, np.dtype)):
            return reader
    if any(
        hasattr(kind, name)
        for name in ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
    ):
        return _from_protocol
    # An interface may be set on the instance alone; such objects are looked at each time.
    return None if issubclass(kind, np.generic) else _from_protocol


def _from_numpy(obj: Any) -> ArrayRef | None:
    if not isinstance(obj, np.ndarray):
        return None
    if isinstance(obj, np.ma.MaskedArray):
        raise UnusableArray("be an array without a mask", "a masked array")
    return ArrayRef(
        obj.view(np.ndarray),  # a subclass may index and multiply in ways of its own
        obj.__array_interface__["data"][0],
        obj.shape,
        obj.strides,
        obj.dtype,
        CPU,
        obj.flags.writeable,
        "numpy",
    )


def _from_cupy(obj: Any) -> ArrayRef | None:
    data: Any = getattr(obj, "data", None)
    if not hasattr(data, "ptr"):
        return None
    return ArrayRef(
        obj,
        data.ptr,
        obj.shape,
        obj.strides,
        obj.dtype,
        DeviceId("cuda", data.device_id),
        True,
        "cupy",
    )


_TORCH_DTYPES: dict[Any, DType] = {}


def _torch_dtype(dtype: Any) -> DType:
    found = _TORCH_DTYPES.get(dtype)
    if found is None:
        found = dtypes.named(str(dtype).partition(".")[2])
        if found is None:
            raise UnusableArray("have a dtype that NumPy or ml_dtypes has too", dtype)
        _TORCH_DTYPES[dtype] = found
    return found


def _from_torch(obj: Any) -> ArrayRef | None:
    if not hasattr(obj, "data_ptr"):
        return None
    device = obj.device
    if device.type not in ("cpu", "cuda") or str(obj.layout) != "torch.strided":
        got = f"a {obj.layout} tensor on {device}"
        raise UnusableArray("be a strided torch tensor on cpu or cuda", got)
    if obj.is_neg() or obj.is_conj():
        got = "a view that negates or conjugates when it is read"
        raise UnusableArray("lie in memory as its values are (see torch.resolve_neg)", got)
    dtype = _torch_dtype(obj.dtype)
    return ArrayRef(
        # An alias: `obj.data = other` and `obj.set_(other)` leave it with its storage.
        obj.detach(),
        obj.data_ptr(),
        tuple(obj.shape),
        tuple(step * dtype.itemsize for step in obj.stride()),
        dtype,
        CPU if device.type == "cpu" else DeviceId("cuda", device.index or 0),
        True,
        "torch",
    )


def _from_jax(obj: Any) -> ArrayRef | None:
    if not hasattr(obj, "__dlpack__"):
        return None
    try:
        platforms = {device.platform for device in obj.devices()}
    except Exception as error:
        raise UnusableArray("be a concrete JAX array", "a tracer") from error
    if platforms != {"cpu"}:
        return _as_read_only(_from_protocol(obj), "jax")
    host = np.asarray(obj)
    return _as_read_only(_from_numpy(host), "jax")


def _as_read_only(ref: ArrayRef | None, framework: str) -> ArrayRef | None:
    """JAX arrays are immutable, whatever their export says."""
    return None if ref is None else replace(ref, writable=False, framework=framework)


def _from_protocol(obj: Any) -> ArrayRef | None:
    failure: Exception | None = None
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        try:
            return _from_dlpack(obj)
        except Exception as error:  # an exporter may refuse a dtype that its interface still has
            failure = error
    for name, on_device in (("__cuda_array_interface__", True), ("__array_interface__", False)):
        interface = getattr(obj, name, None)
        if interface is not None:
            return _from_interface(obj, interface, on_device)
    if failure is not None:
        got = f"an array that cannot be exported ({failure})"
        raise UnusableArray("be an array that its framework exports", got) from failure
    return None


def _from_interface(obj: Any, interface: dict[str, Any], on_device: bool) -> ArrayRef:
    try:
        shape = tuple(operator.index(extent) for extent in interface["shape"])
        ptr, read_only = interface["data"]
        dtype = np.dtype(interface["typestr"])
        strides = interface.get("strides")
        if strides is None:
            strides = packed_strides(shape, dtype.itemsize)
        strides = tuple(operator.index(step) for step in strides)
        ptr = operator.index(ptr or 0)
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableArray("have a complete array interface", f"{error!r}") from error
    if len(strides) != len(shape):
        raise UnusableArray("have as many strides as axes", f"{len(strides)} for {len(shape)}")
    # torch shows bfloat16 as "<f2" or "<V2" in some versions: the object's own dtype is right, if
    # it speaks of elements of that size.
    own = getattr(obj, "dtype", None)
    named = dtypes.named(str(own).rpartition(".")[2]) if own is not None else None
    if named is not None and named.itemsize == dtype.itemsize:
        dtype = named
    device = _device_of_interface(obj, ptr) if on_device else CPU
    return ArrayRef(obj, ptr, shape, strides, dtype, device, not read_only, "interface")


#: Asks the driver which device owns a pointer; set by `backends`, which knows who can ask.
pointer_device: Callable[[int], int] | None = None


def _device_of_interface(obj: Any, ptr: int) -> DeviceId | None:
    if not ptr:
        return None
    if hasattr(obj, "__dlpack_device__"):
        return DeviceId("cuda", int(obj.__dlpack_device__()[1]))
    return DeviceId("cuda", pointer_device(ptr) if pointer_device is not None else 0)


def _from_dlpack(obj: Any) -> ArrayRef:
    tensor = _dlpack.read(obj)
    return ArrayRef(
        (obj, tensor.capsule),
        tensor.ptr,
        tensor.shape,
        tensor.strides or packed_strides(tensor.shape, tensor.dtype.itemsize),
        tensor.dtype,
        CPU if tensor.cuda_device is None else DeviceId("cuda", tensor.cuda_device),
        not tensor.read_only,
        "dlpack",
    )


_BY_MODULE: dict[str, Callable[[Any], ArrayRef | None]] = {
    "numpy": _from_numpy,
    "cupy": _from_cupy,
    "torch": _from_torch,
    "jax": _from_jax,
    "jaxlib": _from_jax,
}
_READERS: dict[type, Callable[[Any], ArrayRef | None]] = {np.ndarray: _from_numpy}


def framework_of(obj: Any) -> str | None:
    """Return ``torch`` or ``cupy`` for an array of theirs that `describe` has seen, else None."""
    return _LOOKED_AT.get(_READERS.get(type(obj)))


_LOOKED_AT: dict[object, str] = {_from_torch: "torch", _from_cupy: "cupy"}


# ---------------------------------------------------------------- new arrays


def in_framework_of(array: np.ndarray[Any, Any], like: ArrayRef) -> Any:
    """Return a new host array as the framework of `like` has it; memory is shared, not copied.

    Arrays known by a protocol alone (DLPack, array interface) get NumPy arrays.
    """
    module = sys.modules.get(like.framework)
    if like.framework == "torch" and module is not None:
        unsigned = array.view(f"i{array.dtype.itemsize}") if _needs_view(array.dtype) else array
        tensor = module.from_numpy(unsigned)
        return tensor.view(getattr(module, array.dtype.name)) if unsigned is not array else tensor
    if like.framework == "jax" and module is not None:
        return module.numpy.asarray(array)
    return array


def _needs_view(dtype: DType) -> bool:
    """Whether torch.from_numpy does not know the dtype."""
    return dtype.kind == "V" or dtype in (
        dtypes.BFLOAT16,
        dtypes.FLOAT8_E4M3,
        dtypes.FLOAT8_E5M2,
    )
