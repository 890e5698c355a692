"""Figures for print: files, their names, what is drawn in them, and colors."""

import contextlib
import errno
import io
import itertools

import matplotlib.figure
import numpy as np
import pytest

from bilevel.bench import page
from bilevel.bench.page import COLORS, FONT_SIZE, WIDTH, Layout, assign_looks, draw_figure, file_names, write_figures
from bilevel.bench.select import make_sections
from bilevel.engine import metrics
from bilevel.engine.curves import Curve
from bilevel.engine.show import draw_panels
from tests.bench import fake_store

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
EYES = {
    "typical": np.eye(3),
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])


@pytest.fixture(scope="module")
def table():
    return fake_store.store()


def linear_rgb(color):
    channel = np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("page", ["#ffffff", "#14171a"])
def test_every_color_stands_out_on_light_and_dark_pages(page):
    for color in COLORS:
        dark, light = sorted(LUMINANCE @ linear_rgb(each) for each in (color, page))
        assert (light + 0.05) / (dark + 0.05) >= 3


@pytest.mark.parametrize("eyes", EYES)
def test_colors_differ_for_color_blind_eyes(eyes):
    seen = [lab(np.asarray(EYES[eyes]) @ linear_rgb(color)) for color in COLORS]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 25


def test_thirty_five_solvers_look_different_and_the_order_does_not_matter():
    names = [f"solver{number}" for number in range(35)]
    assert len(set(assign_looks(names).values())) == 35
    assert assign_looks(names) == assign_looks(reversed(names * 2))


def test_a_solver_has_the_same_color_on_every_page_and_its_grids_share_it():
    alone, among = assign_looks(["SRBA"]), assign_looks(["SABA", "SRBA (untuned)", "AmIGO", "SRBA (tuned)", "BSA"])
    assert alone["SRBA"].color == among["SRBA (tuned)"].color == among["SRBA (untuned)"].color
    assert among["SRBA (tuned)"].dashes != among["SRBA (untuned)"].dashes
    assert among["SABA"].color == assign_looks(["SABA", "SOBA"])["SABA"].color
    assert len({look.color for look in among.values()}) == 4


@pytest.mark.slow
def test_each_problem_becomes_a_pdf_and_a_png_with_names_that_do_not_change(table, tmp_path):
    paths = write_figures(table, tmp_path / "new")
    stem = "script-window-hacked-1-script"
    expected = [f"{stem}-{name}.{kind}" for name in ("digits_cleaning", "quadratic") for kind in ("pdf", "png")]
    assert [path.name for path in paths] == expected
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == expected
    assert [path.read_bytes()[:4] for path in paths[:2]] == [b"%PDF", b"\x89PNG"]
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_figures(table, tmp_path / "new")] == first


def test_a_full_disk_is_reported_when_a_figure_is_written(table, tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(page, "replacing", lambda path: contextlib.nullcontext(Full()))
    with pytest.raises(OSError, match="No space left on device"):
        write_figures(table[table["problem"] == "quadratic"], tmp_path)


def test_two_problems_with_the_same_name_get_different_files(table):
    other = table.assign(problem_arguments='{"dim": 3}')
    names = file_names(make_sections(table)[:1] + make_sections(other)[:1])
    assert len(set(names)) == 2 and all("digits_cleaning-" in name for name in names)


def test_a_figure_fits_a_column_and_has_a_panel_for_seconds_and_one_for_calls(table):
    figure = draw_figure(make_sections(table)[1], assign_looks(table["solver"]))
    assert figure.get_figwidth() == WIDTH <= 3.3
    assert [axes.get_xlabel() for axes in figure.axes] == ["seconds, until the first seed ends", "oracle calls"]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["SRBA", "SABA", "SOBA"]
    assert FONT_SIZE >= 7


def test_size_scales_solvers_and_labels_of_a_figure_can_be_chosen(table):
    section, looks = make_sections(table)[1], assign_looks(table["solver"])
    chosen = {one: looks[one] for one in ("SOBA", "SRBA")}
    figure = draw_figure(section, chosen, None, Layout(6.9, 2.5, "x", {"SRBA": "ours"}))
    plain = draw_figure(section, chosen)
    assert figure.get_figwidth() == 6.9
    np.testing.assert_allclose(figure.get_figheight() - plain.get_figheight(), 2 * (2.5 - 1.9))
    assert [(axes.get_xscale(), axes.get_yscale()) for axes in figure.axes] == [("log", "linear")] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["SOBA", "ours"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]


def test_a_panel_says_that_its_curves_end_with_the_first_seed():
    whole = Curve(*np.ones((4, 3)))
    for curve, label in ((whole, "calls"), (whole._replace(is_cut=True), "calls, until the first seed ends")):
        axes = matplotlib.figure.Figure().subplots()
        draw_panels(axes, {"calls": {"SRBA": curve}}, metrics.metric("outer_value"), {})
        assert axes.get_xlabel() == label


def test_a_solver_without_a_curve_cannot_be_drawn(table, tmp_path):
    with pytest.raises(ValueError, match=r"`only`: no curve of 'SBRA'; there are: .*SRBA"):
        write_figures(table, tmp_path, only=["SBRA"])
    with pytest.raises(ValueError, match=r"`labels`: no curve of 'x'; there are"):
        write_figures(table, tmp_path, layout=Layout(labels={"x": "y"}))


@pytest.mark.slow
def test_a_legend_of_long_names_fits_the_figure(table):
    section = make_sections(table.assign(columns="published"))[1]
    with matplotlib.rc_context({"font.size": FONT_SIZE}):
        figure = draw_figure(section, assign_looks(one.label for one in section.contenders))
        figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_lines_are_the_median_curves_in_the_colors_of_their_solvers(table):
    section, faces = make_sections(table)[1], assign_looks(table["solver"])
    for line, solver in zip(draw_figure(section, faces).axes[1].lines, ("SRBA", "SABA", "SOBA"), strict=True):
        curve = section.curves["value_gap", "calls", solver]
        np.testing.assert_array_equal(line.get_xydata(), np.stack([curve.x, curve.median], axis=1))
        assert line.get_color() == faces[solver].color


@pytest.mark.slow
def test_what_is_drawn_need_not_select(table, tmp_path):
    drawn = draw_figure(make_sections(table)[0], assign_looks(table["solver"]), "test_error")
    assert {axes.get_ylabel() for axes in drawn.axes} == {"test error"}
    assert [path.suffix for path in write_figures(table, tmp_path, draw="test_error")] == [".pdf", ".png"]
    with pytest.raises(ValueError, match=r"`draw='weight_auc'`: no curve of it; there are: .*test_error"):
        write_figures(table, tmp_path, draw="weight_auc")


def test_without_a_timing_phase_there_is_no_panel_for_seconds(table):
    section = make_sections(table[table.phase == "sweep"], "outer_value")[0]
    assert [axes.get_xlabel() for axes in draw_figure(section, assign_looks(table["solver"])).axes] == ["oracle calls"]


def test_a_problem_without_a_finite_curve_gets_no_figure(table, tmp_path):
    assert write_figures(table[table.solver == "StocBiO"], tmp_path) == []


def test_an_empty_table_is_refused(table, tmp_path):
    with pytest.raises(ValueError, match="`table` has no rows; run the experiment first"):
        write_figures(table[:0], tmp_path)
