"""Figures with sliders: what travels in the page. How it looks and moves: `tests/book/test_explorer_page.py`."""

import csv
import io

import numpy as np
import pytest

from nqflib.explorer import LARGEST, Frame, Panel, Series, Slider, render, scientific
from nqflib.figures import FIGURE_MIME

ALT = "Two curves that a slider moves."
X = np.linspace(0, 1, 5)
PANELS = [
    Panel("x", "y", [Series("moving", "C1"), Series("fixed", "C0", "theory")], (0, 1), (0, 4)),
    Panel("x", "z", [Series("bars", "C2", "bars")], (0, 1), (1e-3, 4), y_log=True),
]
SLIDERS = [Slider("power", ["1", "2"], start=1), Slider("factor", ["1", "1/3", "3"])]


def frame(i, j):
    moving = [1, 1 / 3, 3][j] * X ** (i + 1)
    return Frame([[(X, moving), (X, X)], [(X[:2], moving[1:3])]], f"power {i + 1}, position {j}")


def content(**changed):
    given = {"sliders": SLIDERS, "panels": PANELS, "frame": frame, "alt": ALT} | changed
    return render("an-explorer", **given)[FIGURE_MIME]


def test_every_frame_holds_its_own_numbers_in_the_order_of_the_sliders():
    told = content()["explorer"]
    assert [f["text"] for f in told["frames"]] == [f"power {i}, position {j}" for i in (1, 2) for j in range(3)]
    for at, kept in enumerate(told["frames"]):
        given = frame(*divmod(at, 3)).curves
        for kept_panel, given_panel in zip(kept["curves"], given, strict=True):
            for (x, y), (given_x, given_y) in zip(kept_panel, given_panel, strict=True):
                np.testing.assert_allclose(told["arrays"][x], np.asarray(given_x), rtol=5e-4)
                np.testing.assert_allclose(told["arrays"][y], np.asarray(given_y), rtol=5e-4)


def test_an_array_of_several_frames_is_stored_once_and_what_is_no_number_is_null():
    told = content(frame=lambda i, j: Frame([[(X, [np.nan, np.inf, 0, 1, 2]), (X, X)], [(X, X)]], ""))["explorer"]
    assert told["arrays"] == [X.tolist(), [None, None, 0, 1, 2]]


def test_the_axes_and_colours_of_both_themes_are_said():
    panel = content()["explorer"]["panels"][1]
    assert panel["y"] == {"label": "z", "range": [1e-3, 4], "log": True}
    assert panel["series"] == [{"label": "bars", "mark": "bars", "color": ["#34a08d", "#74b79c"]}]


def test_the_still_figure_is_that_of_the_sliders_start():
    one = [Slider("factor", ["a", "b"], start=1)]
    moved = content(sliders=one, frame=lambda i: frame(0, i))["svg_light"]
    still = content(sliders=[Slider("factor", ["b"])], frame=lambda i: frame(0, 1))["svg_light"]
    assert moved == still
    assert moved != content(sliders=[Slider("factor", ["a"])], frame=lambda i: frame(0, 0))["svg_light"]


def test_the_download_has_all_frames():
    rows = list(csv.DictReader(io.StringIO(content()["csv"]["an-explorer"])))
    assert len(rows) == 6 * (5 + 5 + 2)
    mine = [r for r in rows if (r["power"], r["factor"], r["series"]) == ("2", "3", "moving")]
    np.testing.assert_allclose([float(r["y"]) for r in mine], 3 * X**2, rtol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sliders": []}, "at least one slider"),
        ({"sliders": [Slider("s", ["a"], start=1)]}, "'s' has 1 positions and starts at 1"),
        ({"panels": [PANELS[0]._replace(x_range=(1, 1))]}, "x_range of panel 'y' must increase"),
        ({"panels": [PANELS[1]._replace(y_range=(0, 1))]}, "y_range of panel 'z' must increase, from above 0"),
        ({"frame": lambda i, j: Frame([[(X, X)], [(X, X)]], "")}, r"frame \(0, 0\) must give one curve"),
        ({"frame": lambda i, j: Frame([[(X, X), (X, X[1:])], [(X, X)]], "")}, r"x of shape \(5,\) and y of shape"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        content(**changed)


def test_too_many_numbers_for_a_page_are_refused():
    x = np.linspace(0, 1, LARGEST // 10)
    with pytest.raises(ValueError, match="kB of numbers, more than 250"):
        content(frame=lambda i, j: Frame([[(x, x + i + j), (x, x)], [(x, x)]], ""))


def test_numbers_of_a_sentence():
    told = [scientific(v) for v in (0, 0.674, -12.3, 3.64e-3, 1.02e-16, 12345)]
    assert told == ["0", "0.67", "-12", "3.6 × 10⁻³", "1.0 × 10⁻¹⁶", "1.2 × 10⁴"]
