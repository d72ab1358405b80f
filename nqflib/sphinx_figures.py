"""Figures and tables of `nqflib.figures` as nodes of the book.

myst-nb finds `OutputRenderer` through the entry point group `myst_nb.mime_renderers`. It turns one output into a
numbered figure (both themes, alternative text, caption, downloads, where the numbers come from) or a numbered table.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

from nqflib.figures import FIGURE_MIME, TABLE_MIME, pipe_table

LOGGER = logging.getLogger(__name__)
RUN_TABLE = "run-table"  # label that the {run-table} directive gives its table


class OutputRenderer:
    """The mime renderer plugin of myst-nb (see its `MimeRenderPlugin`)."""

    mime_priority_overrides = (("*", FIGURE_MIME, 1), ("*", TABLE_MIME, 1))

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        """Nodes of one content of an output, or None to leave it to myst-nb.

        All contents of an output are rendered before one is chosen, so the fallbacks of our own outputs (PNG,
        Markdown, text) are dropped here, or each PNG would be written twice.
        """
        if inline:
            return None
        if data.mime_type == FIGURE_MIME:
            return [_figure(renderer, data)]
        if data.mime_type == TABLE_MIME:
            return [_table(renderer, data)]
        return [] if {"figure", "table"} & set(data.output_metadata.get("nqf", {})) else None


def _figure(renderer: Any, data: Any) -> nodes.figure:
    content = data.content
    name = content["name"]
    files = {
        f"{name}.png": base64.b64decode(content["png"]),
        f"{name}.svg": content["svg_light"].encode(),
        f"{name}-dark.svg": content["svg_dark"].encode(),
        **{f"{stem}.csv": text.encode() for stem, text in content["csv"].items()},
    }
    uris = {file: _write(renderer, file, written) for file, written in files.items()}
    themes = [("only-light", f"{name}.svg"), ("only-dark", f"{name}-dark.svg")]
    # The theme hides a caption that is a sibling of an only-dark image, so the pair has its own box.
    box = nodes.container(classes=["nqf-themes"])
    box += [nodes.image(uri=uris[file], alt=content["alt"], classes=[theme]) for theme, file in themes]
    figure = nodes.figure("", *_explorer(content), box, classes=["nqf-figure"])
    # Where the figure belongs if anything complains about it; labels and warnings need both.
    figure.source, figure.line = renderer.source, data.line
    legend = _caption(renderer, data, name, figure)
    legend += _downloads(renderer, name, {file: uri for file, uri in uris.items() if file != f"{name}-dark.svg"})
    figure += nodes.legend("", *legend)
    figure["names"].append(nodes.fully_normalize_name(name))
    renderer.renderer.document.note_explicit_target(figure, figure)
    return figure


def _explorer(content: Mapping[str, Any]) -> list[nodes.Node]:
    """What the script of the site that draws a moving figure reads: `nqflib.explorer` or `nqflib.live`."""
    if "explorer" in content:
        kind, told = "explorer", content["explorer"]
    elif "live" in content:
        kind, told = content["live"]["widget"], content["live"]["content"]
    else:
        return []
    numbers = json.dumps(told, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    script = f'<script type="application/json">{numbers}</script>'
    return [nodes.raw("", f'<div class="nqf-{kind}">{script}</div>', format="html")]


def _caption(renderer: Any, data: Any, name: str, figure: nodes.figure) -> list[nodes.Node]:
    """Append the caption of the cell's metadata to the figure; return what follows its first paragraph."""
    text = _metadata(data.cell_metadata).get("caption")
    if isinstance(text, Mapping):
        text = text.get(name)
    if not isinstance(text, str) or not text.strip():
        LOGGER.warning(
            "figure %r has no caption: give its cell the metadata `figure: {caption: ...}`",
            name,
            location=(renderer.renderer.sphinx_env.docname, data.line),
            type="nqf",
            subtype="caption",
        )
        return []
    parsed = _parse(renderer, text, data.line)
    first, *rest = parsed
    if not isinstance(first, nodes.paragraph):
        LOGGER.warning(
            "the caption of figure %r must begin with a paragraph",
            name,
            location=(renderer.renderer.sphinx_env.docname, data.line),
            type="nqf",
            subtype="caption",
        )
        return parsed
    caption = nodes.caption(first.rawsource, "", *first.children)
    caption.source, caption.line = renderer.source, data.line
    figure += caption
    return rest


