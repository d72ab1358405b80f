"""Figures are the same bits every time, legible in both themes, and refuse what a reader could not use."""

import base64
import csv
import io
import itertools
import json
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from nqflib import figures, palette
from nqflib.figures import FIGURE_MIME, TABLE_MIME, render, show, show_table

ALT = "A line that rises from 0 to 1 and stays there."
TIME = np.linspace(0, 1, 7)


def line(figure):
    axes = figure.subplots()
    axes.plot(TIME, TIME**2, color=figures.MODE[0])
    axes.set(xlabel="time $t$", ylabel="loss")


def word(figure):
    """The cheapest drawing, for tests of what surrounds it."""
    figure.text(0.5, 0.5, "x")


@pytest.fixture(scope="module")
def bundle():
    return render(line, "a-line", alt=ALT, data={"t": TIME})


def displayed(monkeypatch, call):
    """What a call hands to the notebook: one (bundle, metadata)."""
    outputs = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **options: outputs.append((bundle, options)))
    call()
    assert len(outputs) == 1
    assert outputs[0][1]["raw"] is True
    return outputs[0][0], outputs[0][1]["metadata"]


# Drawing ----------------------------------------------------------------------------------------------------


def test_two_runs_are_bitwise_equal_even_in_another_process(bundle):
    program = (
        "import sys, json; sys.path.insert(0, 'tests'); import test_figures as t;"
        "print(json.dumps(t.render(t.line, 'a-line', alt=t.ALT, data={'t': t.TIME})))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(other) == bundle
    assert render(line, "a-line", alt=ALT, data={"t": TIME}) == bundle


def test_settings_of_the_reader_neither_leak_in_nor_out():
    plain = render(word, "a-word", alt=ALT)
    with matplotlib.rc_context({"font.size": 30, "font.weight": "bold", "text.color": "red"}):
        assert render(word, "a-word", alt=ALT) == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_the_bundle_holds_both_themes_a_png_and_the_alternative_text(bundle):
    assert list(bundle) == [FIGURE_MIME, "image/png", "text/plain"]
    figure = bundle[FIGURE_MIME]
    assert (figure["name"], figure["alt"], bundle["text/plain"]) == ("a-line", ALT, ALT)
    assert palette._SHADES["light"][0] in figure["svg_light"]
    assert palette._SHADES["dark"][0] in figure["svg_dark"]
    assert palette._SHADES["dark"][0] not in figure["svg_light"]
    for svg in (figure["svg_light"], figure["svg_dark"]):
        assert 'width="460.8pt"' in svg
        assert "<dc:date>" not in svg
        assert "Matplotlib v" not in svg
        assert "<text" not in svg  # outlines: no font of the reader's machine is needed
    image = imread(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert image.shape == (800, 1280, 4)  # 6.4 x 4 inches at 200 per inch
    assert np.all(image[0, 0] == 1)  # white, not transparent: it is read outside the book


def test_draw_is_called_once_for_each_theme_and_its_errors_pass():
    backgrounds = []

    def draw(figure):
        backgrounds.append(matplotlib.rcParams["text.color"])
        word(figure)

    render(draw, "a-line", alt=ALT)
    assert backgrounds == [palette._SHADES["light"][7], palette._SHADES["dark"][7]]

    def broken(figure):
        raise ZeroDivisionError("the spread is zero")

    with pytest.raises(ZeroDivisionError, match="the spread is zero"):
        render(broken, "a-line", alt=ALT)


def test_the_dark_drawing_is_laid_out_as_it_would_be_by_itself(monkeypatch):
    def draw(figure):
        panels = figure.subplots(2, 2, sharex=True)
        panels[0, 0].plot([1, 2, 1000], [1, 3, 1e5])
        panels[0, 0].set(yscale="log", ylabel="loss")
        figure.colorbar(panels[0, 1].imshow(np.eye(3)), ax=panels[:, 1], label="entry")
        panels[1, 0].set_aspect("equal")
        figure.suptitle("A title above")
        figure.supxlabel("time")

    alt = "Four panels with a colour bar and two titles."
    placed = figures.render(draw, "places", alt=alt)
    monkeypatch.setattr(figures, "_place_as", lambda *_: None)
    assert figures.render(draw, "places", alt=alt) == placed


def test_a_draw_that_leaves_the_figure_empty_is_refused():
    def beside(figure):
        matplotlib.figure.Figure().subplots()

    with pytest.raises(ValueError, match=r"drew nothing.*not pyplot"):
        render(beside, "a-line", alt=ALT)


def test_a_drawing_too_large_for_a_page_is_refused(monkeypatch):
    monkeypatch.setattr(figures, "LARGEST_SVG", 5_000)
    with pytest.raises(ValueError, match=r"the SVG of 'a-line' has .* rasterized=True"):
        render(line, "a-line", alt=ALT)


@pytest.mark.parametrize("name", ["", "Loss", "loss_tail", "loss tail", "3-modes", "loss-", "a--b"])
def test_a_name_that_is_no_label_is_refused(name):
    with pytest.raises(ValueError, match="is not a label"):
        render(line, name, alt=ALT)


@pytest.mark.parametrize("alt", ["", "a short text", "spaces" + " " * 30])
def test_alternative_text_that_says_little_is_refused(alt):
    with pytest.raises(ValueError, match="too short to stand in"):
        render(line, "a-line", alt=alt)


@pytest.mark.parametrize("size", [(7, 4), (2, 4), (6.4, 1), (6.4, 15), (float("nan"), 4)])
def test_a_size_that_a_phone_cannot_show_is_refused(size):
    with pytest.raises(ValueError, match="out of range"):
        render(line, "a-line", alt=ALT, size=size)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "not be empty"),
        ([1, 2], "must map column names"),
        ({"t": np.zeros((2, 2))}, r"column 't' .* shape \(2, 2\)"),
        ({"t": 1.0}, r"shape \(\)"),
        ({"": TIME}, "column named ''"),
        ({"z": TIME + 1j}, "holds complex"),
        ({"z": [object()]}, "holds object"),
        ({"t": TIME, "curves": {"t": TIME}}, "mixes tables and columns"),
        ({"Bad Name": {"t": TIME}}, "is not a label"),
    ],
)
def test_data_that_is_no_column_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        render(line, "a-line", alt=ALT, data=data)


