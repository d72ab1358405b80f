"""A figure that the reader's browser computes: a script of the site solves and draws in place of a still figure.

    show_live(draw, "live-staircase", widget="staircase", content={...}, alt=..., data=...)

`draw` is the figure at the starting values, as in `nqflib.figures.show`: it stands in print, in a notebook editor and
without scripts. On the site, `book/_static/live_<widget>.js` finds `<div class="nqf-<widget>">` with `content` as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nqflib import figures
from nqflib.figures import Columns, Draw

WIDGETS = ("staircase",)
LARGEST = 250_000  # bytes of JSON in a page


def show_live(
    draw: Draw,
    name: str,
    *,
    widget: str,
    content: Mapping[str, Any],
    alt: str,
    data: Columns | Mapping[str, Columns] | None = None,
    size: tuple[float, float] = (6.4, 4.0),
) -> None:
    """Display a live figure; `widget` and `content` as in the module's text, the others as in `figures.show`.

    Raises:
        ValueError: there is no such widget, or `content` is more than 250 kB, or what `figures.show` raises.
    """
    from IPython.display import display

    bundle = render(draw, name, widget=widget, content=content, alt=alt, data=data, size=size)
    display(bundle, metadata={"nqf": {"figure": name}}, raw=True)


def render(
    draw: Draw,
    name: str,
    *,
    widget: str,
    content: Mapping[str, Any],
    alt: str,
    data: Columns | Mapping[str, Columns] | None = None,
    size: tuple[float, float] = (6.4, 4.0),
) -> dict[str, Any]:
    """The output of `show_live` as a dict from mime type to content: that of a figure, with `live` in its content."""
    if widget not in WIDGETS:
        raise ValueError(f"there is no widget {widget!r}. Valid: {', '.join(WIDGETS)}")
    length = len(json.dumps(content, separators=(",", ":")))
    if length > LARGEST:
        raise ValueError(f"{name!r} has {length / 1e3:.0f} kB of numbers, more than {LARGEST / 1e3:.0f}; use fewer")
    bundle = figures.render(draw, name, alt=alt, data=data, size=size)
    bundle[figures.FIGURE_MIME]["live"] = {"widget": widget, "content": dict(content)}
    return bundle
