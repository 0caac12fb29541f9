"""What users do without this library: the same work by operations of torch, one after the other.

`torch` is an argument of every function: nothing here imports it. The functions run on host
tensors too, which is how tests compare them with the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from cupy_mla.layouts import CacheLayout

#: Largest magnitude of each fp8 format, by the name that torch and ml_dtypes give it.
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_LEAST_SCALE = 2.0**-126


def tensor(torch: ModuleType, array: Any) -> Any:
    """Return a tensor over the memory of a C-contiguous NumPy or CuPy array.

    Parameters
    ----------
    torch : module
    array : array
        Of any dtype of ml_dtypes.
    """
    raw = array.view(np.uint8) if array.ndim else array.reshape(1).view(np.uint8)
    # Both frameworks show memory by an interface that torch takes without a copy.
    seen = torch.as_tensor(raw, device=None if isinstance(array, np.ndarray) else "cuda")
    viewed = seen.view(getattr(torch, array.dtype.name))
    return viewed if array.ndim else viewed.reshape(())


def tensors(torch: ModuleType, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tensor over each array."""
    return {name: tensor(torch, array) for name, array in arrays.items()}


def to_fp8(torch: ModuleType, values: Any, name: str) -> Any:
    """Return the codes of float32 values, saturated."""
    largest = _LARGEST[name]
    return values.clamp(-largest, largest).to(getattr(torch, name)).view(torch.uint8)


def encode_rows(torch: ModuleType, rows: Any, layout: CacheLayout, scale: Any) -> Any:
    """Return the bytes ``[n, row_bytes]`` of rows ``[n, R + P]``.

    Parameters
    ----------
    torch : module
    rows : tensor
    layout : CacheLayout
    scale : tensor of one float32, or None
        The layer's scale where the format needs one.
    """
    if layout.needs_scale:
        return to_fp8(torch, rows.float() / scale, layout.code_dtype.name)
    if not layout.tile:
        return rows.contiguous().view(torch.uint8)
    latent = rows[:, : layout.kv_lora_rank].float().reshape(len(rows), -1, layout.tile)
    scales = (latent.abs().amax(dim=-1) / 448.0).clamp(min=_LEAST_SCALE)
    parts = {
        "nope": to_fp8(torch, latent / scales[..., None], layout.code_dtype.name),
        "scale": scales,
        "rope": rows[:, layout.kv_lora_rank :].contiguous(),
    }
    stored = [parts[field.name].view(torch.uint8) for field in layout.fields]
    return torch.cat([part.reshape(len(rows), -1) for part in stored], dim=1)


def decode_rows(torch: ModuleType, stored: Any, layout: CacheLayout, scale: Any) -> Any:
    """Return the float32 rows ``[n, R + P]`` of bytes ``[n, row_bytes]``."""
    if layout.needs_scale:
        return stored.view(getattr(torch, layout.code_dtype.name)).float() * scale
    if not layout.tile:
        return stored.view(getattr(torch, layout.storage_dtype.name)).float()
    parts = {
        field.name: stored[:, field.offset : field.end]
        .contiguous()
        .view(getattr(torch, field.dtype.name))
        .float()
        for field in layout.fields
    }
    latent = parts["nope"].reshape(len(stored), -1, layout.tile) * parts["scale"][..., None]
    return torch.cat([latent.reshape(len(stored), -1), parts["rope"]], dim=1)


def store_rows(cache: Any, slots: Any, stored: Any) -> None:
    """Put the bytes of rows in a cache ``[num_blocks, block_size, row_bytes]`` of uint8."""
    cache.reshape(-1, cache.shape[-1]).index_put_((slots,), stored)


def rms_norm(rows: Any, weight: Any, eps: float) -> Any:
    """Norm rows as models do without a kernel of their own: in float32, rounded at the end."""
    x = rows.float()
    return (x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(rows.dtype)


def layer_norm(torch: ModuleType, rows: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Norm rows by torch's own kernel, in float32, rounded at the end."""
    normed = torch.nn.functional.layer_norm(
        rows.float(), rows.shape[-1:], weight.float(), bias.float(), eps
    )
    return normed.to(rows.dtype)


def rotate(torch: ModuleType, rows: Any, cos_sin: Any, *, is_neox: bool = False) -> Any:
    """Rotate rows ``[..., P]`` by table rows ``[..., P]``, in float32, rounded at the end."""
    x, table = rows.float(), cos_sin.float()
    half = x.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    if is_neox:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(rows.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(rows.dtype)


def index_key(torch: ModuleType, rows: Any) -> tuple[Any, Any]:
    """Quantise rows ``[..., 128]`` by a power of two each; return codes and scales."""
    x = rows.float()
    exact = x.abs().amax(dim=-1).clamp(min=1e-4) / 448.0
    scales = torch.exp2(torch.ceil(torch.log2(exact)))
    return to_fp8(torch, x / scales[..., None], "float8_e4m3fn"), scales