def _metadata(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    figure = cell.get("figure")
    return figure if isinstance(figure, Mapping) else {}


def _table(renderer: Any, data: Any) -> nodes.container:
    content = data.content
    # The colon fence: in a backtick fence the caption could not hold a role. It must be one line.
    caption = " ".join(content["caption"].split())
    body = pipe_table(content["header"], content["align"], content["rows"])
    text = f"::::{{table}} {caption}\n:name: {content['name']}\n:align: left\n\n{body}\n::::"
    uris = {f"{stem}.csv": _write(renderer, f"{stem}.csv", csv.encode()) for stem, csv in content["csv"].items()}
    foot = _downloads(renderer, content["name"], uris)
    return nodes.container("", *_parse(renderer, text, data.line), *foot, classes=["nqf-table"])


def _parse(renderer: Any, text: str, line: int | None) -> list[nodes.Node]:
    """MyST text in the context of the page: roles, citations and math work."""
    holder = nodes.Element()
    with renderer.renderer.current_node_context(holder):
        renderer.renderer.nested_render_text(text, line or 0)
    return list(holder.children)


def _write(renderer: Any, file: str, content: bytes) -> str:
    """Write a file of this page into the build's output folder; return the URI that Sphinx wants."""
    docname = renderer.renderer.sphinx_env.docname
    return renderer.write_file([*docname.split("/"), file], content, overwrite=True)


def _downloads(renderer: Any, name: str, uris: Mapping[str, str]) -> list[nodes.Node]:
    """The line below a figure or table: its files, then where its numbers come from."""
    line = nodes.paragraph(classes=["nqf-foot"])
    docname = renderer.renderer.sphinx_env.docname
    for i, (file, uri) in enumerate(uris.items()):
        path = PurePosixPath(file)
        # One of several tables is called by its own name: `CSV curves`.
        label = f"{path.suffix[1:].upper()} {path.stem.removeprefix(name)[1:]}".strip()
        line += nodes.Text(" · " if i else "")
        line += addnodes.download_reference(
            "", "", nodes.inline("", label), reftarget=uri, refdoc=docname, reftype="download"
        )
    stamp = run_stamp(renderer.renderer.nb_client.nb_metadata.get("nqf", {}).get("run", {}))
    if stamp:
        line += nodes.Text(" · " if uris else "")
        # Its first part leads to the table of runs; `missing_run_table` drops the link in a book without one.
        start, separator, rest = stamp.partition(" · ")
        link = addnodes.pending_xref(
            "",
            nodes.inline("", start),
            refdomain="std",
            reftype="ref",
            reftarget=RUN_TABLE,
            refexplicit=True,
            refwarn=False,
            refdoc=docname,
            nqf_optional=True,
        )
        line += nodes.inline("", "", link, nodes.Text(separator + rest), classes=["nqf-stamp"])
    return [line]


def missing_run_table(app: Any, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """Handler of `missing-reference`: an optional link whose target is absent becomes plain text."""
    return content if node.get("nqf_optional") else None


def run_stamp(run: Mapping[str, Any]) -> str:
    """What made a page in one line: `commit abc1234 · preset laptop · 12 s · torch 2.13 · numpy 2.4`."""
    versions = run.get("versions", {})
    given = {name: value for name, value in run.get("given", {}).items() if name != "preset"}
    parts = [
        f"commit {run['commit']}" if run.get("commit") else "",
        f"preset {run['preset']}" if run.get("preset") else "",
        f"with {', '.join(f'{name}={value}' for name, value in given.items())}" if given else "",
        duration(run["seconds"]) if "seconds" in run else "",
        *(f"{name} {short_version(versions[name])}" for name in ("torch", "numpy") if name in versions),
    ]
    return " · ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """Seconds as a reader says them: `0.4 s`, `12 s`, `2 min 5 s`, `1 h 20 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(whole / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def short_version(version: str) -> str:
    """`2.13.0+cpu` as `2.13`."""
    return ".".join(version.split("+")[0].split(".")[:2])
