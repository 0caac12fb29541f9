"""What the wheel and the sdist hold, and that every kind of installation finds its kernel files.

Everything here works offline: the archives are built by calling the build backend, and a wheel is
installed by unpacking it, which is all that an installer does for a pure Python wheel.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cupy_mla
from cupy_mla import _kernel_files

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels_src"


def build(hook: str, source: Path, out: Path) -> Path:
    """Call one hook of the build backend in `source`, as an installer would; return the archive."""
    code = "import hatchling.build as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    command = [sys.executable, "-c", code, hook, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def run_isolated(code: str, *paths: Path, site: Path | None = None) -> dict[str, object]:
    """Run `code` where only `paths` can provide cupy_mla; return the JSON object it prints.

    -S keeps .pth files of this environment out, so an editable install of the project under test
    cannot stand in for the one that a test made. `site` is added with its .pth files.
    """
    dependencies = {Path(module.__file__).parent.parent for module in (np, ml_dtypes)}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, *sorted(dependencies)]))
    prologue = f"import site; site.addsitedir({str(site)!r})\n" if site else ""
    done = subprocess.run(
        [sys.executable, "-S", "-c", prologue + textwrap.dedent(code)],
        cwd=paths[0] if paths else site,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


REPORT = """
    import json
    import cupy_mla
    from cupy_mla import _kernel_files
    print(json.dumps({
        "package": cupy_mla.__file__,
        "version": cupy_mla.__version__,
        "root": str(_kernel_files._root()),
        "names": _kernel_files.names(),
        "digest": _kernel_files.digest(),
    }))
