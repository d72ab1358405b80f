"""The Sphinx extension of the book: numbers of the run in the text, the boxes of a page, links that lead somewhere.

    {num}`fig3_half_time_error:.2%`                    a quantity that this page recorded
    {num}`nqf/fig3_features#fig3_half_times[0]:.3g`    a quantity of another page

    {claims-box}   the claims of this page          {scoreboard}   the claims of all pages
    {rerun}        how to run this page again       {run-table}    when and how every page was run
    {gallery} nqf  a card for every page of a part

Only the API of Sphinx, docutils and myst-nb is used, so that the book also builds without Jupyter Book.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from nqflib import sphinx_gallery, sphinx_glossary, sphinx_links, sphinx_times
from nqflib.executed import NOTEBOOKS, cells, executed_runs, run_metadata
from nqflib.quantities import read_quantities
from nqflib.serve import form
from nqflib.sphinx_figures import RUN_TABLE, duration, missing_run_table, short_version

LOGGER = logging.getLogger(__name__)

_NUM = re.compile(r"(?:(?P<page>[\w/.-]+)#)?(?P<name>[a-z]\w*)(?:\[(?P<index>-?\d+)\])?(?::(?P<spec>.+))?")
_EXPONENT = re.compile(r"(?P<mantissa>.*\d)e(?P<sign>[+-])0*(?P<exponent>\d+)")


class NumberRole(SphinxRole):
    """`{num}`: a recorded quantity with a format specification, `.3g` by default."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            return typeset(self._formatted()), []
        except (ValueError, LookupError, OSError) as error:
            warn(f"{{num}}`{self.text}`: {error}", self.get_location(), "num")
            return [nodes.inline("", f"{self.text}?", classes=["nqf-missing"])], []

    def _formatted(self) -> str:
        match = _NUM.fullmatch(self.text.strip())
        if not match:
            raise ValueError("write name, name:.3g, name[0]:.3g or part/page#name:.3g")
        path = self._notebook(match["page"])
        self.env.note_dependency(str(path))
        known = quantities(path)
        if match["name"] not in known:
            raise LookupError(f"{path.stem} did not record it. Recorded: {', '.join(sorted(known)) or 'nothing'}")
        value = known[match["name"]]
        if match["index"] is not None:
            if not isinstance(value, list):
                raise ValueError(f"{match['name']} is one value, not a list")
            value = value[int(match["index"])]
        return format_quantity(value, match["spec"])

    def _notebook(self, page: str | None) -> Path:
        path = Path(self.env.srcdir, NOTEBOOKS, f"{page}.ipynb") if page else Path(self.env.doc2path(self.env.docname))
        if path.suffix != ".ipynb":
            raise ValueError("this page is not a notebook; name one, as in part/page#name")
        if not path.exists():
            raise ValueError(f"there is no executed notebook {NOTEBOOKS}/{page}.ipynb")
        return path


