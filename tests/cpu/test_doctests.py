"""Examples in docstrings: every module's run, and every public function and class has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import cupy_mla

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_names():
    found = pkgutil.walk_packages(cupy_mla.__path__, "cupy_mla.", onerror=lambda name: None)
    return ["cupy_mla", *sorted(module.name for module in found if "__main__" not in module.name)]


@pytest.mark.parametrize("name", module_names())
def test_examples_of_a_module(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        # Modules of the CUDA backend need CuPy, and one holds kernels in Triton; nothing else may
        # fail to import.
        if name == "cupy_mla.bench.triton_ways":
            assert error.name == "triton", error
            return
        assert name.startswith("cupy_mla._cuda"), error
        assert "cu" in (error.name or ""), error
        return
    results = doctest.testmod(module, optionflags=FLAGS)
    assert results.failed == 0


# Records and operations that no host array can show.
WITHOUT_EXAMPLE = {"LayoutField", "concat_and_cache_mla_grouped"}


def public_callables():
    for name in cupy_mla.__all__:
        value = getattr(cupy_mla, name)
        if name in WITHOUT_EXAMPLE:
            continue
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        if callable(value):
            yield name


@pytest.mark.parametrize("name", list(public_callables()))
def test_public_names_have_an_example(name):
    value = getattr(cupy_mla, name)
    parser = doctest.DocTestFinder(recurse=True)
    tests = parser.find(value, name, module=inspect.getmodule(value))
    assert any(test.examples for test in tests), f"{name} has no example"


def test_names_of_the_public_interface_exist():
    assert len(set(cupy_mla.__all__)) == len(cupy_mla.__all__)
    for name in (
        "get_layout",
        "CacheLayout",
        "concat_and_cache_mla",
        "concat_and_cache_mla_grouped",
        "GroupedCacheWriter",
        "read_slots",
        "CompileError",
        "BackendUnavailable",
    ):
        assert name in cupy_mla.__all__
        assert hasattr(cupy_mla, name)