"""


def check_installation(report: dict[str, object], package: Path, kernels: Path) -> None:
    assert report["package"] == str(package / "__init__.py")
    assert report["version"] == cupy_mla.__version__
    assert report["root"] == str(kernels)
    assert report["names"] == list(kernel_names())
    assert report["digest"] == _kernel_files.digest()


def kernel_names() -> list[str]:
    """The kernel files of the checkout, found without the code under test."""
    return sorted(
        path.relative_to(KERNELS).as_posix()
        for path in KERNELS.rglob("*")
        if path.is_file() and path.suffix in {".cu", ".cuh", ".h"}
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(out, filter="data")
        else:
            archive.extractall(out)
    (top,) = out.iterdir()
    return top


def unzip(wheel: Path, out: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out)
    return out


# --- contents ---------------------------------------------------------------------------------


def test_wheel_holds_the_package_its_kernels_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    dist_info = f"cupy_mla-{cupy_mla.__version__}.dist-info/"
    strangers = [name for name in names if not name.startswith(("cupy_mla/", dist_info))]
    assert strangers == []
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "cupy_mla").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    kernels = {f"cupy_mla/kernels_src/{name}" for name in kernel_names()}
    assert kernels
    assert {name for name in names if name.startswith("cupy_mla/")} == modules | kernels
    assert "cupy_mla/py.typed" in names
    assert f"{dist_info}licenses/LICENSE" in names


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        dist_info = f"cupy_mla-{cupy_mla.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{dist_info}/METADATA"))
        entry_points = archive.read(f"{dist_info}/entry_points.txt").decode()
    assert metadata["Name"] == "cupy-mla"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "cupy-mla = cupy_mla.cli:main" in entry_points
    unconditional = {
        re.match(r"[\w-]+", requirement)[0]
        for requirement in metadata.get_all("Requires-Dist")
        if "extra ==" not in requirement
    }
    assert unconditional == {"numpy", "ml-dtypes", "rich"}


def test_extras_bring_one_cuda_line_each_and_test_brings_no_cupy(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = f"cupy_mla-{cupy_mla.__version__}.dist-info/METADATA"
        metadata = email.message_from_bytes(archive.read(name))
    extras: dict[str, set[str]] = {}
    for requirement in metadata.get_all("Requires-Dist"):
        found = re.match(r"([\w-]+).*extra == '([\w-]+)'", requirement.replace('"', "'"))
        if found:
            extras.setdefault(found[2], set()).add(found[1])
    assert extras["cuda12x"] == {
        "cupy-cuda12x",
        "nvidia-cuda-nvrtc-cu12",
        "nvidia-cuda-runtime-cu12",
    }
    assert extras["cuda13x"] == {"cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"}
    for extra in set(extras) - {"cuda12x", "cuda13x"}:
        assert not any(name.startswith("cupy") and name != "cupy-mla" for name in extras[extra])


def test_sdist_holds_what_it_takes_to_test_and_release(unpacked_sdist: Path) -> None:
    for name in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "cupy_mla/py.typed",
        "tests/test_packaging.py",
        ".ci/run",
    ):
        assert (unpacked_sdist / name).is_file(), name
    packed = sorted(path.name for path in (unpacked_sdist / "kernels_src").rglob("*.cu*"))
    assert packed == sorted(Path(name).name for name in kernel_names() if ".cu" in name)


def test_wheel_from_the_sdist_is_the_wheel_from_the_checkout(
    wheel: Path, unpacked_sdist: Path, tmp_path: Path
) -> None:
    from_sdist = build("build_wheel", unpacked_sdist, tmp_path)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(from_sdist) as other:
        assert one.namelist() == other.namelist()
        differing = [name for name in one.namelist() if one.read(name) != other.read(name)]
    assert differing == []


def test_the_version_is_the_same_everywhere(wheel: Path) -> None:
    (newest, *_) = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    built = wheel.name.split("-")[1]
    assert cupy_mla.__version__ == built == newest


# --- kernel files by kind of installation -----------------------------------------------------


def test_kernel_files_of_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    target = unzip(wheel, tmp_path / "site")
    report = run_isolated(REPORT, target)
    check_installation(report, target / "cupy_mla", target / "cupy_mla" / "kernels_src")


def test_kernel_files_of_an_unpacked_sdist(unpacked_sdist: Path) -> None:
    report = run_isolated(REPORT, unpacked_sdist)
    check_installation(report, unpacked_sdist / "cupy_mla", unpacked_sdist / "kernels_src")


def test_kernel_files_of_an_editable_install(tmp_path: Path) -> None:
    editable = build("build_editable", ROOT, tmp_path)
    target = unzip(editable, tmp_path / "site")
    assert not (target / "cupy_mla").exists()
    report = run_isolated(REPORT, site=target)
    check_installation(report, ROOT / "cupy_mla", KERNELS)


def test_kernel_files_of_a_bare_checkout(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("cupy_mla", "kernels_src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    report = run_isolated(REPORT, tmp_path)
    check_installation(report, tmp_path / "cupy_mla", tmp_path / "kernels_src")


def test_the_package_s_own_kernel_files_win_over_those_beside_it(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "cupy_mla", tmp_path / "cupy_mla", ignore=ignore)
    shutil.copytree(KERNELS, tmp_path / "cupy_mla" / "kernels_src")
    (tmp_path / "kernels_src").mkdir()
    (tmp_path / "kernels_src" / "stranger.cu").write_text("")
    report = run_isolated(REPORT, tmp_path)
    check_installation(report, tmp_path / "cupy_mla", tmp_path / "cupy_mla" / "kernels_src")


def test_missing_kernel_files_are_reported_with_the_places_looked_at(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "cupy_mla", tmp_path / "cupy_mla", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = """
        import json
        from cupy_mla import _kernel_files
        try:
            _kernel_files.names()
        except FileNotFoundError as error:
            print(json.dumps({"error": str(error)}))
    """
    message = run_isolated(code, tmp_path)["error"]
    assert str(tmp_path / "cupy_mla" / "kernels_src") in message
    assert str(tmp_path / "kernels_src") in message
    assert "install cupy-mla again" in message


# --- the loader -------------------------------------------------------------------------------


def test_read_returns_the_file(tmp_path: Path) -> None:
    assert _kernel_files.names() == tuple(kernel_names())
    for name in _kernel_files.names():
        assert _kernel_files.read(name) == (KERNELS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    [
        "../pyproject.toml",
        "x/../../pyproject.toml",
        "./x.cu",
        "x//y.cu",
        "/etc/passwd",
        "..\\pyproject.toml",
        "..",
        ".",
        "",
    ],
)
def test_read_refuses_names_that_leave_the_directory(name: str) -> None:
    with pytest.raises(ValueError, match="read: name must be a relative path"):
        _kernel_files.read(name)


def test_read_of_an_unknown_file_lists_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match="read: name must be one of") as caught:
        _kernel_files.read("no_such_kernel.cu")
    assert all(name in str(caught.value) for name in kernel_names())


def test_digest_depends_on_names_and_texts_and_not_on_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(files: dict[str, str]) -> str:
        shutil.rmtree(tmp_path)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return _kernel_files.digest()

    monkeypatch.setattr(_kernel_files, "_CANDIDATES", (tmp_path,))
    base = digest({"a.cu": "x", "b.cuh": "y"})
    assert base == digest({"b.cuh": "y", "a.cu": "x"})
    assert base == digest({"a.cu": "x", "b.cuh": "y", "notes.txt": "not a kernel"})
    others = [
        digest({"a.cu": "x", "b.cuh": "z"}),
        digest({"a.cu": "xb.cuhy"}),
        digest({"a.cu": "y", "b.cuh": "x"}),
        digest({"a.cu": "x", "c.cuh": "y"}),
        digest({"a.cu": "x", "sub/b.cuh": "y"}),
    ]
    assert len({base, *others}) == 1 + len(others)
