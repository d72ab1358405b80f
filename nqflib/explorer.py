"""A figure that the reader moves: real runs, computed beforehand, behind one slider for each parameter.

    def frame(i, j):
        run = runs[i][j]
        return Frame([[(run.time, run.loss)]], f"switches on at t = {run.start:.3g}")

    explore(
        "loss-explorer",
        sliders=[Slider("initial size", ["0.1", "0.01"]), Slider("rate", ["1", "2", "4"], start=1)],
        panels=[Panel("time t", "loss L", [Series("network")], (0, 10), (1e-3, 1), y_log=True)],
        frame=frame,
        alt=...,
    )

`frame` is called once for every combination of the sliders' positions. The numbers travel in the page, to four digits,
and a script of the site draws them: no kernel, no network. Without the script, in print and in a notebook editor there
is the figure at the sliders' start.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from nqflib import figures
from nqflib.palette import INK, THEORY, Theme, colours

LARGEST = 250_000  # bytes of JSON in a page
Mark = Literal["line", "theory", "points", "bars"]
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Slider(NamedTuple):
    """One parameter: its name and the text of each position, in order."""

    label: str
    values: Sequence[str]
    start: int = 0


class Series(NamedTuple):
    """What one curve of a panel is called and how it is drawn; `color` is a slot of the palette, such as `MODE[0]`."""

    label: str
    color: str = INK
    mark: Mark = "line"


class Panel(NamedTuple):
    """One pair of axes; plain text in labels, since the page draws them (write σ, not a formula)."""

    x: str
    y: str
    series: Sequence[Series]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_log: bool = False
    y_log: bool = False


class Frame(NamedTuple):
    """What one combination of positions shows: x and y of every series of every panel, and a sentence about it."""

    curves: Sequence[Sequence[tuple[ArrayLike, ArrayLike]]]
    text: str


def explore(
    name: str,
    *,
    sliders: Sequence[Slider],
    panels: Sequence[Panel],
    frame: Callable[..., Frame],
    alt: str,
    size: tuple[float, float] = (6.4, 4.0),
) -> None:
    """Display a figure with sliders; arguments as in the module's text, the others as in `figures.show`.

    Raises:
        ValueError: a slider without positions or with a start outside of them, a frame that does not fit the panels,
            a range of a logarithmic axis that is not positive, or more than 250 kB of numbers.
    """
    from IPython.display import display

    bundle = render(name, sliders=sliders, panels=panels, frame=frame, alt=alt, size=size)
    display(bundle, metadata={"nqf": {"figure": name}}, raw=True)


def render(
    name: str,
    *,
    sliders: Sequence[Slider],
    panels: Sequence[Panel],
    frame: Callable[..., Frame],
    alt: str,
    size: tuple[float, float] = (6.4, 4.0),
) -> dict[str, Any]:
    """The output of `explore` as a dict from mime type to content: that of a figure, with `explorer` in its content."""
    _check(sliders, panels)
    positions = list(itertools.product(*(range(len(slider.values)) for slider in sliders)))
    frames = [_checked(frame(*at), panels, at) for at in positions]
    start = frames[positions.index(tuple(slider.start for slider in sliders))]
    content = _content(sliders, panels, frames)
    length = len(json.dumps(content, separators=(",", ":")))
    if length > LARGEST:
        raise ValueError(f"{name!r} has {length / 1e3:.0f} kB of numbers, more than {LARGEST / 1e3:.0f}; use fewer")
    bundle = figures.render(
        lambda figure: _draw(figure, panels, start),
        name,
        alt=alt,
        data=_columns(sliders, panels, positions, frames),
        size=size,
    )
    bundle[figures.FIGURE_MIME]["explorer"] = content
    return bundle


def scientific(value: float) -> str:
    """Two digits for a frame's sentence: 0.67, 3.6 × 10⁻³."""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.2g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(_RAISED)}"


