"""The picture of `cupy-mla bench --plot`, drawn from rows with made-up times."""

from __future__ import annotations

import pytest

from cupy_mla import _kernel_files
from cupy_mla.bench import plot
from cupy_mla.bench.measure import Bench
from cupy_mla.bench.operations import OPERATIONS
from cupy_mla.bench.session import Settings, problems
from cupy_mla.cli import main
from tests.cli.bench_machine import COPY, make_machine

pytest.importorskip("matplotlib")

TOKENS = (1, 5, 40)


@pytest.fixture
def rows():
    bench = Bench(make_machine(), 3)
    found = []
    for name in ("insert", "gather"):
        settings = Settings((name,), layers=2, tokens=TOKENS, formats=("fp8_e4m3", "bfloat16"))
        operation = OPERATIONS[name]
        found += [bench.row(operation, one, cold=True) for one in problems(settings, operation)]
    return found


@pytest.fixture
def figure(rows, monkeypatch, tmp_path):
    """Draw to a file; return the figure that it was saved from."""
    kept = []
    make = plot.matplotlib().Figure

    def keep(*arguments, **options):
        kept.append(make(*arguments, **options))
        return kept[-1]

    monkeypatch.setattr(plot.matplotlib(), "Figure", keep)
    path = tmp_path / "bench.png"
    plot.draw(rows, "a title", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    return kept[0]


def test_each_operation_has_bars_and_lines(figure):
    assert figure.get_suptitle() == "a title"
    titles = [axis.get_title() for axis in figure.axes]
    assert [title.partition(":")[0] for title in titles] == ["insert"] * 2 + ["gather"] * 2
    assert [axis.get_ylabel() for axis in figure.axes] == [
        "percent of the ceiling",
        "microseconds",
    ] * 2


def test_bars_are_percents_of_the_ceiling_at_their_number_of_tokens(figure, rows):
    bars = figure.axes[0]
    assert [text.get_text() for text in bars.get_xticklabels()] == [str(size) for size in TOKENS]
    drawn = sorted(
        (round(bar.get_x() + bar.get_width() / 2), round(bar.get_height(), 6))
        for bar in bars.patches
    )
    assert drawn == sorted(
        (TOKENS.index(row.problem.tokens), round(row.percent_of_ceiling, 6))
        for row in rows
        if row.problem.operation == "insert"
    )
    is_bound = sorted(row.launch_bound for row in rows if row.problem.operation == "insert")
    assert sorted(bar.get_hatch() == "///" for bar in bars.patches) == is_bound


def test_lines_are_times_and_a_copy_for_each_format(figure, rows):
    axis = figure.axes[1]
    lines = {line.get_label(): line for line in axis.lines if line.get_linestyle() != ":"}
    groups = plot.series([row for row in rows if row.problem.operation == "insert"])
    assert set(lines) == set(groups) == {text.get_text() for text in axis.get_legend().texts}
    for name, part in groups.items():
        assert list(lines[name].get_xdata()) == [row.problem.tokens for row in part]
        assert list(lines[name].get_ydata()) == [row.figures.median for row in part]
    copies = [line for line in axis.lines if line.get_linestyle() == ":"]
    assert [list(line.get_ydata()) for line in copies] == [[pytest.approx(COPY, rel=0.02)] * 3] * 2
    assert len({line.get_color() for line in axis.lines}) == 2  # one a format
    ticks = [text.get_text() for text in axis.get_yticklabels()]
    assert "10" in ticks
    assert all(float(text) > 0 for text in ticks)  # plain numbers, no powers of ten


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("ending", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_command_draws_and_names_its_kernels(monkeypatch, tmp_path, ending, begin):
    titles = []
    draw = plot.draw

    def keep(rows, title, path):
        titles.append(title)
        draw(rows, title, path)

    monkeypatch.setattr(plot, "draw", keep)
    path = tmp_path / f"figure.{ending}"
    sizes = ("--layers", "2", "--tokens", "1,5", "--format", "fp8", "--sections", "gpu")
    assert main(["bench", "insert", "gather", *sizes, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(begin)
    (title,) = titles
    assert "Emulated GPU" in title
    assert _kernel_files.digest()[:12] in title


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", ["figure.xyz", "figure.json", "figure", "-"])
def test_an_ending_that_is_no_picture_is_refused_before_anything_is_measured(
    capsys, monkeypatch, tmp_path, name
):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "insert", "--tokens", "1", "--plot", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--plot must name a file that ends in one of" in captured.err
    assert ".png, " in captured.err
    assert f"got {name!r}" in captured.err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_hidden_behind_the_legend(figure):
    figure.canvas.draw()
    for axis in figure.axes[1::2]:
        assert axis.get_legend().get_window_extent().x0 >= axis.get_window_extent().x1
