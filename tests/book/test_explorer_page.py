"""A figure with sliders in the browser: it moves by keyboard, from disk, in both themes, on a phone and on paper."""

import pytest

pytestmark = [pytest.mark.book, pytest.mark.browser]
PAGE = "notebooks/nqf/fig1_expansion.html"
FIGURE = "figure#fig1-explorer"


@pytest.fixture
def figure(page, html):
    page.goto((html / PAGE).as_uri())
    page.wait_for_selector(f"{FIGURE}.nqf-live .nqf-panel svg")
    yield page.locator(FIGURE)
    assert page.errors == []


def test_the_keyboard_moves_it_and_the_sentence_says_what_is_shown(page, figure):
    scale = figure.get_by_role("slider", name="weight scale")
    before, picture = figure.locator("output").inner_text(), figure.locator(".nqf-points circle").all()
    places = [mark.get_attribute("cy") for mark in picture]
    scale.focus()
    page.keyboard.press("End")
    assert scale.get_attribute("aria-valuetext") == "1"
    assert "At weight scale 1 " in figure.locator("output").inner_text() != before
    assert [mark.get_attribute("cy") for mark in figure.locator(".nqf-points circle").all()] != places
    assert figure.get_by_role("img").get_attribute("aria-label").endswith(figure.locator("output").inner_text())


def test_shuffling_the_units_moves_the_bars_and_not_the_outputs(figure):
    bars = lambda: [b.get_attribute("height") for b in figure.locator(".nqf-bars rect").all()]  # noqa: E731
    outputs = lambda: [  # noqa: E731
        round(float(c.get_attribute("cy")), 6) for c in figure.locator(".nqf-panel:nth-child(2) circle").all()
    ]
    before, heights = outputs(), bars()
    figure.get_by_role("slider", name="order of the units").press("ArrowRight")
    assert outputs() == before
    assert bars() != heights
    assert sorted(bars()) == sorted(heights)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_mark_has_the_colour_of_its_theme(page, figure, theme):
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    colour = figure.locator(".nqf-bars rect").first.evaluate("e => getComputedStyle(e).fill")
    assert colour == {"light": "rgb(26, 92, 189)", "dark": "rgb(50, 128, 251)"}[theme]


def test_it_fits_a_phone(page, figure):
    page.set_viewport_size({"width": 375, "height": 800})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert all(box["x"] + box["width"] <= 375 for box in (s.bounding_box() for s in figure.locator("svg").all()))


def test_paper_shows_the_still_figure(page, figure):
    page.emulate_media(media="print")
    assert figure.locator("img.only-light").is_visible()
    assert not figure.locator(".nqf-explorer").is_visible()


def test_without_scripts_the_still_figure_stands(browser, html):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((html / PAGE).as_uri())
    assert page.locator(FIGURE).locator(".nqf-themes").is_visible()
    context.close()
