"""Exceptions of cupy_mla and the one form in which bad input is reported."""

from __future__ import annotations

from numbers import Integral
from typing import NoReturn

import numpy as np

__all__ = ["BackendUnavailable", "CompileError"]


class CompileError(RuntimeError):
    """A kernel failed to compile; the text names kernel, layout, architecture and the log."""


class BackendUnavailable(RuntimeError):
    """A backend (CUDA, CuPy, NVRTC) is missing; the text says what installs it."""


#: Bits of the longest integer that a message prints.
_LONGEST = 128


def _text(operation: str, argument: str, expected: str, got: object) -> str:
    if isinstance(got, int) and got.bit_length() > _LONGEST:
        got = f"an integer of {got.bit_length()} bits"
    return f"{operation}: {argument} must {expected}, got {got}"


def reject_value(operation: str, argument: str, expected: str, got: object) -> NoReturn:
    """Raise the ValueError ``operation: argument must expected, got got``."""
    raise ValueError(_text(operation, argument, expected, got))


def reject_type(operation: str, argument: str, expected: str, got: object) -> NoReturn:
    """Raise the TypeError ``operation: argument must expected, got got``."""
    raise TypeError(_text(operation, argument, expected, got))


def check_flag(operation: str, argument: str, value: object) -> bool:
    """Return a bool of Python or NumPy as Python's; a text such as "no" is none, nor an array."""
    if not isinstance(value, (bool, np.bool_)):
        reject_type(operation, argument, "be a bool", type(value).__name__)
    return bool(value)


def check_integer(operation: str, argument: str, value: object, least: int | None = None) -> int:
    """Return `value` as an int that 64 bits hold, of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        reject_type(operation, argument, "be an integer", type(value).__name__)
    number = int(value)
    if least is not None and number < least:
        reject_value(operation, argument, f"be at least {least}", number)
    if not -(2**63) <= number < 2**63:
        reject_value(operation, argument, "be an integer of 64 bits", number)
    return number
