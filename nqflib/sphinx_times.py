"""How long a notebook page takes to read and took to run, below its title. Both are computed when the site is built."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from nqflib.executed import NOTEBOOKS, run_metadata
from nqflib.sphinx_figures import duration
from nqflib.sphinx_glossary import term_link

WORDS_A_MINUTE = 200
# Not read word by word: code and what it printed, formulas, the form, the line below a figure.
_SKIPPED = (nodes.literal_block, nodes.raw, nodes.math, nodes.math_block, nodes.comment, nodes.Invisible)
_SKIPPED_CLASSES = {"nqf-rerun", "nqf-foot"}


def connect(app: Sphinx) -> None:
    """Connect the handler of this module."""
    app.connect("doctree-read", add_times)


def add_times(app: Sphinx, doctree: nodes.document) -> None:
    """Handler of `doctree-read`: say below the title of a notebook what it costs to read it, and cost to run it."""
    docname = app.env.docname
    title = next(iter(doctree.findall(nodes.title)), None)
    if title is None or not isinstance(title.parent, nodes.section) or not docname.startswith(f"{NOTEBOOKS}/"):
        return
    before, preset, after = times(count_words(doctree), run_metadata(Path(app.env.doc2path(docname)))).partition(
        "preset"
    )
    said = [nodes.Text(before), *([term_link(preset, docname)] if preset else []), nodes.Text(after)]
    # Not a bare paragraph: the first one of a page is its own.
    title.parent.insert(1, nodes.container("", nodes.paragraph("", "", *said), classes=["nqf-times"]))


def times(words: int, run: dict[str, Any]) -> str:
    """`7 min to read · 28 s to run at preset laptop`, with what is known of the run."""
    reading = f"{max(1, math.ceil(words / WORDS_A_MINUTE))} min to read"
    if "seconds" not in run:
        return reading
    preset = f" at preset {run['preset']}" if run.get("preset") else ""
    return f"{reading} · {duration(run['seconds'])} to run{preset}"


def count_words(page: nodes.Node) -> int:
    """The words that stand open on a page, captions and claims included; numbers of a table are looked up, not read."""
    return sum(any(map(str.isalpha, word)) for text in _prose(page) for word in text.split())


def _prose(node: nodes.Node) -> Iterable[str]:
    if isinstance(node, nodes.Text):
        yield str(node)
    if (
        isinstance(node, nodes.Element)
        and not isinstance(node, _SKIPPED)
        and not _SKIPPED_CLASSES & set(node["classes"])
    ):
        # The reasons of a claim are folded.
        folded = nodes.bullet_list if "claim" in node["classes"] else ()
        for child in node.children:
            if not isinstance(child, folded):
                yield from _prose(child)
