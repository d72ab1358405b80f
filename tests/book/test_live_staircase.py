"""The staircase that a browser solves: against the library, by keyboard, from disk, on a phone, on paper."""

import json

import numpy as np
import pytest

from nqflib import site
from nqflib.lotka_volterra import flow
from nqflib.palette import colours, ramp
from nqflib.staircase import staircase

pytestmark = [pytest.mark.book, pytest.mark.browser]
K = 24
MODES = np.arange(1, K + 1)
TIMES = np.geomspace(0.5, 2000, 40)
START = {"logEps": -6, "fastest": 1, "power": 0.6, "c": 0.7, "q": 0.8}


def rates(fastest, power):
    return fastest * MODES ** -float(power)


def matrix(c, q):
    return np.where(np.eye(K) == 1, 1.0, c * float(q) ** np.abs(MODES[:, None] - MODES))


def settings():
    """Random positions of the sliders, then their corners: (r_1, a, c, q, eps)."""
    rng = np.random.default_rng(5)
    lows, highs = np.array([[0.5, 0.1, 0, 0, -12], [2, 1, 0.95, 1, -1]])
    drawn = rng.uniform(lows, highs, (24, 5))
    drawn[::6, 2] = 0
    corners = [[2, 1, c, q, eps] for c in (0, 0.05, 0.95) for q in (0.5, 1) for eps in (-12, -1)]
    return [(*row[:4], 10 ** row[4]) for row in np.concatenate([drawn, corners, [[2, 0.1, 0.95, 1, -12]]])]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A page with nothing but the figure, as the book writes it."""
    folder = tmp_path_factory.mktemp("live")
    reference = [{"rates": rates(1, 0.6).tolist(), "c": 0.5, "q": 0.9, "eps": 1e-9, "times": TIMES.tolist()}]
    reference[0]["logs"] = flow(rates(1, 0.6), matrix(0.5, 0.9), 1e-9, TIMES).log_abundances.ravel().tolist()
    shades = [*([ramp(theme, K)[k] for theme in ("light", "dark")] for k in range(K)), [colours("light")[7]] * 2]
    presets = [["start", START], ["each alone", START | {"c": 0}]]
    content = {"modes": K, "shades": shades, "start": START, "presets": presets, "reference": reference}
    (folder / "page.html").write_text(
        f"""<!doctype html><html lang="en" data-theme="light"><meta name="viewport" content="width=device-width">
        <title>live</title><link rel="stylesheet" href="{(site.BOOK / "_static" / "nqf.css").as_uri()}">
        <link rel="icon" href="data:,"><figure><div class="nqf-staircase"><script type="application/json">
        {json.dumps(content)}</script></div><div class="nqf-themes"><img class="only-light" alt="Modes." src="data:,">
        </div></figure><script src="{(site.BOOK / "_static" / "nodes.js").as_uri()}"></script>
        <script src="{(site.BOOK / "_static" / "live_staircase.js").as_uri()}"></script></html>""",
        "utf-8",
    )
    return (folder / "page.html").as_uri()


@pytest.fixture
def figure(page, address):
    page.goto(address)
    page.wait_for_selector(".nqf-staircase[data-difference]")
    page.wait_for_function("document.querySelector('output').textContent")
    yield page.locator("figure")
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


def paths(figure):
    return figure.evaluate("box => [...box.querySelectorAll('path')].map((path) => path.getAttribute('d'))")


def test_the_flow_is_that_of_the_library_and_its_work_is_bounded(page, figure):
    told = [
        {"r": rates(f, a).tolist(), "c": c, "q": q, "eps": eps, "times": TIMES.tolist()}
        for f, a, c, q, eps in settings()
    ]
    solved = page.evaluate(
        """(told) => told.map(({ r, c, q, eps, times }) => {
          const found = Staircase.flow(Float64Array.from(r), { c, q }, r.map(() => Math.log(eps)), times);
          return { ...found, logs: [...found.logs] };
        })""",
        told,
    )
    for found, (f, a, c, q, eps) in zip(solved, settings(), strict=True):
        competition = matrix(c, q) if c else np.ones(K)
        exact = flow(rates(f, a), competition, eps, TIMES, tolerance=1e-12).log_abundances
        assert np.abs(np.reshape(found["logs"], exact.shape) - exact).max() < 1e-6, (f, a, c, q, eps)
        assert found["products"] == 20 * found["steps"] <= 12_000


def test_the_limit_and_the_loss_are_those_of_the_library(page, figure):
    told = [{"r": rates(f, a).tolist(), "c": c, "q": q} for f, a, c, q, _ in settings()[:24]]
    solved = page.evaluate(
        """(told) => told.map(({ r, c, q }) => {
          const found = Staircase.limit(Float64Array.from(r), { c, q });
          const gains = found.equilibria.map((z) => Staircase.gain(r, { c, q }, z));
          const first = [...found.first].map((tau) => (tau < Infinity ? tau : -1));
          return { ...found, first, gains, equilibria: found.equilibria.map((z) => [...z]) };
        })""",
        told,
    )
    for found, (f, a, c, q, _) in zip(solved, settings()[:24], strict=True):
        r, competition = rates(f, a), matrix(c, q)
        exact = staircase(r, competition)
        first = exact.switch_on_times()
        np.testing.assert_allclose(found["times"], exact.times, rtol=1e-8)
        np.testing.assert_allclose(found["equilibria"], exact.equilibria, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(found["first"], np.where(np.isfinite(first), first, -1), rtol=1e-8)
        # L = (1/m) sum_mu (sum_k lambda_muk z_k - y_mu)^2 falls by r z / 4 - z C z / 8
        gains = [z @ r / 4 - z @ competition @ z / 8 for z in exact.equilibria]
        np.testing.assert_allclose(found["gains"], gains, rtol=1e-9, atol=1e-12)
        assert not found["degenerate"]
    with pytest.raises(ValueError, match="degenerate"):  # the limit depends on more than the initial size
        staircase([1, 1], [[1, 1], [1, 1]])
    assert page.evaluate("Staircase.limit([1, 1], { c: 1, q: 1 }).degenerate")


def test_the_page_checks_itself_and_the_keyboard_moves_every_slider_and_the_words_follow(page, figure):
    assert float(figure.locator(".nqf-staircase").get_attribute("data-difference")) < 1e-6
    sliders = figure.get_by_role("slider").all()
    assert len(sliders) == 5
    for slider in sliders:
        before, words = paths(figure), slider.get_attribute("aria-valuetext")
        slider.focus()
        page.keyboard.press("ArrowLeft")
        assert slider.get_attribute("aria-valuetext") != words
        assert paths(figure) != before
    summary = figure.locator("output")
    assert summary.get_attribute("aria-live") == "polite"
    words = summary.inner_text()
    figure.get_by_role("slider", name="strength c").press("Home")
    page.wait_for_function("(old) => document.querySelector('output').textContent !== old", arg=words)
    assert "24 of 24 modes appear" in summary.inner_text()
    assert figure.get_by_role("img").first.get_attribute("aria-label").endswith(summary.inner_text())


def test_a_button_sets_all_sliders(page, figure):
    figure.get_by_role("button", name="each alone").press("Enter")
    assert figure.get_by_role("slider", name="strength c").input_value() == "0"
    dots = figure.locator(".nqf-points circle").evaluate_all("all => all.map((dot) => Number(dot.getAttribute('cx')))")
    assert dots == sorted(dots)  # alone, the modes come in the order of their rates
    figure.get_by_role("button", name="start").click()
    assert figure.get_by_role("slider", name="strength c").input_value() == "0.7"


def test_a_mode_has_the_colour_of_its_theme(page, figure):
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        colour = figure.locator(".nqf-points circle").last.evaluate("e => getComputedStyle(e).fill")
        assert colour == f"rgb{tuple(bytes.fromhex(ramp(theme, K)[-1][1:]))}"


def test_it_fits_a_phone(page, figure):
    page.set_viewport_size({"width": 375, "height": 800})
    page.wait_for_function(
        "[...document.querySelectorAll('figure svg')].every((s) => s.getBoundingClientRect().right < 376)"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_paper_and_readers_without_scripts_get_the_still_figure(page, figure, browser, address):
    assert not figure.locator(".nqf-themes").is_visible()
    page.emulate_media(media="print")
    assert not figure.locator(".nqf-staircase").is_visible()
    context = browser.new_context(java_script_enabled=False)
    quiet = context.new_page()
    quiet.goto(address)
    assert quiet.locator("figure img").count() == 1
    assert quiet.locator("figure .nqf-staircase").inner_text() == ""
    context.close()
