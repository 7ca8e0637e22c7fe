"""Plots and tables of a report: drawn where there is something to show, linked, and alike on every machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.releases import ENGINE, report

from kconv.errors import OutputFailed
from kconv.validate.markdown import illustrate, to_markdown
from kconv.validate.numbers import NO_PART_DIFFERS
from kconv.validate.plots import LEFT_OUT, draw_plots
from kconv.validate.report import Report


@pytest.fixture
def image():
    image = pytest.importorskip("matplotlib.image")
    return lambda file: image.imread(file)


def test_each_plot_is_drawn_and_linked(tmp_path, image):
    text = to_markdown(report(), more=illustrate(report(), tmp_path / "out"))
    linked = re.findall(r"\]\((.*?\.png)\)", text)
    assert linked == ["acceptance-by-category.png", "acceptance-by-step.png", "error-by-part.png"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted(linked)
    for name in linked:
        pixels = image(tmp_path / "out" / name)
        height, width, _ = pixels.shape
        assert 200 < height < width < 2000
        # Something is drawn, and the ground is left clear.
        assert 0.01 < float((pixels[..., 3] > 0.1).mean()) < 0.6


def test_the_same_report_gives_the_same_bytes(tmp_path):
    for name in ("one", "other"):
        draw_plots(report(), tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()


def test_another_figure_gives_another_picture(tmp_path):
    draw_plots(report(part_error=0.01), tmp_path / "one")
    draw_plots(report(part_error=1.0), tmp_path / "other")
    names = ("error-by-part.png", "acceptance-by-step.png")
    same = [(tmp_path / "one" / n).read_bytes() == (tmp_path / "other" / n).read_bytes() for n in names]
    assert same == [False, True]


def test_the_tables_say_what_was_measured(tmp_path):
    text = "\n".join(illustrate(report(), tmp_path))
    assert "| writing | sampled | source | 8 | 2.0000 | 0.0500 |" in text
    assert "| math | greedy | 2.0e-02 | 3.0e-03 | 97.00% | -0.2500 ± 0.0300 |" in text
    assert "| held-out | 2 | 2.0e-02 | 1.0e-01 | 3.0e-03 | 97.00% | -0.0500 ± 0.0100 |" in text
    assert "| attention | greedy | 1.0e-02 | 1.0e-02 |" in text
    assert "| vllm | 90 | 70 / 40 / 10 | 2.3333 |" in text
    assert "| kconv's chain | 91 | 70 / 39 / 10 | 2.3077 |" in text
    assert "7 of 8 outputs equal those of the same engine." in text


def test_an_engine_that_counts_no_places_says_how_many_it_accepted(tmp_path):
    engine = ENGINE.model_copy(update={"engine": "trtllm", "per_position": None, "url": "http://there:1"})
    text = "\n".join(illustrate(report(engine=engine), tmp_path))
    assert "| trtllm | 90 | 120 in all | 2.3333 |" in text
    assert "trtllm (http://there:1), 8 prompts" in text


def test_parts_that_are_the_sources_own_need_no_plot(tmp_path):
    lines = illustrate(report(part_error=0.0), tmp_path)
    assert NO_PART_DIFFERS in lines
    assert not (tmp_path / "error-by-part.png").exists()


def test_without_matplotlib_the_plots_are_left_out_and_the_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lines = illustrate(report(), tmp_path)
    assert lines[-1] == LEFT_OUT
    assert "kconv --version" in LEFT_OUT
    assert not list(tmp_path.iterdir())
    assert "## Acceptance by category" in lines


def test_nothing_measured_shows_nothing(tmp_path):
    assert illustrate(Report(subject="head"), tmp_path / "out") == []
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputFailed, match="plots cannot be written"):
        draw_plots(report(), Path(tmp_path / "file" / "out"))
