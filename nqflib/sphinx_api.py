"""API pages from docstrings that were written to be read in an editor, not as reStructuredText.

Docstrings here hold formulas with stars, bars and trailing underscores, single backticks around code, and indented
blocks that must keep their line breaks. Before autodoc and napoleon see a docstring, its text is escaped, single
backticks become literals, and indented blocks become literal blocks; the sections (Args, Returns, Raises) stay.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Example|Examples|Environment):$")
_BEFORE_NAPOLEON = 400


def escape(line: str) -> str:
    """Escape what reStructuredText would read as markup, outside of backticks; code in backticks becomes a literal."""
    parts = line.replace("``", "`").split("`")
    if len(parts) % 2 == 0:  # an odd backtick is text
        parts = ["".join(parts)]
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"``{part}``"
        else:
            part = re.sub(r"([\\*|])", r"\\\1", part)
            parts[i] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", part)
    return "".join(parts)


def to_rst(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText that napoleon can read."""
    result: list[str] = []
    in_section = literal = False
    for line in lines:
        indented = line.startswith("    ")
        if line.strip() and not indented:
            in_section, literal = bool(_SECTION.fullmatch(line)), False
        if indented and not in_section and not literal and not (result and result[-1].strip()):
            result += ["::", ""]
            literal = True
        result.append(line if literal or not line.strip() else escape(line))
    return result


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the conversion ahead of napoleon."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", _process, priority=_BEFORE_NAPOLEON)
    app.setup_extension("sphinx.ext.napoleon")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
