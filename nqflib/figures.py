"""One call draws a figure of the book: `show(draw, name, alt=..., data=...)`.

    def draw(figure):
        axes = figure.subplots()
        axes.plot(time, loss, color=INK)
        axes.plot(time, theory, **THEORY)
        axes.set(xlabel="time $t$", ylabel="loss $L$")

    show(draw, "loss-staircase", alt=f"Loss against time: {len(jumps)} steps.", data={"t": time, "loss": loss})

`draw` runs once on white and once on near-black; the reader gets the one that fits the theme, the
same numbers as CSV, and both PNG and SVG to download. The caption is metadata of the cell,

    figure:
      caption: |
        Every mode switches on {num}`spread:.1%` later than predicted.

because it is prose: it may cite, refer and quote numbers of the run. A cell that shows several
figures maps their names to captions: `caption: {loss-staircase: ..., loss-tail: ...}`.

`show_table` does the same for a table. Both are rendered by `nqflib.sphinx_ext`; in a notebook editor
the plain PNG or table appears.
"""

import base64
import csv
import io
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from nqflib.palette import BACKGROUND, BATCH, INK, MODE, OPTIMIZER, PAPER, SURROGATE, THEORY, Theme, style

__all__ = ["BATCH", "INK", "MODE", "OPTIMIZER", "PAPER", "SURROGATE", "THEORY", "render", "show", "show_table"]

FIGURE_MIME = "application/vnd.nqf.figure+json"
TABLE_MIME = "application/vnd.nqf.table+json"
WIDEST = 6.4  # inches; wider figures shrink their type below 9 px on a phone
_CELL = (str, bool, int, float, np.bool_, np.integer, np.floating)
LARGEST_SVG = 2_000_000  # bytes; more is a cloud of marks that a phone draws slowly

Draw = Callable[[Figure], object]
Columns = Mapping[str, Iterable[Any]]


def show(
    draw: Draw,
    name: str,
    *,
    alt: str,
    data: Columns | Mapping[str, Columns] | None = None,
    size: tuple[float, float] = (6.4, 4.0),
) -> None:
    """Draw a figure in both themes and display it as one numbered figure of the book.

    Args:
        draw: takes an empty matplotlib `Figure` and draws on it (`figure.subplots()`, not `pyplot`).
            It is called twice, so it must not use up a random generator or change what it draws.
        name: label of the figure, unique in the book, in lower case with hyphens; `{numref}` finds it.
        alt: what a reader who cannot see the figure needs to know, with the computed numbers.
        data: the numbers behind the marks: column name -> one-dimensional array (lengths may
            differ), or table name -> such columns. Each table becomes a CSV file.
        size: width and height in inches; at most 6.4 wide, so that type stays legible on a phone.

    Raises:
        ValueError: a name, alt text, size or column that is not as above, a `draw` that drew nothing,
            or a drawing too large for a page. Errors of `draw` itself pass through.
    """
    from IPython.display import display

    bundle = render(draw, name, alt=alt, data=data, size=size)
    # The mark in the metadata tells the site which fallbacks belong to a figure of ours.
    display(bundle, metadata={"nqf": {"figure": name}}, raw=True)


def render(
    draw: Draw,
    name: str,
    *,
    alt: str,
    data: Columns | Mapping[str, Columns] | None = None,
    size: tuple[float, float] = (6.4, 4.0),
) -> dict[str, Any]:
    """The output of `show` as a dict from mime type to content, without displaying it."""
    _check_name(name)
    _check_alt(alt)
    _check_size(size)
    tables = {} if data is None else _csv_files(name, data)
    with _theme("light", name):
        light = _drawn(draw, name, size)
        svg_light = _svg(light, name)
        png = _png(light, "light")
    with _theme("dark", name):
        dark = _drawn(draw, name, size)
        _place_as(dark, light)
        svg_dark = _svg(dark, name)
    figure = {
        "name": name,
        "alt": alt,
        "svg_light": svg_light,
        "svg_dark": svg_dark,
        "png": png,
        "csv": tables,
    }
    return {FIGURE_MIME: figure, "image/png": png, "text/plain": alt}


