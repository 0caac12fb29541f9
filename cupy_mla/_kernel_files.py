"""The CUDA source files, wherever this copy of the package keeps them.

A wheel carries them inside the package, as ``cupy_mla/kernels_src``. A checkout, an unpacked sdist
and an editable install have them beside the package, as ``kernels_src``. Files are named by their
path below that directory, with forward slashes: ``common/rounding.cuh``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

_PACKAGE_DIR = Path(__file__).resolve().parent
_CANDIDATES = (_PACKAGE_DIR / "kernels_src", _PACKAGE_DIR.parent / "kernels_src")
_SUFFIXES = frozenset({".cu", ".cuh", ".h"})


def _root() -> Path:
    for candidate in _CANDIDATES:
        if candidate.is_dir():
            return candidate
    looked = " and ".join(str(candidate) for candidate in _CANDIDATES)
    raise FileNotFoundError(
        f"the CUDA sources of cupy_mla are missing, looked in {looked}; this installation is "
        "incomplete, install cupy-mla again"
    )


def names() -> tuple[str, ...]:
    """List the kernel source files.

    Returns
    -------
    tuple of str
        Paths relative to the source directory with forward slashes, sorted.

    Raises
    ------
    FileNotFoundError
        When the source directory is neither in the package nor beside it.

    Examples
    --------
    >>> from cupy_mla import _kernel_files
    >>> all(name.endswith((".cu", ".cuh", ".h")) for name in _kernel_files.names())
    True
    """
    root = _root()
    found = (path.relative_to(root) for path in root.rglob("*") if path.suffix in _SUFFIXES)
    return tuple(sorted(path.as_posix() for path in found))


def read(name: str) -> str:
    """Return the text of one kernel source file.

    Parameters
    ----------
    name : str
        A path as `names` lists it.

    Returns
    -------
    str
        The text, with every line end turned into a line feed: the same on all platforms.

    Raises
    ------
    ValueError
        When `name` is absolute, contains ``..`` or a backslash, or is not in normal form.
    FileNotFoundError
        When there is no such file, or no source directory at all.
    """
    pure = PurePosixPath(name)
    parts = name.split("/")
    if pure.is_absolute() or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            "read: name must be a relative path below kernels_src with forward slashes and no "
            f"'.' or '..', got {name!r}"
        )
    path = _root() / pure
    if pure.suffix not in _SUFFIXES or not path.is_file():
        raise FileNotFoundError(f"read: name must be one of {', '.join(names())}, got {name!r}")
    return path.read_text(encoding="utf-8")


def digest() -> str:
    """Return a fingerprint of all kernel sources.

    Returns
    -------
    str
        The SHA-256 of every name and text, as 64 hexadecimal digits. It changes when any file is
        added, removed, renamed or edited, and it does not depend on where the files lie.
    """
    total = hashlib.sha256()
    for name in names():
        for text in (name, read(name)):
            data = text.encode()
            total.update(len(data).to_bytes(8, "little"))
            total.update(data)
    return total.hexdigest()
