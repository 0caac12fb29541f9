"""Which attention backend reads which cache: a table, open to more backends.

A backend of sparse MLA fixes three things at once: how the cache's rows lie, whether the query is
fp8, and as what the cache is handed over. `select_cache_policy` answers all three, or says what
to choose instead.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from .errors import check_flag, reject_type, reject_value
from .layouts import (
    LAYOUT_NAMES,
    CacheLayout,
    ScaleFormat,
    canonical_name,
    check_scale_format,
    get_layout,
)

__all__ = [
    "BackendRule",
    "CachePolicy",
    "register_backend",
    "registered_backends",
    "select_cache_policy",
    "unregister_backend",
]


@dataclass(frozen=True)
class BackendRule:
    """What one attention backend takes.

    Attributes
    ----------
    name : str
    architectures : tuple of int
        Major numbers of the compute capabilities it runs on: 9 is SM90, 10 is SM100.
    layouts : tuple of str
        Names of the cache layouts it reads.
    fp8_query : bool
        True where it takes one fp8 query ``[ql_nope | q_pe]``, False for the 16-bit pair.
    cache_needs_fp8_view : bool
        Whether it wants a byte cache seen as float8.
    scale_format : {"float32", "ue8m0"} or None
        What the scales inside rows should be; None where its layouts have none.
    exponent_only : tuple of int
        Major numbers of the capabilities on which it reads the scales' exponent alone, so that
        only powers of two come out right.
    """

    name: str
    architectures: tuple[int, ...]
    layouts: tuple[str, ...]
    fp8_query: bool
    cache_needs_fp8_view: bool = False
    scale_format: ScaleFormat | None = None
    exponent_only: tuple[int, ...] = ()

    def runs_on(self, architecture: int | None) -> bool:
        """Whether it runs on an architecture; None, an unknown one, counts as yes."""
        return architecture is None or architecture in self.architectures

    def reads_exponent_alone(self, architecture: int | None) -> bool:
        """Whether scales must be powers of two there; for None, wherever it runs."""
        if architecture is None:
            return set(self.architectures) <= set(self.exponent_only)
        return architecture in self.exponent_only


@dataclass(frozen=True)
class CachePolicy:
    """How the cache and the query of one attention backend go together.

    Attributes
    ----------
    backend : str
        Name of the backend.
    layout : CacheLayout
        How the cache's rows lie; taken wherever a ``kv_cache_dtype`` stands.
    fp8_query : bool
        What to give `fused_q` as ``quantize_mqa``.
    cache_needs_fp8_view : bool
        Whether the backend wants the byte cache seen as float8_e4m3fn.

    Examples
    --------
    >>> from cupy_mla import select_cache_policy
    >>> policy = select_cache_policy("fp8", "flashinfer_sparse")
    >>> policy.fp8_query, policy.cache_needs_fp8_view, policy.layout.row_bytes
    (True, True, 576)
    >>> policy.mqa_query("ql_nope", "mqa_q")
    'mqa_q'
    """

    backend: str
    layout: CacheLayout
    fp8_query: bool
    cache_needs_fp8_view: bool

    @property
    def scale_format(self) -> ScaleFormat | None:
        """How to round the scales inside rows; None where the layout has none."""
        return self.layout.scale_format

    def mqa_query(self, ql_nope: Any, mqa_q: Any) -> Any:
        """Return the query as the backend takes it.

        Parameters
        ----------
        ql_nope : array [T, H, R]
        mqa_q : array
            Third result of `fused_q` with ``quantize_mqa=policy.fp8_query``.

        Returns
        -------
        array or tuple of two arrays
            `mqa_q` itself, or ``(ql_nope, mqa_q)``.
        """
        return mqa_q if self.fp8_query else (ql_nope, mqa_q)


#: Largest major number that is taken: a capability like 90 in its place is a slip.
_LAST_MAJOR = 50

_lock = threading.Lock()
_rules: dict[str, BackendRule] = {
    rule.name: rule
    for rule in (
        BackendRule(
            name="flashinfer_sparse",
            architectures=(10,),
            layouts=("fp8_e4m3",),
            fp8_query=True,
            cache_needs_fp8_view=True,
        ),
        # On SM90 the scales are multiplied as bfloat16, on SM100 their exponent alone is used.
        # Powers of two come out exact everywhere.
        BackendRule(
            name="flashmla_sparse",
            architectures=(9, 10),
            layouts=("fp8_ds_mla",),
            fp8_query=False,
            scale_format="ue8m0",
            exponent_only=(10,),
        ),
        # FlashInfer has other kernels for SM120 and SM121. Their default, and what vLLM asks for
        # but for GLM, is to read exponents; only "arbitrary_fp32" multiplies a scale as it is.
        BackendRule(
            name="flashinfer_sparse_sm120",
            architectures=(12,),
            layouts=("fp8_ds_mla",),
            fp8_query=False,
            scale_format="ue8m0",
            exponent_only=(12,),
        ),
    )
}


def register_backend(
    name: str,
    *,
    architectures: Iterable[int],
    layouts: Iterable[str],
    fp8_query: bool,
    cache_needs_fp8_view: bool = False,
    scale_format: str | None = None,
    exponent_only: Iterable[int] = (),
    replace: bool = False,
) -> BackendRule:
    """Add an attention backend to the table that `select_cache_policy` looks into.

    Parameters
    ----------
    name : str
    architectures : iterable of int
        Major numbers of the compute capabilities it runs on, at least one: 9 is SM90, 10 is SM100.
    layouts : iterable of str
        Names of the cache layouts it reads, at least one, see `get_layout`. ``auto`` and
        ``indexer_fp8`` are none.
    fp8_query : bool
        Whether it takes one fp8 query ``[ql_nope | q_pe]`` instead of the 16-bit pair.
    cache_needs_fp8_view : bool
        Whether it wants a byte cache seen as float8.
    scale_format : {"float32", "ue8m0"}, optional
        What the scales inside rows should be where a caller has no wish; by default "ue8m0" where
        `exponent_only` has an entry, else "float32".
    exponent_only : iterable of int
        Major numbers of the capabilities on which it reads the scales' exponent alone, of those
        that it runs on.
    replace : bool
        Whether an entry of this name may be replaced.

    Returns
    -------
    BackendRule
        The entry. Where several fit, `select_cache_policy` takes the one registered first.

    Raises
    ------
    ValueError
        For an unknown layout, no layout or no architecture at all, a number that is no major
        number, one of `exponent_only` that is none of `architectures`, a name that is empty or
        taken, and for "float32" scales where the backend reads nothing but exponents.
    TypeError
        For a name that is no text, a flag that is no bool, and for what is no sequence of integers
        or of names.

    Examples
    --------
    >>> from cupy_mla import policy
    >>> rule = policy.register_backend(
    ...     "my_dense_mla", architectures=[9], layouts=["bfloat16"], fp8_query=False)
    >>> policy.select_cache_policy("bfloat16", "my_dense_mla").layout.row_bytes
    1152
    >>> policy.unregister_backend("my_dense_mla")
    """
    operation = "register_backend"
    if not isinstance(name, str):
        reject_type(operation, "name", "be a text", type(name).__name__)
    if not name.strip():
        reject_value(operation, "name", "be a text that is not empty", repr(name))
    chosen = None if scale_format is None else check_scale_format(operation, scale_format)
    rule = BackendRule(
        name,
        _majors(operation, "architectures", architectures),
        _layout_names(operation, layouts),
        check_flag(operation, "fp8_query", fp8_query),
        check_flag(operation, "cache_needs_fp8_view", cache_needs_fp8_view),
        chosen,
        _majors(operation, "exponent_only", exponent_only),
    )
    if not rule.architectures:
        reject_value(operation, "architectures", "hold at least one major number", "none")
    others = [major for major in rule.exponent_only if major not in rule.architectures]
    if others:
        expected = f"hold numbers of architectures ({', '.join(map(str, rule.architectures))})"
        reject_value(operation, "exponent_only", expected, ", ".join(map(str, others)))
    if chosen == "float32" and rule.reads_exponent_alone(None):
        reject_value(
            operation,
            "scale_format",
            'be "ue8m0" for a backend that reads the exponent of a scale alone on all its '
            "architectures",
            repr(chosen),
        )
    replaces = check_flag(operation, "replace", replace)
    with _lock:
        if name in _rules and not replaces:
            reject_value(operation, "name", "be new, or replace be true", repr(name))
        _rules[name] = rule
    return rule


def _entries(operation: str, argument: str, values: Any, what: str) -> tuple[Any, ...]:
    """Return what is in a sequence; a text is none."""
    expected = f"be a sequence of {what}"
    if isinstance(values, (str, bytes)):
        reject_type(operation, argument, expected, f"{type(values).__name__} {values!r}")
    # Tried rather than asked: an array without axes has __iter__, and no entries.
    with contextlib.suppress(TypeError):
        return tuple(values)
    reject_type(operation, argument, expected, type(values).__name__)


def _majors(operation: str, argument: str, values: Any) -> tuple[int, ...]:
    """Return major numbers of compute capabilities."""
    what = "integers (9 for SM90)"
    given = _entries(operation, argument, values, what)
    for value in given:
        if isinstance(value, bool) or not isinstance(value, Integral):
            got = f"a sequence with {type(value).__name__}"
            reject_type(operation, argument, f"be a sequence of {what}", got)
        if not 1 <= int(value) <= _LAST_MAJOR:
            expected = f"hold major numbers (9 for SM90), from 1 to {_LAST_MAJOR}"
            reject_value(operation, argument, expected, int(value))
    return tuple(dict.fromkeys(int(value) for value in given))


def _layout_names(operation: str, layouts: Any) -> tuple[str, ...]:
    """Return the layouts' own names; only caches of attention are taken."""
    given = _entries(operation, "layouts", layouts, "names of layouts")
    if not given:
        reject_value(operation, "layouts", "hold at least one name of a layout", "none")
    known = ("fp8", *LAYOUT_NAMES)
    for layout in given:
        if not isinstance(layout, str):
            got = f"a sequence with {type(layout).__name__}"
            reject_type(operation, "layouts", "be a sequence of names of layouts", got)
        if layout not in known:
            expected = f"hold names out of {', '.join(known)}"
            reject_value(operation, "layouts", expected, repr(layout))
    return tuple(dict.fromkeys(canonical_name(operation, name, "layouts") for name in given))


