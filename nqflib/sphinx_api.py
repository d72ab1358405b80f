"""API pages from docstrings that were written to be read in an editor, not as reStructuredText.

Docstrings here hold formulas with stars, bars and trailing underscores, single backticks around code, and indented
blocks that must keep their line breaks. Before autodoc and napoleon see a docstring, its text is escaped, single
backticks become literals, and indented blocks become literal blocks; the sections (Args, Returns, Raises) stay.
"""

from __future__ import annotations

import re
from typing import Any

from numpy.typing import ArrayLike
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

from nqflib.arguments import Array

_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Example|Examples|Environment):$")
_BEFORE_NAPOLEON = 400


def escape(line: str) -> str:
    """Escape what reStructuredText would read as markup, outside of backticks; code in backticks becomes a literal."""
    parts = line.replace("``", "`").split("`")
    if len(parts) % 2 == 0:  # an odd backtick is text
        parts = ["".join(parts)]
    for i, part in enumerate(parts):
        if i % 2:
            glued = re.match(
                r"[^\s.,;:!?)\]}'\"/-]", parts[i + 1]
            )  # `scale`^2: a literal must end before a blank or a stop
            parts[i] = f"``{part}``" + ("\\ " if glued else "")
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
    lines[:] = [] if re.match("Alias for field number", "".join(lines)) else to_rst(lines)


def _shorten(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Handler of `autodoc-process-signature`: types of NumPy by the names that the code gives them."""
    return signature and name_types(signature), returned and name_types(returned)


def name_types(signature: str) -> str:
    """A signature with `ArrayLike` and `Array` where Sphinx wrote out what they stand for, which is a line long."""
    for alias, written in (("ArrayLike", ArrayLike), ("Array", Array)):
        signature = signature.replace(stringify_annotation(written, "smart"), alias)
    return signature


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the conversion ahead of napoleon."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", _process, priority=_BEFORE_NAPOLEON)
    app.connect("autodoc-process-signature", _shorten)
    app.setup_extension("sphinx.ext.napoleon")
    app.setup_extension("sphinx.ext.autosummary")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
