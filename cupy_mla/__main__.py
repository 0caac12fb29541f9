"""Run the command line as ``python -m cupy_mla``."""

from __future__ import annotations

import sys

from cupy_mla.cli import main

if __name__ == "__main__":
    sys.exit(main())