def format_quantity(value: Any, spec: str | None) -> str:
    """A quantity as text. An outcome without a number ("diverged at step 37") stands for itself, whatever the format.

    Raises:
        ValueError: the specification does not fit the value.
    """
    if isinstance(value, list):
        return ", ".join(format_quantity(item, spec) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return format(value, spec or ("d" if isinstance(value, int) else ".3g"))


def typeset(text: str) -> list[nodes.Node]:
    """Numbers as they are printed: `-1.2e-05` becomes −1.2 × 10⁻⁵, lists keep their commas."""
    found: list[nodes.Node] = []
    for i, word in enumerate(text.split(", ")):
        if i:
            found.append(nodes.Text(", "))
        if not re.fullmatch(r"[-+]?[\d,.]+(e[+-]\d+)?%?", word):
            found.append(nodes.Text(word))
            continue
        match = _EXPONENT.fullmatch(word)
        found.append(nodes.Text((match["mantissa"] if match else word).replace("-", "−")))
        if match:
            exponent = ("−" if match["sign"] == "-" else "") + match["exponent"]
            found += [nodes.Text("\u00a0×\u00a010"), nodes.superscript("", exponent)]
    return found


def quantities(path: Path) -> dict[str, Any]:
    """The recorded quantities of an executed notebook; read once as long as the file does not change."""
    return _quantities(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _quantities(path: Path, changed: int) -> dict[str, Any]:
    return read_quantities(path)


def warn(message: str, location: Any, subtype: str) -> None:
    """A Sphinx warning of ours; with `-W` it fails the build."""
    LOGGER.warning("%s", message, location=location, type="nqf", subtype=subtype)


class MystDirective(SphinxDirective):
    """A directive that writes MyST text and lets the page's own parser read it."""

    def parse(self, text: str) -> list[nodes.Node]:
        holder = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), source=self.get_source_info()[0]), 0, holder)
        return list(holder.children)

    def page(self) -> str:
        """`part/name` of the notebook that stands here."""
        return self.env.docname.removeprefix(f"{NOTEBOOKS}/")

    def render(self, write: Callable[[], str]) -> list[nodes.Node]:
        """Parse what `write` returns; what it refuses becomes a warning of the build."""
        try:
            return self.parse(write())
        except ValueError as error:  # LedgerError is one
            warn(f"{{{self.name}}}: {error}", self.get_location(), self.name)
            return []