def _check(sliders: Sequence[Slider], panels: Sequence[Panel]) -> None:
    if not sliders or not panels:
        raise ValueError("there must be at least one slider and one panel")
    for slider in sliders:
        if not 0 <= slider.start < len(slider.values):
            raise ValueError(f"slider {slider.label!r} has {len(slider.values)} positions and starts at {slider.start}")
    for panel in panels:
        for axis, (low, high), log in (("x", panel.x_range, panel.x_log), ("y", panel.y_range, panel.y_log)):
            if not low < high or (log and low <= 0):
                raise ValueError(f"{axis}_range of panel {panel.y!r} must increase{', from above 0' if log else ''}")


def _checked(frame: Frame, panels: Sequence[Panel], at: tuple[int, ...]) -> Frame:
    """The frame with arrays of equal length for every series."""
    if [len(curves) for curves in frame.curves] != [len(panel.series) for panel in panels]:
        raise ValueError(f"frame {at} must give one curve for each series of each panel")
    curves = [[(np.asarray(x, float), np.asarray(y, float)) for x, y in panel] for panel in frame.curves]
    for x, y in itertools.chain(*curves):
        if x.ndim != 1 or x.shape != y.shape:
            raise ValueError(f"frame {at} has a curve with x of shape {x.shape} and y of shape {y.shape}")
    return Frame(curves, frame.text)


def _content(sliders: Sequence[Slider], panels: Sequence[Panel], frames: Sequence[Frame]) -> dict[str, Any]:
    """What the script reads. An array that occurs in several frames is stored once, so frames hold indices."""
    stored: dict[tuple[float | None, ...], int] = {}

    def index(values: Any) -> int:
        short = tuple(float(f"{v:.4g}") if np.isfinite(v) else None for v in values)
        return stored.setdefault(short, len(stored))

    told = [
        {"text": frame.text, "curves": [[[index(x), index(y)] for x, y in panel] for panel in frame.curves]}
        for frame in frames
    ]
    shades: dict[Theme, tuple[str, ...]] = {"light": colours("light"), "dark": colours("dark")}
    return {
        "sliders": [{"label": s.label, "values": list(s.values), "start": s.start} for s in sliders],
        "panels": [
            {
                "x": {"label": panel.x, "range": list(panel.x_range), "log": panel.x_log},
                "y": {"label": panel.y, "range": list(panel.y_range), "log": panel.y_log},
                "series": [
                    {"label": s.label, "mark": s.mark, "color": [shades[t][int(s.color[1:])] for t in shades]}
                    for s in panel.series
                ],
            }
            for panel in panels
        ],
        "arrays": [list(values) for values in stored],
        "frames": told,
    }


def _columns(sliders: Any, panels: Any, positions: Any, frames: Any) -> dict[str, list[Any]]:
    """Every frame as rows: the sliders' values, the panel, the series, x and y."""
    columns: dict[str, list[Any]] = {slider.label: [] for slider in sliders} | {
        key: [] for key in ("panel", "series", "x", "y")
    }
    for at, frame in zip(positions, frames, strict=True):
        for panel, curves in zip(panels, frame.curves, strict=True):
            for series, (x, y) in zip(panel.series, curves, strict=True):
                for slider, i in zip(sliders, at, strict=True):
                    columns[slider.label] += [slider.values[i]] * len(x)
                columns["panel"] += [panel.y] * len(x)
                columns["series"] += [series.label] * len(x)
                columns["x"] += list(x.astype(np.float32))
                columns["y"] += list(y.astype(np.float32))
    return columns


def _draw(figure: Figure, panels: Sequence[Panel], frame: Frame) -> None:
    """The frame in matplotlib: panels side by side, above each its names."""
    for axes, panel, curves in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, frame.curves, strict=True):
        for series, (x, y) in zip(panel.series, curves, strict=True):
            if series.mark == "bars":
                axes.bar(x, y, color=series.color, label=series.label)
            elif series.mark == "points":
                axes.plot(x, y, "o", color=series.color, label=series.label)
            else:
                dashes = THEORY if series.mark == "theory" else {}
                axes.plot(x, y, **{**dashes, "color": series.color, "label": series.label})
        axes.set(xlabel=panel.x, ylabel=panel.y, xlim=panel.x_range, ylim=panel.y_range)
        axes.set(xscale="log" if panel.x_log else "linear", yscale="log" if panel.y_log else "linear")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=10.5, borderaxespad=0)
