"""The built book: what a reader gets, with and without a network."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from nqflib import runner, site

pytestmark = pytest.mark.book

PAGES = [
    *(f"{path.stem}.html" for path in sorted(site.BOOK.glob("*.md"))),
    *(f"notebooks/{page}.html" for page in runner.pages()),
    "genindex.html",
]
# One page of each kind, for what depends on the style alone.
KINDS = [
    "index.html",
    "scoreboard.html",
    "gallery.html",
    "api.html",
    "notebooks/nqf/fig1_expansion.html",
    "notebooks/nqf/fig3_features.html",
    "notebooks/nqf/live_staircase.html",
]
# docutils gives entries of a bibliography roles of its own that axe does not like.
DOCUTILS = {"aria-allowed-role", "aria-deprecated-role", "aria-required-children"}
BLOCKED = re.compile(r"^https?://(?!127\.0\.0\.1)")


class References(HTMLParser):
    """What a page loads by itself, what it links to, and the anchors it offers."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.ids, self.images = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values[key] for key in ("id", "name") if values.get(key)}
        if values.get("src"):
            self.loads.append(values["src"])
        if tag == "link" and "stylesheet" in (values.get("rel") or ""):
            self.loads.append(values["href"])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "img":
            self.images.append(values)


@pytest.fixture(scope="module")
def parsed(html):
    return {path: References(path.read_text("utf-8")) for path in html.rglob("*.html") if "_static" not in path.parts}


def test_every_notebook_has_a_page(html):
    for page in runner.pages():
        assert (html / "notebooks" / f"{page}.html").exists()


def test_no_page_loads_anything_from_outside(parsed):
    outside = [(p.name, url) for p, page in parsed.items() for url in page.loads if urlsplit(url).netloc]
    assert outside == []


def test_no_stylesheet_loads_anything_from_outside(html):
    for path in html.rglob("*.css"):
        text = path.read_text("utf-8")
        targets = re.findall(r"url\(\s*['\"]?([^'\")]+)", text) + re.findall(r"@import\s+['\"]([^'\"]+)", text)
        assert [t for t in targets if urlsplit(t).netloc and not t.startswith("data:")] == [], path.name


def test_no_internal_link_is_dead(parsed):
    dead = []
    for path, page in parsed.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = parsed[target].ids if target in parsed else None
            fragment = unquote(parts.fragment)
            if not target.exists() or (fragment and anchors is not None and fragment not in anchors):
                dead.append((path.name, link))
    assert dead == []


def test_every_image_of_a_notebook_page_has_an_alternative_text(parsed):
    for path, page in parsed.items():
        if "notebooks" in path.parts:
            assert all(image.get("alt", "").strip() for image in page.images), path.name


def test_every_page_of_a_figure_offers_its_data(parsed, html):
    page = parsed[html / "notebooks" / "nqf" / "fig3_features.html"]
    suffixes = {Path(urlsplit(link).path).suffix for link in page.links}
    assert {".csv", ".svg", ".png"} <= suffixes


def test_every_page_opens_with_why_it_matters_and_ends_with_a_way_to_report(html, parsed):
    for path, page in parsed.items():
        if path.name in ("genindex.html", "search.html", "py-modindex.html") or "generated" in path.parts:
            continue
        text = path.read_text("utf-8")
        assert "Why it matters" in text or path.name == "index.html", path.name
        assert any("/issues/new" in link for link in page.links), path.name


@pytest.mark.browser
@pytest.mark.parametrize("name", PAGES)
def test_a_page_reads_on_a_phone_from_disk_with_all_hosts_blocked(page, html, name):
    page.set_viewport_size({"width": 375, "height": 800})
    page.route(BLOCKED, lambda route: route.abort())
    page.goto((html / name).as_uri())
    page.evaluate("window.MathJax?.startup?.promise ?? null")
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert page.locator("mjx-merror").count() == 0
    ignored = DOCUTILS if name == "bibliography.html" else set()
    assert [v for v in violations(page, {"color-contrast": {"enabled": False}}) if v[0] not in ignored] == []


def violations(page, rules=None):
    """What axe finds in the text of a page: rule and the first places."""
    from axe_playwright_python.sync_playwright import Axe

    options = {"resultTypes": ["violations"], "rules": rules or {}}
    found = Axe().run(page, context="article", options=options).response["violations"]
    return [(v["id"], [node["target"] for node in v["nodes"]][:3]) for v in found]


@pytest.mark.browser
def test_mathematics_is_drawn_without_a_network(page, html):
    page.goto((html / "notebooks" / "nqf" / "fig3_features.html").as_uri())
    page.wait_for_selector("mjx-container", timeout=20_000)
    assert page.locator("mjx-container").count() >= 5
    assert page.locator("mjx-merror").count() == 0


@pytest.mark.browser
def test_the_live_page_solves_in_the_browser_what_the_library_has_solved(page, html):
    page.goto((html / "notebooks" / "nqf" / "live_staircase.html").as_uri())
    page.wait_for_selector("figure#live-staircase.nqf-live .nqf-staircase[data-difference]")
    assert float(page.locator(".nqf-staircase").get_attribute("data-difference")) < 1e-6
    assert not page.locator("figure#live-staircase img.only-light").is_visible()
    assert page.errors == []


@pytest.mark.browser
def test_search_finds_a_page_from_disk(page, html):
    page.goto((html / "search.html").as_uri() + "?q=logistic")
    page.wait_for_selector("#search-results li a", timeout=20_000)
    assert "fig3_features" in page.locator("#search-results").inner_html()


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_theme_shows_its_own_drawing_and_the_caption(page, served, theme):
    page.goto(f"{served}/notebooks/nqf/fig3_features.html")
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    other = {"light": "dark", "dark": "light"}[theme]
    assert page.locator(f"figure img.only-{theme}").first.is_visible()
    assert not page.locator(f"figure img.only-{other}").first.is_visible()
    assert page.locator("figcaption").first.is_visible()
    assert "Fig" in page.locator("figcaption .caption-number").first.inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", KINDS)
def test_text_stands_out_from_its_background(page, html, name, theme):
    page.goto((html / name).as_uri())
    page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    assert violations(page) == []


@pytest.mark.browser
def test_the_keyboard_reaches_text_and_filters(page, html):
    page.goto((html / "scoreboard.html").as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent").strip() == "Skip to main content"
    page.keyboard.press("Enter")
    assert page.url.endswith("#main-content")
    shown = page.locator(".claim-filters output")
    everything = shown.inner_text()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == "verdict":
            break
    page.keyboard.press("ArrowDown")
    assert shown.inner_text() != everything


def test_launch_links_lead_to_what_the_repository_and_the_published_site_hold(html, parsed):
    page = parsed[html / "notebooks" / "nqf" / "fig3_features.html"]
    repository = "github.com/nqf-companion/nqf-companion"
    notebook = "notebooks/nqf/fig3_features.md"
    assert (runner.ROOT / notebook).exists()
    assert f"https://mybinder.org/v2/gh/nqf-companion/nqf-companion/main?urlpath=lab/tree/{notebook}" in page.links
    assert f"https://{repository}/blob/main/{notebook}?plain=1" in page.links
    (colab,) = [link for link in page.links if link.startswith("https://colab.research.google.com/")]
    branch, published = colab.split("/blob/")[1].split("/", 1)
    assert branch == "gh-pages"
    assert (html / published).exists()
