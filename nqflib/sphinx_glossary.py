"""The definition of a term beside every link to it: `{term}`abundance`` shows it under pointer and keyboard.

The link is described by its definition (`aria-describedby`), which the style sheet shows while the link has the pointer
or the focus; `book/_static/glossary.js` lets Escape hide it. Without either, the link leads to the glossary as ever.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

GLOSSARY = "term"  # type of the objects that the {glossary} directive declares


class html_element(nodes.Inline, nodes.TextElement):
    """An inline element of HTML with attributes that docutils has no words for."""


def connect(app: Sphinx) -> None:
    """Register the node and the handler of this module."""
    app.add_node(html_element, html=(_open, _close))
    app.connect("doctree-resolved", describe)


def describe(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Handler of `doctree-resolved`: put its definition behind every link to a term."""
    if app.builder.name not in ("html", "dirhtml"):  # on paper nothing shows under a pointer
        return
    links = [link for link in doctree.findall(nodes.reference) if _is_term(link)]
    definitions = _definitions(app.env) if links else {}
    for i, link in enumerate(links):
        definition = definitions.get(link.get("refuri", "").rpartition("#")[2])
        if definition is None:  # a link within the glossary
            continue
        name = f"definition-{i}-{nodes.make_id(docname)}"
        attributes = {"href": link["refuri"], "aria-describedby": name}
        classes = ["reference", "internal", "nqf-term"]
        term = html_element("", "", *link.children, tag="a", html=attributes, classes=classes)
        shown = html_element("", "", *_inline(definition), tag="span", html={"role": "tooltip"})
        shown["ids"], shown["classes"] = [name], ["nqf-definition"]
        link.replace_self([term, shown])
        if next(shown.findall(nodes.math), None) is not None:
            # Sphinx loads MathJax for the pages that had formulas when they were read.
            app.env.get_domain("math").data["has_equations"][docname] = True


def term_link(term: str, docname: str) -> addnodes.pending_xref:
    """A link to a term that becomes plain text in a book without a glossary."""
    return addnodes.pending_xref(
        "",
        nodes.inline("", term, classes=["xref", "std", "std-term"]),
        refdomain="std",
        reftype=GLOSSARY,
        reftarget=term,
        refexplicit=False,
        refwarn=False,
        refdoc=docname,
        nqf_optional=True,
    )


def _is_term(link: nodes.reference) -> bool:
    return any(isinstance(child, nodes.Element) and "std-term" in child["classes"] for child in link.children)


def _definitions(env: BuildEnvironment) -> dict[str, nodes.paragraph]:
    """The first paragraph of every definition, by the anchor of its term."""
    declared = env.get_domain("std").data["objects"]
    pages = {docname for (kind, _), (docname, _) in declared.items() if kind == GLOSSARY}
    found = {}
    for page in sorted(pages):
        for item in env.get_doctree(page).findall(nodes.definition_list_item):
            first = next(item.findall(nodes.paragraph), None)
            anchors = [anchor for term in item.findall(nodes.term) for anchor in term["ids"]]
            if first is not None:
                found |= dict.fromkeys(anchors, first)
    return found


def _inline(paragraph: nodes.paragraph) -> list[nodes.Node]:
    """A copy of what a definition says; its own links become text, since a tooltip cannot be entered."""
    return [
        nodes.Text(child.astext()) if isinstance(child, nodes.reference | addnodes.pending_xref) else child.deepcopy()
        for child in paragraph.children
    ]


def _open(self: Any, node: html_element) -> None:
    self.body.append(self.starttag(node, node["tag"], "", **node["html"]))


def _close(self: Any, node: html_element) -> None:
    self.body.append(f"</{node['tag']}>")
