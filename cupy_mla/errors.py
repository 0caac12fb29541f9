"""Exceptions of cupy_mla and the one form in which bad input is reported."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["BackendUnavailable", "CompileError"]


class CompileError(RuntimeError):
    """A kernel failed to compile; the text names kernel, layout, architecture and the log."""


class BackendUnavailable(RuntimeError):
    """A backend (CUDA, CuPy, NVRTC) is missing; the text says what installs it."""


def _text(operation: str, argument: str, expected: str, got: object) -> str:
    return f"{operation}: {argument} must {expected}, got {got}"


def reject_value(operation: str, argument: str, expected: str, got: object) -> NoReturn:
    """Raise the ValueError ``operation: argument must expected, got got``."""
    raise ValueError(_text(operation, argument, expected, got))


def reject_type(operation: str, argument: str, expected: str, got: object) -> NoReturn:
    """Raise the TypeError ``operation: argument must expected, got got``."""
    raise TypeError(_text(operation, argument, expected, got))
