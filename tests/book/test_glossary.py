"""Links to terms of the glossary in a real Sphinx build: each shows what its term means."""

import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_markdown_cell
from small_site import build, soup, text, write_notebook

from nqflib import runner

pytestmark = pytest.mark.book
GLOSSARY = """# Glossary

```{glossary}
abundance
  $z_k$: see {term}`preset`, 1 < 2.

  A second paragraph.

preset
  The size of a run.
```
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    source = tmp_path_factory.mktemp("glossary") / "book"
    words = "# Page\n\nThe {term}`abundances <abundance>` grow, {doc}`others </index>` do not. {term}`Abundance` again."
    write_notebook(source, "nqf/first", [new_markdown_cell(words)])
    pages = "notebooks/nqf/first\nglossary"
    (source / "index.md").write_text(f"# Book\n\n```{{toctree}}\n{pages}\n```\n\n```{{bibliography}}\n```\n")
    (source / "glossary.md").write_text(GLOSSARY)
    output, warnings = build(source)
    assert warnings == ""
    return output


@pytest.fixture(scope="module")
def first(book):
    return soup(book / "notebooks/nqf/first.html")


def test_a_term_leads_to_the_glossary_and_is_described_by_its_definition(book, first):
    for link, word in zip(first.select("section > p a.nqf-term"), ("abundances", "Abundance"), strict=True):
        assert text(link) == word
        address, anchor = link["href"].split("#")
        assert text(soup(book / "notebooks/nqf" / address).select_one(f"dt#{anchor}")).startswith("abundance")
        (definition,) = first.select(f"#{link['aria-describedby']}[role=tooltip]")
        assert text(definition) == r"\(z_k\): see preset, 1 < 2."
        assert not definition.select("a")
        assert definition.find_previous_sibling("a") is link


def test_formulas_of_a_definition_bring_mathjax_to_a_page_that_has_none(first):
    assert first.select("script[src*=mathjax]")


def test_other_links_and_those_within_the_glossary_stay_as_they_are(book, first):
    assert [text(link) for link in first.select("section > p a:not(.nqf-term)")] == ["others"]
    assert not soup(book / "glossary.html").select(".nqf-term")


def test_the_preset_below_the_title_is_a_term(first):
    link = first.select_one(".nqf-times a.nqf-term")
    assert text(first.select_one(f"#{link['aria-describedby']}")) == "The size of a run."


@pytest.mark.browser
def test_a_definition_shows_under_pointer_and_focus_until_escape(first, page):
    static = runner.ROOT / "book" / "_static"
    html = BeautifulSoup(str(first), "html.parser")
    for tag in html.select("script, link"):
        tag.decompose()
    style, script = ((static / name).read_text("utf-8") for name in ("nqf.css", "glossary.js"))
    page.set_content(str(html).replace("</head>", f"<style>{style}</style><script>{script}</script></head>"))
    link = page.locator("section > p a.nqf-term").first
    definition = page.locator("section > p .nqf-definition").first
    assert not definition.is_visible()
    link.hover()
    assert definition.is_visible()
    definition.hover()
    assert definition.is_visible()
    page.keyboard.press("Escape")
    assert not definition.is_visible()
    page.mouse.move(0, 0)
    link.hover()
    assert definition.is_visible()
    page.mouse.move(0, 0)
    page.wait_for_function("getComputedStyle(document.querySelector('p > .nqf-definition')).visibility === 'hidden'")
    page.keyboard.press("Tab")  # the preset of the line below the title
    while not link.evaluate("link => link === document.activeElement"):
        page.keyboard.press("Tab")
    assert definition.is_visible()
    page.keyboard.press("Escape")
    assert not definition.is_visible()
    assert page.errors == []