def show_table(
    table: Columns | Sequence[Mapping[str, Any]],
    name: str,
    *,
    caption: str,
    formats: Mapping[str, str] | None = None,
) -> None:
    """Display a numbered table of the book, with its numbers to download as CSV.

    Args:
        table: column header -> values, all of one length; or a sequence of rows with the same keys.
            Headers and text values may hold MyST (`$\\sigma$`, a citation). None and NaN show as a dash, and a
            column of numbers may hold the text of a named outcome.
        name: label of the table, unique in the book, in lower case with hyphens.
        caption: MyST text; its first sentence is the finding.
        formats: column header -> format specification of its numbers (default `.3g`; integers `d`).
            The CSV always has full precision.

    Raises:
        ValueError: an empty table, columns of different length, rows with different keys, an empty
            caption, or a format for a column that is not there.
    """
    from IPython.display import display

    _check_name(name)
    if not isinstance(caption, str) or not caption.strip():
        raise ValueError(f"caption of table {name!r} is empty; its first sentence should be the finding")
    columns = _as_columns(table)
    _check_table(columns, formats or {})
    specs = {header: (formats or {}).get(header) for header in columns}
    cells = [[_cell(value, specs[header]) for value in values] for header, values in columns.items()]
    content = {
        "name": name,
        "caption": caption.strip(),
        "header": list(columns),
        "align": [
            "right" if all(v is None or _is_number(v) for v in values) else "left" for values in columns.values()
        ],
        "rows": [list(row) for row in zip(*cells, strict=True)],
        "csv": _csv_files(name, columns),
    }
    text = pipe_table(content["header"], content["align"], content["rows"])
    bundle = {TABLE_MIME: content, "text/markdown": f"{text}\n\n{caption.strip()}", "text/plain": text}
    display(bundle, metadata={"nqf": {"table": name}}, raw=True)