class ClaimsBox(MystDirective):
    """`{claims-box}`: the claims of this page, or of the page named as argument, with their verdicts."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        from nqflib.ledger import claims_folder
        from nqflib.reference import reference_file
        from nqflib.scoreboard import render_box

        page = self.arguments[0] if self.arguments else self.page()
        self.env.note_dependency(str(reference_file(page)))
        self.env.note_dependency(str(claims_folder() / f"{page}.yml"))
        self.env.note_dependency(str(Path(self.env.srcdir, NOTEBOOKS, f"{page}.ipynb")))
        return self.render(lambda: render_box(page, Path(self.env.srcdir)))


class Scoreboard(MystDirective):
    """`{scoreboard}`: every claim of both papers beside what was measured."""

    def run(self) -> list[nodes.Node]:
        from nqflib.scoreboard import render_scoreboard

        self.env.note_reread()  # it depends on every page and every file of the ledger
        return self.render(lambda: render_scoreboard(Path(self.env.srcdir)))


class Rerun(MystDirective):
    """`{rerun}`: the commands that run this page again; its argument is the parameters to show, `eps=1e-8 seed=1`."""

    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.doc2path(self.env.docname))
        box = self.render(lambda: self._text(run_metadata(path), cells(path)))
        for admonition in (node for node in box if isinstance(node, nodes.admonition)):
            admonition["ids"].append(sphinx_gallery.rerun_id(self.page()))
        return box

    def _text(self, run: dict[str, Any], cells: list[dict[str, Any]]) -> str:
        given = self._given(run)
        unquoted = " ".join(f"{name}={value}" for name, value in given.items())
        assignments = f' P="{unquoted}"' if given else ""
        flags = "".join(f" {papermill_flag(name, value)}" for name, value in given.items())
        cost = f" This run took {duration(run['seconds'])} at preset `{run['preset']}`." if "seconds" in run else ""
        page = self.page()
        # A script of the site turns this into the form, and lets the commands follow it.
        html = form.embedded(page, cells, run.get("given", {}))
        fields = f"````{{raw}} html\n{html}\n````\n\n" if html else ""
        return (
            ":::{admonition} Rerun this page\n:class: nqf-rerun\n\n"
            f"Every parameter of the cell marked *defaults* above can be changed.{cost}\n\n{fields}"
            f"```bash\nmake figure F={page}{assignments}\n```\n\n"
            "or, with papermill alone,\n\n"
            f"```bash\npapermill notebooks/{page}.md out.ipynb{flags}\n```\n\n" + "\n".join(self.content) + "\n:::"
        )

    def _given(self, run: dict[str, Any]) -> dict[str, str]:
        """The parameters to show: those of the argument, else the first one of the page with its value here."""
        if self.arguments:
            words = [word.partition("=") for word in shlex.split(self.arguments[0])]
            if not all(equals for _, equals, _ in words):
                raise ValueError(f"write parameters as name=value, got {self.arguments[0]!r}")
            given = {name: _one_word(value) for name, _, value in words}
            unknown = set(given) - set(run.get("parameters", given))
            if unknown:
                raise ValueError(f"{self.page()} has no parameter {', '.join(sorted(unknown))}")
            return given
        own = {name: value for name, value in run.get("parameters", {}).items() if name != "preset"}
        return {name: _one_word(str(value)) for name, value in list(own.items())[:1] if value is not None}


def _one_word(value: str) -> str:
    """A list without blanks: make splits P at blanks."""
    return value.replace(" ", "") if value.startswith("[") else value


def papermill_flag(name: str, value: str) -> str:
    """The option of papermill that sets a parameter: `-p name value`, or YAML where the value is a list."""
    try:
        plain = not isinstance(ast.literal_eval(value), list | tuple | dict)
    except (ValueError, SyntaxError):
        plain = True
    return f"-p {name} {value}" if plain else f'-y "{name}: {value}"'


class RunTable(MystDirective):
    """`{run-table}`: every executed page with preset, duration, date, commit and versions."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # it depends on every page
        return self.render(self._text)

    def _text(self) -> str:
        runs = executed_runs(Path(self.env.srcdir), self.env.found_docs)
        header = "| Page | Preset | Time | Date | Commit | Versions |\n| :-- | :-- | --: | :-- | :-- | :-- |"
        rows = [self._row(docname, run) for docname, run in runs]
        total = duration(sum(run.get("seconds", 0.0) for _, run in runs))
        caption = self.options.get(
            "caption", f"The {len(runs)} notebooks of this book took {total} to run, one by one."
        )
        return "\n".join([f"::::{{table}} {caption}", f":name: {RUN_TABLE}", "", header, *rows, "::::"])

    def _row(self, docname: str, run: dict[str, Any]) -> str:
        given = {name: value for name, value in run.get("given", {}).items() if name != "preset"}
        preset = run.get("preset", "") + "".join(f", `{name}={value}`" for name, value in given.items())
        versions = ", ".join(f"{name} {short_version(version)}" for name, version in run.get("versions", {}).items())
        time = duration(run["seconds"]) if "seconds" in run else "–"
        commit = sphinx_links.commit_link(self.config, run.get("commit", ""))
        cells = [f"{{doc}}`/{docname}`", preset, time, run.get("date", "")[:10], commit, versions]
        return "| " + " | ".join(cell.replace("|", "\\|") or "–" for cell in cells) + " |"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register everything with Sphinx."""
    app.add_role("num", NumberRole())
    app.add_directive("claims-box", ClaimsBox)
    app.add_directive("scoreboard", Scoreboard)
    app.add_directive("rerun", Rerun)
    app.add_directive("run-table", RunTable)
    app.connect("missing-reference", missing_run_table)
    sphinx_links.connect(app)
    sphinx_gallery.connect(app)
    sphinx_times.connect(app)
    sphinx_glossary.connect(app)
    return {"env_version": _env_version(), "parallel_read_safe": True, "parallel_write_safe": True}


def _env_version() -> int:
    """A number that changes with the code: Sphinx then reads every page anew instead of reusing the last parse."""
    ours = ("ext", "figures", "gallery", "glossary", "times")
    names = (*(f"sphinx_{name}" for name in ours), "executed", "scoreboard", "claims", "figures", "serve/form")
    code = b"".join((Path(__file__).parent / f"{name}.py").read_bytes() for name in names)
    return int.from_bytes(hashlib.sha256(code).digest()[:6], "big")
