"""Reading the tensor out of a DLPack capsule, for every dtype, without consuming it.

NumPy's own importer knows no bfloat16 and CuPy's no fp8; the layout of the capsule is fixed by
dlpack.h, version 1.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from . import dtypes
from .dtypes import DType


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    ]


_DL_READ_ONLY = 1
_DL_CPU = (1, 3)  # kDLCPU, kDLCUDAHost
_DL_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
_DL_NAMES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype = ctypes.c_int
_capsule_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


class DLPackTensor(NamedTuple):
    """What a capsule says; strides are in bytes, None where the tensor is packed."""

    capsule: Any
    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    cuda_device: int | None
    read_only: bool


def read(obj: Any) -> DLPackTensor:
    """Read the capsule that `obj` exports.

    The capsule is not consumed: whoever holds it keeps the memory alive, and its own destructor
    gives the memory back to the exporter.

    Raises
    ------
    TypeError
        For a dtype or device that has no equivalent here.
    """
    try:
        capsule = obj.__dlpack__(max_version=(1, 0))
    except TypeError:  # an exporter from before DLPack 1.0
        capsule = obj.__dlpack__()
    read_only = False
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        address = _capsule_pointer(capsule, b"dltensor_versioned")
        managed = _DLManagedTensorVersioned.from_address(address)
        read_only = bool(managed.flags & _DL_READ_ONLY)
        tensor = managed.dl_tensor
    else:
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    key = (tensor.dtype.code, tensor.dtype.bits)
    dtype = dtypes.named(_DL_NAMES.get(key, ""))
    if dtype is None or tensor.dtype.lanes != 1:
        raise TypeError(f"DLPack type code {key[0]} with {key[1]} bits is not known")
    kind = tensor.device.device_type
    if kind not in _DL_CPU + _DL_CUDA:
        raise TypeError(f"DLPack device type {kind} is neither CPU nor CUDA")
    axes = range(tensor.ndim)
    return DLPackTensor(
        capsule,
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[axis] for axis in axes),
        tuple(tensor.strides[axis] * dtype.itemsize for axis in axes) if tensor.strides else None,
        dtype,
        tensor.device.device_id if kind in _DL_CUDA else None,
        read_only,
    )