# The numbers behind a figure ----------------------------------------------------------------------------------


def test_the_csv_reads_back_to_the_same_bits():
    generator = np.random.default_rng(0)
    wide = generator.standard_normal(50) * 10.0 ** generator.integers(-300, 300, 50)
    narrow = generator.standard_normal(20).astype(np.float32)
    text = render(word, "a-line", alt=ALT, data={"wide": wide, "narrow": narrow, "step": np.arange(3)})
    rows = list(csv.reader(io.StringIO(text[FIGURE_MIME]["csv"]["a-line"])))
    assert rows[0] == ["wide", "narrow", "step"]
    assert len(rows) == 51
    columns = list(zip(*rows[1:], strict=True))
    assert np.array_equal(np.array(columns[0], float), wide)
    assert np.array_equal(np.array(columns[1][:20], np.float32), narrow)
    assert columns[1][20:] == ("",) * 30
    assert columns[2][:4] == ("0", "1", "2", "")


def test_named_outcomes_and_quotes_survive_the_csv():
    data = {"loss": [0.5, "diverged at step 37", None], 'a, "quoted" name': [True, False, True]}
    text = render(word, "a-line", alt=ALT, data=data)[FIGURE_MIME]["csv"]["a-line"]
    assert list(csv.reader(io.StringIO(text))) == [
        ["loss", 'a, "quoted" name'],
        ["0.5", "True"],
        ["diverged at step 37", "False"],
        ["", "True"],
    ]


def test_every_table_of_the_data_becomes_a_file():
    files = render(word, "a-line", alt=ALT, data={"curves": {"t": TIME}, "fit": {"slope": [1.5]}})[FIGURE_MIME]["csv"]
    assert list(files) == ["a-line-curves", "a-line-fit"]
    assert files["a-line-fit"] == "slope\n1.5\n"


def test_show_displays_one_marked_output(monkeypatch):
    shown, metadata = displayed(monkeypatch, lambda: show(word, "a-word", alt=ALT))
    assert shown == render(word, "a-word", alt=ALT)
    assert metadata == {"nqf": {"figure": "a-word"}}


# Tables -------------------------------------------------------------------------------------------------------


