"""The version, its only home: packaging metadata and `cupy_mla.__version__` both read it here."""

__version__ = "0.1.0"