def pipe_table(header: Sequence[str], align: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a `|` inside a cell is escaped."""
    rule = [":---" if side == "left" else "---:" for side in align]
    lines = [[cell.replace("|", "\\|") for cell in header], rule]
    lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@contextmanager
def _theme(theme: Theme, name: str) -> Iterator[None]:
    """Our style for a figure of this name, with nothing of this machine's matplotlibrc."""
    settings: dict[Any, Any] = {
        **style(theme),
        # Outlines instead of text: a reader's machine may lack the font, and then labels would move.
        # Glyphs are stored once and reused, so this costs a few kilobytes.
        "svg.fonttype": "path",
        "svg.hashsalt": name,  # ids from the name, not from a random salt: two runs are bitwise equal
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        yield


def _drawn(draw: Draw, name: str, size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    if not (figure.axes or figure.artists or figure.texts or figure.lines or figure.subfigs):
        raise ValueError(f"draw of {name!r} drew nothing on the figure it was given; use figure.subplots(), not pyplot")
    return figure


def _place_as(figure: Figure, placed: Figure) -> None:
    """Give the axes and titles of a figure the places they have in another drawing of it, which spares the layout."""
    if figure.subfigs or figure.legends or len(figure.axes) != len(placed.axes):
        return
    figure.set_layout_engine("none")
    for axes, there in zip(figure.axes, placed.axes, strict=True):
        axes.set_position(there.get_position(original=True))
    for text, there in zip(figure.texts, placed.texts, strict=False):
        text.set_position(there.get_position())


def _svg(figure: Figure, name: str) -> str:
    """A figure as SVG text; afterwards its layout stays as it is."""
    svg = io.StringIO()
    FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None})
    if svg.tell() > LARGEST_SVG:
        raise ValueError(
            f"the SVG of {name!r} has {svg.tell() / 1e6:.1f} MB, more than "
            f"{LARGEST_SVG / 1e6:.0f} MB; draw fewer marks or pass rasterized=True to them"
        )
    figure.set_layout_engine("none")  # solving it again is half of the time of a drawing
    return svg.getvalue()


def _png(figure: Figure, theme: Theme) -> str:
    """A figure as PNG in base64, on an opaque background."""
    png = io.BytesIO()
    figure.set_facecolor(BACKGROUND[theme])
    figure.set_dpi(200)
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    return base64.b64encode(png.getvalue()).decode("ascii")


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(f"name {name!r} is not a label: use lower-case words joined by hyphens, as in 'loss-tail'")


def _check_alt(alt: str) -> None:
    if not isinstance(alt, str) or len(" ".join(alt.split())) < 20:
        raise ValueError(
            f"alt {alt!r} is too short to stand in for the figure: say in 20 characters or more what it shows"
        )


def _check_size(size: tuple[float, float]) -> None:
    width, height = size
    if not (2.5 <= width <= WIDEST and 1.5 <= height <= 14):
        raise ValueError(
            f"size {size} in inches is out of range: width 2.5 to {WIDEST}, height 1.5 to 14; "
            "a wider figure cannot be read on a phone, stack its panels instead"
        )


def _csv_files(name: str, data: Mapping[str, Any]) -> dict[str, str]:
    """File stem -> CSV text; one file, or one per table when `data` maps table names to columns."""
    if not isinstance(data, Mapping) or not data:
        raise ValueError(f"data of {name!r} must map column names to arrays and not be empty, not {data!r}")
    nested = [isinstance(value, Mapping) for value in data.values()]
    if any(nested) and not all(nested):
        raise ValueError(
            f"data of {name!r} mixes tables and columns: map every name to columns, or every name to an array"
        )
    if not all(nested):
        return {name: _csv(name, data)}
    for table in data:
        _check_name(table)
    return {f"{name}-{table}": _csv(f"{name}-{table}", columns) for table, columns in data.items()}


def _csv(name: str, columns: Mapping[str, Any]) -> str:
    """CSV text of the columns, padded with empty cells to the longest, numbers in full precision."""
    texts = []
    for header, values in columns.items():
        if not isinstance(header, str) or not header.strip():
            raise ValueError(f"data of {name!r} has a column named {header!r}; use a non-empty text")
        texts.append(_csv_column(name, header, values))
    longest = max(map(len, texts), default=0)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([text[i] if i < len(text) else "" for text in texts] for i in range(longest))
    return buffer.getvalue()


def _csv_column(name: str, header: str, values: Any) -> list[str]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"column {header!r} of {name!r} has shape {array.shape}; a column is one-dimensional")
    if array.dtype.kind not in "biufU":
        wrong = [value for value in array.tolist() if not (value is None or isinstance(value, _CELL))]
        if array.dtype.kind != "O" or wrong:
            kind = type(wrong[0]).__name__ if wrong else array.dtype
            raise ValueError(f"column {header!r} of {name!r} holds {kind}; use real numbers, booleans, text or None")
    # str of a NumPy scalar is the shortest text that reads back to the same bits in its own width
    return ["" if value is None else str(value) for value in array]


def _as_columns(table: Columns | Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    if isinstance(table, Mapping):
        return {header: list(values) for header, values in table.items()}
    rows = list(table)
    if not rows:
        raise ValueError("table has no rows")
    headers = list(rows[0])
    for i, row in enumerate(rows):
        if list(row) != headers:
            raise ValueError(f"row {i} of the table has the keys {list(row)}, row 0 has {headers}")
    return {header: [row[header] for row in rows] for header in headers}


def _check_table(columns: Mapping[str, list[Any]], formats: Mapping[str, str]) -> None:
    lengths = {header: len(values) for header, values in columns.items()}
    if not lengths or min(lengths.values()) == 0:
        raise ValueError(f"table has an empty column or no column: {lengths}")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of a table must have one length, not {lengths}")
    unknown = set(formats) - set(columns)
    if unknown:
        raise ValueError(f"formats names {sorted(unknown)}, but the columns are {list(columns)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number | np.number) and not isinstance(value, bool | np.bool_)


def _cell(value: Any, spec: str | None) -> str:
    """Text of a table cell: numbers by `spec`, a missing or undefined value as a dash, text as it is."""
    if value is None:
        return "–"
    if not _is_number(value):
        return str(value)
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if spec is None:
        spec = "d" if isinstance(value, numbers.Integral) else ".3g"
    return format(value, spec)
