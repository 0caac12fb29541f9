"""The fewest bytes that an operation has to move: inputs read once, outputs written once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from cupy_mla.dtypes import DType
from cupy_mla.layouts import CacheLayout

Kind = Literal["inputs", "outputs", "slots", "scales"]
#: What a part can be: rows, tables and weights; results; indices of any sort; scales of layers.
KINDS: tuple[Kind, ...] = ("inputs", "outputs", "slots", "scales")


@dataclass(frozen=True)
class Part:
    """One array, or one part of the rows of an array, that is moved.

    Attributes
    ----------
    name : str
    kind : {"inputs", "outputs", "slots", "scales"}
        Outputs are written, everything else is read.
    dtype : numpy.dtype
    elements : int
    """

    name: str
    kind: Kind
    dtype: DType
    elements: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Traffic:
    """All that one call of an operation moves.

    Attributes
    ----------
    parts : tuple of Part

    Examples
    --------
    >>> import numpy as np
    >>> t = Traffic.of(
    ...     Part("x", "inputs", np.dtype("f4"), 10), Part("y", "outputs", np.dtype("u1"), 10))
    >>> t.read, t.written, t.total
    (40, 10, 50)
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, *parts: Part | Iterable[Part]) -> Traffic:
        """Join parts and groups of parts; those without elements are left out."""
        flat: list[Part] = []
        for part in parts:
            flat += [part] if isinstance(part, Part) else list(part)
        return cls(tuple(part for part in flat if part.elements))

    @property
    def read(self) -> int:
        """Bytes that are read."""
        return sum(part.nbytes for part in self.parts if part.kind != "outputs")

    @property
    def written(self) -> int:
        """Bytes that are written."""
        return sum(part.nbytes for part in self.parts if part.kind == "outputs")

    @property
    def total(self) -> int:
        """Bytes that are read or written."""
        return sum(part.nbytes for part in self.parts)

    def by_kind(self) -> dict[str, int]:
        """Return bytes of each kind; 0 where there is none."""
        return {
            kind: sum(part.nbytes for part in self.parts if part.kind == kind) for kind in KINDS
        }

    def by_dtype(self) -> dict[str, int]:
        """Return bytes of each element type that occurs."""
        found: dict[str, int] = {}
        for part in self.parts:
            found[part.dtype.name] = found.get(part.dtype.name, 0) + part.nbytes
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "read": self.read,
            "written": self.written,
            "total": self.total,
            "kinds": self.by_kind(),
            "dtypes": self.by_dtype(),
        }


def cache_rows(layout: CacheLayout, rows: int, kind: Kind, name: str = "rows") -> list[Part]:
    """Return the parts of rows of a cache, each of its own element type.

    Parameters
    ----------
    layout : CacheLayout
    rows : int
        Rows of all layers together.
    kind : {"inputs", "outputs"}
        Whether they are read or written.
    name : str
        Put in front of the names of the parts.
    """
    return [
        Part(f"{name}.{field.name}", kind, field.dtype, rows * field.count)
        for field in layout.fields
    ]
