"""What others do, where they are installed: vLLM, FlashInfer, SGLang, torch, our own Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import pipelines
from .machine import Machine, guarded, optional
from .problem import KV_LORA_RANK, Alternative, Call, Instance, Problem, scales_of

#: Modules that register vLLM's operations with torch; which one depends on its version.
_VLLM_MODULES = ("vllm._C", "vllm._C_stable_libtorch")


class _Step:
    """The tensors of an insert: a layer's rows are views of one projection."""

    def __init__(self, problem: Problem, instance: Instance, torch: ModuleType) -> None:
        projection = pipelines.tensor(torch, instance.arrays["projection"])
        self.slots = pipelines.tensor(torch, instance.arrays["slots"])
        self.caches = [pipelines.tensor(torch, cache) for cache in instance.arrays["caches"]]
        self.layout = problem.layout
        self.block_size = problem.block_size
        self.layers = range(problem.layers)
        self.rows = [projection[:, layer] for layer in self.layers]
        self.kv_c = [rows[:, :KV_LORA_RANK] for rows in self.rows]
        self.k_pe = [rows[:, KV_LORA_RANK:] for rows in self.rows]
        by_layer = projection.transpose(0, 1)
        self.all_kv_c, self.all_k_pe = by_layer[..., :KV_LORA_RANK], by_layer[..., KV_LORA_RANK:]
        factors = scales_of(problem) or [1.0] * problem.layers
        self.scales = torch.tensor(factors, dtype=torch.float32, device=projection.device)
        self.torch = torch


def add_insert_peers(problem: Problem, instance: Instance, machine: Machine) -> None:
    """Add what other libraries do with the same rows, slots and caches."""
    torch = machine.torch
    if torch is None:
        return
    step = _Step(problem, instance, torch)
    makers: dict[str, Callable[[_Step, Machine], Alternative | None]] = {
        "torch": _torch,
        "vLLM": _vllm_per_layer,
        "vLLM grouped": _vllm_grouped,
        "FlashInfer": _flashinfer,
        "SGLang": _sglang,
    }
    for name, maker in makers.items():
        if name in machine.notes:
            continue
        alternative = guarded(machine.notes, name, functools.partial(maker, step, machine))
        if alternative is not None:
            instance.alternatives[name] = alternative


def add_triton(name: str, problem: Problem, instance: Instance, machine: Machine) -> None:
    """Add what a kernel of Triton does with the same buffers.

    Parameters
    ----------
    name : str
        Function of `triton_ways`.
    problem : Problem
    instance : Instance
    machine : Machine
        With torch.
    """
    if "Triton" in machine.notes:
        return
    ways = optional(f"{__package__}.triton_ways", machine.notes, "Triton")
    if ways is None:
        return
    make = functools.partial(getattr(ways, name), problem, instance, machine.torch)
    alternative = guarded(machine.notes, "Triton", make)
    if alternative is not None:
        instance.alternatives["Triton"] = alternative


def _over_layers(step: _Step, call: Callable[[int], Any]) -> Call:
    def all_layers() -> None:
        for layer in step.layers:
            call(layer)

    return all_layers


def _torch(step: _Step, machine: Machine) -> Alternative:
    caches = [cache.view(step.torch.uint8) for cache in step.caches]

    def store(layer: int) -> None:
        scale = step.scales[layer]
        stored = pipelines.encode_rows(step.torch, step.rows[layer], step.layout, scale)
        pipelines.store_rows(caches[layer], step.slots, stored)

    # On a GPU torch multiplies by the reciprocal of 448, which may give another scale.
    return Alternative(_over_layers(step, store), exact=not step.layout.tile, torch=True)


def _vllm_ops(machine: Machine, torch: ModuleType, name: str) -> Any:
    notes: dict[str, str] = {}
    for module in _VLLM_MODULES:
        if optional(module, notes, "vLLM") is not None:
            return torch.ops._C_cache_ops
    machine.notes[name] = notes["vLLM"]
    return None


def _vllm_dtype(step: _Step) -> str:
    return step.layout.name if step.layout.is_fp8 else "auto"


def _vllm_per_layer(step: _Step, machine: Machine) -> Alternative | None:
    ops = _vllm_ops(machine, step.torch, "vLLM")
    if ops is None:
        return None
    insert = ops.concat_and_cache_mla
    name = _vllm_dtype(step)

    def store(layer: int) -> None:
        arguments = (step.kv_c[layer], step.k_pe[layer], step.caches[layer], step.slots)
        insert(*arguments, name, step.scales[layer : layer + 1])

    # Scales inside rows are rounded differently from version to version.
    return Alternative(_over_layers(step, store), exact=not step.layout.tile, torch=True)


def _vllm_grouped(step: _Step, machine: Machine) -> Alternative | None:
    ops = _vllm_ops(machine, step.torch, "vLLM grouped")
    if ops is None:
        return None
    torch, first = step.torch, step.caches[0]
    insert, name = ops.concat_and_cache_mla_grouped, _vllm_dtype(step)
    addresses = [cache.data_ptr() for cache in step.caches]
    pointers = torch.tensor(addresses, dtype=torch.int64, device=first.device)
    slots = step.slots.unsqueeze(0).expand(len(addresses), -1)
    kv_c, k_pe = step.all_kv_c.contiguous(), step.all_k_pe.contiguous()
    geometry = (step.block_size, first.stride(0), first.stride(1))
    return Alternative(
        lambda: insert(kv_c, k_pe, pointers, slots, *geometry, step.scales, name),
        exact=not step.layout.tile,
        torch=True,
    )


def _flashinfer(step: _Step, machine: Machine) -> Alternative | None:
    """Append to FlashInfer's caches, which keep the two parts of a row apart."""
    if step.layout.is_fp8 or step.layout.name == "float32":
        return None
    page = optional("flashinfer.page", machine.notes, "FlashInfer")
    if page is None:
        return None
    torch, count = step.torch, len(step.slots)
    device, dtype = step.slots.device, step.rows[0].dtype
    shape = step.caches[0].shape[:2]
    latent = [torch.empty(*shape, KV_LORA_RANK, dtype=dtype, device=device) for _ in step.layers]
    rope_dim = step.k_pe[0].shape[-1]
    rope = [torch.empty(*shape, rope_dim, dtype=dtype, device=device) for _ in step.layers]
    # Each token is a request of one page: any slot can be written so.
    requests = torch.arange(count + 1, dtype=torch.int32, device=device)
    pages = (step.slots // step.block_size).int()
    rows = (step.slots % step.block_size).int()

    def append(layer: int) -> None:
        page.append_paged_mla_kv_cache(
            step.kv_c[layer],
            step.k_pe[layer],
            requests[:count],
            rows,
            latent[layer],
            rope[layer],
            pages,
            requests,
            rows + 1,
        )

    return Alternative(_over_layers(step, append), exact=False, torch=True)


def _sglang(step: _Step, machine: Machine) -> Alternative | None:
    if step.layout.is_fp8:
        return None
    utils = optional("sglang.srt.mem_cache.utils", machine.notes, "SGLang")
    if utils is None:
        return None
    insert = utils.set_mla_kv_buffer_triton
    buffers = [cache.reshape(-1, 1, cache.shape[-1]) for cache in step.caches]

    def store(layer: int) -> None:
        insert(
            buffers[layer],
            step.slots,
            step.kv_c[layer].unsqueeze(1),
            step.k_pe[layer].unsqueeze(1),
        )

    return Alternative(_over_layers(step, store), torch=True)