def unregister_backend(name: str) -> None:
    """Take a backend out of the table.

    Parameters
    ----------
    name : str

    Raises
    ------
    ValueError
        For a name that is not there.
    TypeError
        For a name that is no text.
    """
    if not isinstance(name, str):
        reject_type("unregister_backend", "name", "be a text", type(name).__name__)
    with _lock:
        if _rules.pop(name, None) is None:
            reject_value("unregister_backend", "name", f"be one of {', '.join(_rules)}", repr(name))


def registered_backends() -> tuple[BackendRule, ...]:
    """Return the table, in the order in which backends were registered."""
    with _lock:
        return tuple(_rules.values())


def select_cache_policy(
    kv_cache_dtype: str | CacheLayout,
    backend: str | None = None,
    *,
    capability: tuple[int, int] | int | None = None,
    scale_format: str | None = None,
) -> CachePolicy:
    """Choose how cache and query go together for an attention backend of sparse MLA.

    Parameters
    ----------
    kv_cache_dtype : str or CacheLayout
        See `get_layout`. A layout is taken as it is, with its own scale format.
    backend : str, optional
        Name in the table; by default the first one that reads the layout and runs on the device.
    capability : (int, int) or int, optional
        Compute capability, ``(9, 0)`` or 90. Without it any device will do.
    scale_format : {"float32", "ue8m0"}, optional
        How scales inside rows are rounded; by default what the backend reads exactly.

    Returns
    -------
    CachePolicy

    Raises
    ------
    ValueError
        For a cache that the backend, or the device, cannot read; the message says what to choose.
    TypeError
        For a backend that is no name, or a capability that is none.

    Examples
    --------
    >>> from cupy_mla import select_cache_policy
    >>> policy = select_cache_policy("fp8_ds_mla", capability=(9, 0))
    >>> policy.backend, policy.scale_format, policy.fp8_query
    ('flashmla_sparse', 'ue8m0', False)
    >>> select_cache_policy("fp8", capability=90)
    Traceback (most recent call last):
        ...
    ValueError: select_cache_policy: kv_cache_dtype must be "fp8_ds_mla" with backend \
"flashmla_sparse" on SM90, got 'fp8': ...
    """
    operation = "select_cache_policy"
    if isinstance(kv_cache_dtype, CacheLayout):
        name = kv_cache_dtype.name
    else:
        name = canonical_name(operation, kv_cache_dtype)
    architecture, device = _architecture(operation, capability)
    wish = None if scale_format is None else check_scale_format(operation, scale_format)
    rule = _choose(operation, kv_cache_dtype, name, backend, architecture, device)
    if isinstance(kv_cache_dtype, CacheLayout):
        layout = kv_cache_dtype
        if wish is not None and layout.scale_format not in (None, wish):
            reject_value(
                operation,
                "scale_format",
                f"be None or that of the layout ({layout.scale_format})",
                repr(wish),
            )
    else:
        exact: ScaleFormat = "ue8m0" if rule.exponent_only else "float32"
        layout = get_layout(name, scale_format=wish or rule.scale_format or exact)
    if layout.scale_format == "float32" and rule.reads_exponent_alone(architecture):
        reject_value(
            operation,
            "scale_format",
            f'be "ue8m0" for backend "{rule.name}" on {device}, which reads the exponent of a '
            "scale alone",
            "'float32'",
        )
    return CachePolicy(rule.name, layout, rule.fp8_query, rule.cache_needs_fp8_view)