def test_a_table_formats_numbers_and_keeps_them_whole_in_the_csv(monkeypatch):
    table = {
        "model": ["MLP", "a | b"],
        "exponent": [1.23456789, None],
        "steps": [12345, 7],
        "loss": ["diverged at step 37", 2.0],
        "bound": [float("nan"), float("inf")],
    }
    options = {"caption": " It is 1.2. ", "formats": {"exponent": ".2f"}}
    bundle, metadata = displayed(monkeypatch, lambda: show_table(table, "tab-a", **options))
    content = bundle[TABLE_MIME]
    assert metadata == {"nqf": {"table": "tab-a"}}
    assert content["rows"] == [
        ["MLP", "1.23", "12345", "diverged at step 37", "–"],
        ["a | b", "–", "7", "2", "∞"],
    ]
    assert content["align"] == ["left", "right", "right", "left", "right"]
    assert content["caption"] == "It is 1.2."
    assert "1.23456789" in content["csv"]["tab-a"]
    assert r"| a \| b |" in bundle["text/markdown"]


def test_a_table_may_be_rows(monkeypatch):
    rows = [{"k": 1, "t": 0.5}, {"k": 2, "t": 0.25}]
    content = displayed(monkeypatch, lambda: show_table(rows, "tab-a", caption="Halves."))[0][TABLE_MIME]
    assert content["header"] == ["k", "t"]
    assert content["rows"] == [["1", "0.5"], ["2", "0.25"]]


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ({"a": [1], "b": [1, 2]}, {}, r"must have one length, not \{'a': 1, 'b': 2\}"),
        ({}, {}, "no column"),
        ({"a": []}, {}, "empty column"),
        ([], {}, "no rows"),
        ([{"a": 1}, {"b": 1}], {}, r"row 1 of the table has the keys \['b'\], row 0 has \['a'\]"),
        ({"a": [1]}, {"formats": {"b": ".2f"}}, r"formats names \['b'\], but the columns are \['a'\]"),
        ({"a": [1]}, {"caption": " "}, "caption of table 'tab-a' is empty"),
    ],
)
def test_a_table_that_is_not_rectangular_or_says_nothing_is_refused(table, options, message):
    with pytest.raises(ValueError, match=message):
        show_table(table, "tab-a", **{"caption": "One.", **options})


# The palette ------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def linear(color):
    rgb = np.array(matplotlib.colors.to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """Ratio of relative luminances as WCAG 2 defines it."""
    a, b = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) + 0.05 for color in (one, other))
    return b / a


def oklab(rgb):
    """Ottosson (2020): coordinates in which distance is perceived difference."""
    to_lms = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
              [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
              [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    return np.array(to_lab) @ np.cbrt(np.clip(np.array(to_lms) @ rgb, 0, None))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_colour_stands_out_from_the_page(theme):
    for color in palette.colours(theme):
        assert contrast(color, palette.BACKGROUND[theme]) >= 3, color
    settings = palette.style(theme)
    for key in ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"):
        assert contrast(settings[key], palette.BACKGROUND[theme]) >= 7


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_the_eight_colours_stay_apart_for_colour_blind_readers(theme, vision):
    # 0.02 is a just noticeable difference; tritanopia is rare, and slots 2 and 5 come close there.
    least = 0.055 if vision == "tritanopia" else 0.09
    seen = [oklab(np.clip(VISION[vision] @ linear(color), 0, 1)) for color in palette.colours(theme)[:8]]
    for (i, a), (j, b) in itertools.combinations(enumerate(seen), 2):
        assert np.linalg.norm(a - b) >= least, (i, j)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_ramp_of_batch_sizes_is_ordered_by_lightness(theme):
    lightness = [oklab(linear(color))[0] for color in palette.colours(theme)[8:]]
    assert np.all(np.diff(lightness) > 0)
    assert list(palette.BATCH) == [2**k for k in range(13)]
    assert list(palette.BATCH.values()) == [f"C{k}" for k in range(8, 21)]
    assert len(palette.colours(theme)) == 21


def test_things_of_one_kind_have_different_colours():
    assert len(set(palette.MODE)) == 8
    names = {name: color for name, color in palette.SURROGATE.items() if name != "none"}
    assert palette.SURROGATE["none"] == palette.SURROGATE["true"]
    assert len(set(names.values())) == len(names)
    assert len(set(palette.OPTIMIZER.values())) == len(palette.OPTIMIZER)


def test_type_is_at_least_nine_pixels_on_a_phone():
    pixels_per_point = 343 / (figures.WIDEST * 72)  # a screen of 375 px less its margins
    sizes = [value for key, value in palette.style("light").items() if "size" in key and "marker" not in key]
    assert len(sizes) == 7
    assert min(sizes) * pixels_per_point >= 9
