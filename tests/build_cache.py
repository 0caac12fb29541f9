"""A folder of builds that other processes find: each is named by all that it is made of."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def path_of(name: str, *made_of: object) -> Path:
    """Return where a build belongs.

    Parameters
    ----------
    name : str
        What the file's name begins with; it ends as this does.
    *made_of : object
        All that decides what the build is.
    """
    folder = os.environ.get("CUPY_MLA_BUILD_CACHE")
    if folder is None:
        folder = os.path.join(tempfile.gettempdir(), f"cupy_mla_builds_{os.getuid()}")
    path = Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()
    stem, ending = os.path.splitext(name)
    return path / f"{stem}_{key[:24]}{ending}"
