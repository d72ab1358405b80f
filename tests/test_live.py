"""Live figures: what travels in the page. How it looks and moves: `tests/book/test_live_staircase.py`."""

import pytest

from nqflib import figures, live, site
from nqflib.figures import FIGURE_MIME

ALT = "A straight line that rises from 0 to 1."


def draw(figure):
    figure.subplots().plot([0, 1])


def test_a_live_figure_is_the_still_figure_and_what_its_script_reads():
    mine = live.render(draw, "rise", widget="staircase", content={"modes": 3}, alt=ALT, data={"x": [0.5]})
    told = mine[FIGURE_MIME].pop("live")
    assert told == {"widget": "staircase", "content": {"modes": 3}}
    assert mine == figures.render(draw, "rise", alt=ALT, data={"x": [0.5]})


def test_every_widget_has_its_script():
    assert all((site.BOOK / "_static" / f"live_{widget}.js").exists() for widget in live.WIDGETS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"widget": "stairs"}, "no widget 'stairs'. Valid: staircase"),
        ({"content": {"x": [0.123456789] * live.LARGEST}}, "kB of numbers, more than 250"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        live.render(draw, "rise", **{"widget": "staircase", "content": {}, "alt": ALT} | changed)
