"""Books of a few pages for the tests of the Sphinx extension, built in a second."""

import io
import re

import nbformat
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_notebook, new_output
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from nqflib.figures import pipe_table, render

ALT = "Two marks, one above the other."
RUN = {
    "commit": "0123456789+",
    "preset": "laptop",
    "parameters": {"preset": "laptop", "eps": 1e-8, "rates": [1.0, 0.5]},
    "given": {"preset": "laptop"},
    "seconds": 75.0,
    "date": "2026-08-01T12:00:00+00:00",
    "versions": {"torch": "2.13.0+cpu", "numpy": "2.4.6"},
}


def two_words(figure):
    figure.text(0.3, 0.3, "one")
    figure.text(0.6, 0.6, "two")


def figure_cell(caption, name="two-words", data=None):
    bundle = render(two_words, name, alt=ALT, data=data)
    output = new_output("display_data", data=bundle, metadata={"nqf": {"figure": name}})
    metadata = {} if caption is None else {"figure": {"caption": caption}}
    return new_code_cell("show(two_words)", outputs=[output], metadata=metadata)


def table_cell():
    content = {
        "name": "tab-a",
        "caption": "Halves, as {cite:t}`ziyin2026nqf` says;\nsee {numref}`two-words`.",
        "header": ["k", "$t$"],
        "align": ["right", "left"],
        "rows": [["1", "a | b"]],
        "csv": {"tab-a": "k,t\n1,a | b\n"},
    }
    text = pipe_table(content["header"], content["align"], content["rows"])
    data = {"application/vnd.nqf.table+json": content, "text/markdown": text, "text/plain": text}
    return new_code_cell(
        "show_table()", outputs=[new_output("display_data", data=data, metadata={"nqf": {"table": "tab-a"}})]
    )


def recorded(**values):
    prefix = "application/papermill.record/"
    outputs = [
        new_output(
            "display_data",
            data={f"{prefix}text/plain": repr(value)},
            metadata={"scrapbook": {"name": name, "mime_prefix": prefix}, "nqf": {"quantity": True}},
        )
        for name, value in values.items()
    ]
    return new_code_cell("record()", outputs=outputs)


def write_notebook(source, page, cells, run=RUN, order=1):
    path = source / "notebooks" / f"{page}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    block = {"part": "nqf", "order": order, **({"run": run} if run else {})}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel, "nqf": block}), path)


def build(source, theme="basic", options=None):
    """Build the pages below a folder; return the output folder and the warnings."""
    settings = {
        "extensions": ["myst_nb", "sphinxcontrib.bibtex", *([theme] if theme != "basic" else []), "nqflib.sphinx_ext"],
        "html_theme": theme,
        "html_theme_options": options or {},
        "nb_execution_mode": "off",
        "nb_render_markdown_format": "myst",
        "myst_enable_extensions": ["dollarmath", "colon_fence"],
        "bibtex_bibfiles": ["references.bib"],
        "numfig": True,
        "nitpicky": True,
    }
    (source / "references.bib").write_text("@misc{ziyin2026nqf, author={Ziyin, Liu}, title={T}, year={2026}}")
    warnings = io.StringIO()
    output = source.parent / f"{source.name}-built" / "html"
    folders = [str(source), None, str(output), str(output.parent / "trees")]
    with patch_docutils(), docutils_namespace():
        Sphinx(*folders, "html", settings, status=None, warning=warnings).build()
    return output, re.sub("\x1b\\[[0-9;]*m", "", warnings.getvalue())


def small_book(folder, *cells, prose=""):
    """A book of one prose page and, if there are cells, one notebook `nqf/first`; built as `build` does."""
    source = folder / "book"
    source.mkdir()
    toctree = "```{toctree}\nnotebooks/nqf/first\n```" if cells else ""
    if cells:
        write_notebook(source, "nqf/first", cells)
    (source / "index.md").write_text(f"# Book\n\n{prose}\n\n{toctree}\n\n```{{bibliography}}\n```\n")
    return build(source)


def soup(path):
    return BeautifulSoup(path.read_text("utf-8"), "html.parser")


def text(element):
    return " ".join(element.get_text().split())
