"""Results that are kept with the package: documents of ``cupy-mla bench --json``.

To store one, run ``cupy-mla bench ... --json cupy_mla/bench/results/NAME.json``; any name will do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupy_mla import _kernel_files

from .report import SCHEMA

#: Where results are kept.
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class StoredResult:
    """One document.

    Attributes
    ----------
    name : str
        Name of its file.
    document : dict
        What `report.Report.to_dict` made.
    """

    name: str
    document: dict[str, Any]

    @property
    def date(self) -> str:
        """When it was measured, as ISO 8601."""
        return str(self.document["date"])

    @property
    def gpu(self) -> str:
        """Name of the GPU."""
        return str(self.document["device"]).removeprefix("CUDA on ")

    @property
    def digest(self) -> str | None:
        """Fingerprint of the kernels that were measured; None where it was not known."""
        sources = self.document["machine"]["kernel_sources"]
        return None if sources is None else str(sources["sha256"])

    @property
    def is_current(self) -> bool:
        """Whether the kernels are still those that were measured."""
        return self.digest == _kernel_files.digest()


def load(folder: Path = RESULTS) -> list[StoredResult]:
    """Return the results of a folder, the oldest first; none where there is no such folder.

    Raises
    ------
    ValueError
        For a file that holds no measurement of this schema, or one whose bytes differed from the
        reference.
    """
    found = [_read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda result: result.date)


def _read(path: Path) -> StoredResult:
    document = json.loads(path.read_text(encoding="utf-8"))
    for key, wanted in (("schema", SCHEMA), ("timed", True), ("ok", True)):
        if document.get(key) != wanted:
            raise ValueError(f"load: {path.name}: {key} must be {wanted}, got {document.get(key)}")
    return StoredResult(path.name, document)


#: What makes two measurements of a kind the same; of those the newest counts.
_KEYS = {
    "rows": ("operation", "format", "input", "layers", "tokens", "block_size", "pattern", "cold"),
    "host": ("operation", "format", "layers", "tokens", "name", "arrays"),
    "compile": ("kernel",),
    "steps": ("format", "input", "layers", "tokens", "pattern", "framework"),
}


def newest(
    results: Iterable[StoredResult],
    kind: str,
    where: Callable[[dict[str, Any]], bool] = lambda entry: True,
) -> list[dict[str, Any]]:
    """Return the entries of one kind from several results, of equal ones the newest.

    Parameters
    ----------
    results : iterable of StoredResult
        The oldest first, as `load` returns them; of one GPU.
    kind : {"rows", "host", "compile", "steps"}
        Kernel times, host times of a call, first calls, whole steps.
    where : callable, optional
        Which entries are wanted.

    Examples
    --------
    >>> old, new = ({"kernel": "insert", "cold_s": cold} for cold in (0.9, 0.3))
    >>> files = [StoredResult(name, {"compile": [row]}) for name, row in (("a", old), ("b", new))]
    >>> newest(files, "compile")
    [{'kernel': 'insert', 'cold_s': 0.3}]
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in results:
        for entry in filter(where, result.document[kind]):
            found[tuple(entry[key] for key in _KEYS[kind])] = entry
    return list(found.values())
