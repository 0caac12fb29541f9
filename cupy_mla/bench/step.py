"""A step as models run it: a product makes the rows, they are stored, and attention reads them.

All of it is one graph. Rows are stored by this library, by the framework's own operations
(division, cast, scatter), or not at all: that is what the step costs anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupy_mla import GroupedCacheWriter, dtypes
from cupy_mla.dtypes import DType

from . import pipelines, rotation
from .baselines import Baselines
from .figures import Figures
from .host_calls import TorchArrays
from .machine import Machine
from .measure import Bench
from .operations import insert
from .problem import Array, Arrays, Call, Problem, new_cache, random_values, scales_of, slots_of

#: Width of the layer's input, DeepSeek's.
HIDDEN = 7168
NOTHING, OURS, FRAMEWORK = "nothing stored", "cupy_mla", "framework"


@dataclass(frozen=True)
class StepRow:
    """The device time of a step, by what stores its rows.

    Attributes
    ----------
    problem : Problem
    framework : str
        Whose product makes the rows.
    figures : dict of str to Figures
        Microseconds a step.
    """

    problem: Problem
    framework: str
    figures: dict[str, Figures]

    def added(self, name: str) -> float | None:
        """Return the microseconds that storing adds to a step; None where it was not measured."""
        found = self.figures.get(name)
        return None if found is None else found.median - self.figures[NOTHING].median

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "format": self.problem.layout.name,
            "input": _input(self.problem, self.framework).name,
            "layers": self.problem.layers,
            "tokens": self.problem.tokens,
            "pattern": self.problem.pattern,
            "framework": self.framework,
            "steps": {
                name: {"us": figures.to_dict(), "added_us": self.added(name)}
                for name, figures in self.figures.items()
            },
        }


def _input(problem: Problem, framework: str) -> DType:
    """Return what the product makes: CuPy multiplies no bfloat16."""
    return problem.input_dtype if framework == "torch" else dtypes.FLOAT16


def measure(problem: Problem, machine: Machine, bench: Bench) -> StepRow | None:
    """Measure a step; None where no framework at hand multiplies rows of this format."""
    framework = "CuPy" if machine.torch is None else "torch"
    if _input(problem, framework) not in problem.layout.input_dtypes:
        return None
    moved = insert.traffic(problem)
    product = HIDDEN * (problem.tokens + problem.layers * moved_width(problem)) * 2
    turns = rotation.choose(moved.total + product, machine.timer.l2_bytes, cold=True)
    turns = replace(turns, buffers=min(turns.buffers, 8))  # each has weights of its own
    turns = replace(turns, calls=turns.buffers)
    with machine.timer.scope():
        steps = [_steps(problem, machine, framework) for _ in range(turns.buffers)]
        machine.timer.synchronize()
    timed = bench.time if machine.torch is None else bench.time_torch
    figures = {name: timed([step[name] for step in steps], turns) for name in steps[0]}
    return StepRow(problem, framework, figures)


def moved_width(problem: Problem) -> int:
    """Return the elements of a row."""
    return problem.layout.kv_lora_rank + problem.layout.rope_dim


def _steps(problem: Problem, machine: Machine, framework: str) -> dict[str, Call]:
    """Return a step with each way to store its rows."""
    torch = machine.torch
    arrays: Arrays = machine.arrays
    baselines: Baselines = machine.baselines
    if torch is not None:
        arrays, baselines = TorchArrays(torch, machine.torch_device), machine.torch_baselines
    dtype = _input(problem, framework)
    width = problem.layers * moved_width(problem)
    hidden = arrays.to_device(_scaled(random_values((problem.tokens, HIDDEN), dtype)))
    weight = arrays.to_device(random_values((HIDDEN, width), dtype, seed=1))
    rows = arrays.to_device(np.zeros((problem.tokens, width), dtype))
    slots = arrays.to_device(slots_of(problem))
    caches = [new_cache(problem, arrays) for _ in range(problem.layers)]
    split = insert.split(rows.reshape(problem.tokens, problem.layers, -1))
    store = GroupedCacheWriter(caches, problem.layout, scales_of(problem)).bind(*split, slots)
    with machine.timer.scope():
        read = baselines.read_rows(
            insert.caches_at(problem, caches), insert.address_of(slots), problem.tokens
        )

    def step(stored: Call | None) -> Call:
        def run() -> None:
            if torch is None:
                hidden.dot(weight, out=rows)
            else:
                torch.matmul(hidden, weight, out=rows)
            if stored is not None:
                stored()
            read()

        return run

    steps = {NOTHING: step(None), OURS: step(store)}
    others = _framework_store(problem, machine, rows, slots, caches)
    if others is not None:
        steps[FRAMEWORK] = step(others)
    return steps


def _scaled(values: Array) -> Array:
    """Make values so small that the product neither overflows nor saturates much."""
    return (values.astype(np.float32) / np.float32(HIDDEN)).astype(values.dtype)


def _framework_store(
    problem: Problem, machine: Machine, rows: Any, slots: Any, caches: list[Any]
) -> Call | None:
    """Return a store by the framework's own operations, a layer at a time."""
    torch, layout = machine.torch, problem.layout
    by_layer = rows.reshape(problem.tokens, problem.layers, -1)
    store: Callable[[int], None]
    if torch is None:
        if layout.is_fp8:
            return None  # CuPy has no such cast
        flat = [cache.reshape(-1, layout.width) for cache in caches]

        def store(layer: int) -> None:
            flat[layer][slots] = by_layer[:, layer]

    else:
        found = scales_of(problem) or [1.0] * problem.layers
        factors = torch.tensor(found, dtype=torch.float32, device=rows.device)
        raw = [cache.view(torch.uint8) for cache in caches]

        def store(layer: int) -> None:
            stored = pipelines.encode_rows(torch, by_layer[:, layer], layout, factors[layer])
            pipelines.store_rows(raw[layer], slots, stored)

    def all_layers() -> None:
        for layer in range(problem.layers):
            store(layer)

    return all_layers