def _architecture(operation: str, capability: object) -> tuple[int | None, str]:
    """Return the major number, and the device as text."""
    if capability is None:
        return None, "any device"
    expected = "be a number as 90 or a pair as (9, 0)"
    shown = repr(capability) if isinstance(capability, str) else capability
    parts = capability if isinstance(capability, tuple) else (capability,)
    if len(parts) not in (1, 2) or any(
        isinstance(part, bool) or not isinstance(part, (int, np.integer)) for part in parts
    ):
        reject_type(operation, "capability", expected, shown)
    major, minor = divmod(int(parts[0]), 10) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
    if not 1 <= major <= _LAST_MAJOR or not 0 <= minor <= 9:
        reject_value(operation, "capability", expected, shown)
    return major, f"SM{major}{minor}"


def _choose(
    operation: str,
    asked: object,
    name: str,
    backend: str | None,
    architecture: int | None,
    device: str,
) -> BackendRule:
    """Return the rule that fits, or raise with what to choose instead."""
    rules = registered_backends()
    if backend is not None:
        if not isinstance(backend, str):
            reject_type(operation, "backend", "be a name", type(backend).__name__)
        known = {rule.name: rule for rule in rules}
        if backend not in known:
            reject_value(operation, "backend", f"be one of {', '.join(known)}", repr(backend))
        rule = known[backend]
        if not rule.runs_on(architecture):
            others = _options(rules, architecture) or "another device"
            reject_value(
                operation, "backend", f"be one that runs on {device} ({others})", repr(backend)
            )
        rules = (rule,)
    for rule in rules:
        if name in rule.layouts and rule.runs_on(architecture):
            return rule
    options = _options(rules, architecture)
    if not options:
        majors = sorted({major for rule in rules for major in rule.architectures})
        choices = "; ".join(f"{major}.x: {_options(rules, major)}" for major in majors)
        reject_value(operation, "capability", f"be one that a backend runs on ({choices})", device)
    shown = repr(asked if isinstance(asked, str) else name)
    reject_value(
        operation,
        "kv_cache_dtype",
        f"be {options}" + (f" on {device}" if architecture is not None else ""),
        f"{shown}: {_reason(name, rules, registered_backends())}",
    )


def _options(rules: Iterable[BackendRule], architecture: int | None) -> str:
    """Say which dtype goes with which backend."""
    return " or ".join(
        f'"{layout}" with backend "{rule.name}"'
        for rule in rules
        if rule.runs_on(architecture)
        for layout in rule.layouts
    )


def _reason(name: str, rules: Iterable[BackendRule], every: Iterable[BackendRule]) -> str:
    """Say why a layout is read by none of some backends, or by none at all."""
    layout = name if name == "auto" else get_layout(name)
    plain = isinstance(layout, str) or not layout.is_fp8
    what = "an unquantised cache, which" if plain else "a layout that"
    readers = [rule.name for rule in every if name in rule.layouts]
    if not readers:
        return f"{what} no registered backend lists"
    if isinstance(layout, str) or not layout.is_fp8:
        return f"{what} only {' and '.join(readers)} can read"
    if layout.needs_scale and any(not rule.fp8_query for rule in rules):
        return (
            "a flat fp8 cache goes with an fp8 query (FlashAttention 3, too, cannot mix a bf16 "
            "query with an fp8 cache)"
        )
    return f"{what} only {' and '.join(readers)} can read"
