"""The operations that are measured, a module each."""

from __future__ import annotations

from . import context, convert, gather, insert, norm_rope, query

__all__ = ["OPERATIONS"]

#: By the name that the command line takes.
OPERATIONS = {
    module.OPERATION.name: module.OPERATION
    for module in (insert, context, norm_rope, query, gather, convert)
}
