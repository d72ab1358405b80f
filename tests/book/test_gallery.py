"""The gallery in a real Sphinx build: one card a page, whatever the page lacks."""

import pytest
from nbformat.v4 import new_markdown_cell
from small_site import ALT, build, figure_cell, recorded, soup, text, write_notebook

from nqflib import ledger

pytestmark = pytest.mark.book
CLAIMS = """\
title: First
order: 1
claims:
  - {id: small, paper: nqf, place: here, claim: It is small., paper_value: no number,
     quantity: error, spread: exact,
     rule: {kind: at_most, bound: 1, reason: r}, expected: {laptop: {verdict: reproduced, reason: r}}}
  - {id: large, paper: nqf, place: here, claim: It is large., paper_value: no number,
     quantity: error, spread: exact,
     rule: {kind: at_least, bound: 1, reason: r}, expected: {laptop: {verdict: contradicted, reason: r}}}
  - {id: tiny, paper: nqf, place: here, claim: It is tiny., paper_value: no number,
     quantity: error, spread: exact,
     rule: {kind: at_most, bound: 0.5, reason: r}, expected: {laptop: {verdict: reproduced, reason: r}}}
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Three pages: with everything; run, but without figure, reason, claims and form; never run."""
    source = tmp_path_factory.mktemp("gallery") / "book"
    why = "Why it matters: a law with $x^2$ is known. Another sentence."
    first = [
        new_markdown_cell(f"# First page\n\n{why}\n\n```{{rerun}}\n```"),
        recorded(error=0.25),
        figure_cell("A caption."),
        figure_cell("Another.", name="other-words"),
    ]
    write_notebook(source, "nqf/first", first, order=2)
    write_notebook(source, "nqf/second", [new_markdown_cell("# Second page\n\nNothing.")], order=1)
    third = [new_markdown_cell("# Third page"), figure_cell("It falls by {num}`nqf/first#error`. More.", name="third")]
    write_notebook(source, "nqf/third", third, run=None, order=3)
    pages = "\n".join(["gallery", *(f"notebooks/nqf/{name}" for name in ("first", "second", "third"))])
    (source / "index.md").write_text(f"# Book\n\n```{{toctree}}\n{pages}\n```\n\n```{{bibliography}}\n```\n")
    (source / "gallery.md").write_text("# Gallery\n\n```{gallery} nqf\n```\n\n## Two\n\n```{gallery} quadratic\n```\n")
    folder = source.parent / "claims"
    (folder / "nqf").mkdir(parents=True)
    (folder / "nqf" / "first.yml").write_text(CLAIMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "claims_folder", lambda: folder)
        output, warnings = build(source)
        gallery = soup(output / "gallery.html")
        (folder / "nqf" / "first.yml").write_text("title: First\n")
        broken = build(source)[1]
    assert warnings == ""
    return output, gallery, broken


@pytest.fixture(scope="module")
def cards(book):
    return book[1].select("ul.nqf-gallery > li")


def test_cards_stand_in_the_order_of_the_book_and_lead_to_their_pages(cards):
    links = [card.select_one(".nqf-card-title a") for card in cards]
    assert [text(link) for link in links] == ["Second page", "First page", "Third page"]
    assert [link["href"] for link in links] == [f"notebooks/nqf/{name}.html" for name in ("second", "first", "third")]


def test_a_card_shows_the_first_figure_by_the_files_of_its_page(book, cards):
    images = cards[1].select("img")
    assert [(image["class"], image["alt"], image["loading"]) for image in images] == [
        (["only-light"], ALT, "lazy"),
        (["only-dark"], ALT, "lazy"),
    ]
    page = book[0] / "notebooks" / "nqf" / "first.html"
    theirs = [(page.parent / image["src"]).resolve() for image in soup(page).select("figure#two-words img")]
    assert [(book[0] / image["src"]).resolve() for image in images] == theirs
    assert all(file.exists() for file in theirs)


def test_a_card_says_why_the_page_matters_what_came_out_and_how_long_it_took(cards):
    assert [text(line) for line in cards[1].select("p")] == [
        "First page",
        r"A law with \(x^2\) is known.",
        "Claims: ✓ 2 reproduced · ✗ 1 contradicted",
        "Its run took 75 s · Rerun",
    ]


def test_a_card_leads_to_the_form_of_its_page(book, cards):
    address, anchor = cards[1].select_one(".nqf-card-foot a")["href"].split("#")
    assert "nqf-rerun" in soup(book[0] / address).select_one(f"#{anchor}")["class"]


def test_a_page_without_figure_claims_or_form_and_one_that_was_not_run_have_cards(cards):
    assert [text(line) for line in cards[0].select("p")] == ["Second page", "Its run took 75 s"]
    assert not cards[0].select("img")
    assert [text(line) for line in cards[2].select("p")] == ["Third page", "It falls by 0.25.", "Not run yet"]


def test_a_part_without_pages_says_so(book):
    assert "No page of the part quadratic has been run yet." in text(book[1])


def test_a_ledger_that_cannot_be_read_is_a_warning(book):
    assert "{gallery}: nqf/first.yml: claims is missing" in book[2]
