"""The gallery of the book: a card for every notebook page, with its first figure and what its run said.

    {gallery} nqf      the cards of one part, in the order of the book

Cards are filled when all pages have been read: the picture is the page's own file, in both themes, and the sentence is
the page's own. Nothing in a card is written by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from nqflib.executed import NOTEBOOKS, executed_runs
from nqflib.scoreboard import SIGNS, count_verdicts
from nqflib.sphinx_figures import duration

LOGGER = logging.getLogger(__name__)
WHY = "Why it matters: "  # how every page begins


class cards(nodes.General, nodes.Element):
    """Stands for the cards of a part until all pages have been read."""


class Gallery(SphinxDirective):
    """`{gallery}`: the cards of the pages of one part."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # it depends on every page
        return [cards(part=self.arguments[0])]


def connect(app: Sphinx) -> None:
    """Register the directive and the handler that fills it."""
    app.add_directive("gallery", Gallery)
    app.connect("doctree-resolved", fill)


def fill(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Handler of `doctree-resolved`: put the cards where the directive stood."""
    for place in list(doctree.findall(cards)):
        runs = [
            (name, run)
            for name, run in executed_runs(Path(app.srcdir), app.env.found_docs)
            if name.startswith(f"{NOTEBOOKS}/{place['part']}/")
        ]
        items = [nodes.list_item("", *_card(app, docname, name, run)) for name, run in runs]
        empty = nodes.paragraph("", f"No page of the part {place['part']} has been run yet.")
        place.replace_self(nodes.bullet_list("", *items, classes=["nqf-gallery"]) if items else empty)


def rerun_id(page: str) -> str:
    """The anchor of the box “Rerun this page”, unique in a book on one page too."""
    return nodes.make_id(f"rerun-{page}")


def _card(app: Sphinx, here: str, docname: str, run: dict[str, Any]) -> list[nodes.Node]:
    page = docname.removeprefix(f"{NOTEBOOKS}/")
    tree = app.env.get_doctree(docname)
    address = app.builder.get_relative_uri(here, docname)
    title = app.env.titles[docname].astext()
    link = nodes.reference("", title, internal=True, refuri=address)
    card = [
        *_thumbnail(tree, lazy=app.builder.name != "singlehtml"),
        nodes.paragraph("", "", link, classes=["nqf-card-title"]),
    ]
    sentence = _sentence(tree)
    if sentence:
        card.append(nodes.paragraph("", "", *sentence))
    claims = _claims(page, app)
    if claims:
        card.append(nodes.paragraph("", claims, classes=["nqf-card-claims"]))
    ran = f"Its run took {duration(run['seconds'])}" if "seconds" in run else "Not run yet"
    foot = nodes.paragraph("", ran, classes=["nqf-card-foot"])
    anchor = rerun_id(page)
    if any(anchor in box["ids"] for box in tree.findall(nodes.admonition)):
        again = nodes.reference("", "Rerun", internal=True, refuri=f"{address}#{anchor}", reftitle=f"Rerun: {title}")
        foot += [nodes.Text(" · "), again]
    return [*card, foot]


def _claims(page: str, app: Sphinx) -> str:
    """The verdicts of a page in words; a ledger that cannot be read is a warning, as in the box of the page."""
    try:
        counts = count_verdicts(page, Path(app.srcdir))
    except ValueError as error:  # LedgerError is one
        LOGGER.warning("{gallery}: %s", error, type="nqf", subtype="gallery")
        return ""
    words = [f"{SIGNS[verdict]}\u00a0{number}\u00a0{verdict}" for verdict, number in counts.items()]
    return f"Claims: {' · '.join(words)}" if words else ""


def _thumbnail(tree: nodes.document, lazy: bool) -> list[nodes.Node]:
    """The first figure of a page in both themes, if it has one.

    A browser loads a lazy picture when it comes near the window, and in one theme; the book on one page goes to paper.
    """
    for figure in tree.findall(nodes.figure):
        if "nqf-figure" in figure["classes"]:
            images = [image.deepcopy() for image in figure.findall(nodes.image)]
            for image in images if lazy else ():
                image["loading"] = "lazy"
            return [nodes.container("", *images, classes=["nqf-thumbnail", "nqf-themes"])]
    return []


def _sentence(tree: nodes.document) -> list[nodes.Node]:
    """Why the page matters, as it says itself, else the first sentence of its first caption; empty without either."""
    for paragraph in tree.findall(nodes.paragraph):
        if paragraph.astext().startswith(WHY):
            first, *rest = paragraph.children
            text = first.astext().removeprefix(WHY)
            return _first_sentence([nodes.Text(text[:1].upper() + text[1:]), *rest])
    for caption in tree.findall(nodes.caption):
        return _first_sentence(caption.children)
    return []


def _first_sentence(children: list[nodes.Node]) -> list[nodes.Node]:
    """Copies of formulas and powers, the text of everything else (links of another page lead nowhere here)."""
    kept: list[nodes.Node] = []
    for child in children:
        if isinstance(child, nodes.math | nodes.superscript):
            kept.append(child.deepcopy())
            continue
        text, stop, _ = child.astext().partition(". ")
        kept.append(nodes.Text(text + stop.strip()))
        if stop:
            break
    return kept
