"""Measured quantities: plain numbers that a notebook leaves in its executed copy, and reading them back.

    record(fig3_half_time_error=0.00205, fig3_half_times=[11.5, 21.7])   # in the notebook
    read_run(Path("book/notebooks/nqf/fig3_features.ipynb")).quantities  # anywhere else

The executed notebook is the only store: what the text of a page quotes through `num`, what the ledger of claims
judges and what a rerun is compared with are the same bytes.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Scalar = bool | int | float | str
Quantity = Scalar | list[Scalar]

_PREFIX = "application/papermill.record/"  # where papermill, scrapbook and myst-nb keep values that are not shown
_NAME = re.compile(r"[a-z][A-Za-z0-9_]*")


class Run(NamedTuple):
    """What an executed notebook says about itself."""

    quantities: dict[str, Quantity]
    preset: str  # empty if the notebook was not run by `nqflib.runner`
    changed: dict[str, Any]  # parameters given by hand, other than the preset


def record(**quantities: Any) -> None:
    """Leave measured quantities in the executed notebook, with full precision.

    Args:
        quantities: by name, a bool, number, text, or a flat list of these; NumPy and torch scalars and 1-D arrays
            are converted. A measurement that ended without a number is recorded as text that says how
            ("diverged at step 37"), never as NaN or infinity.

    Raises:
        ValueError: a number is NaN or infinite, a list is empty, or a name is not lower case with underscores.
        TypeError: a value is none of the above. Nothing is recorded if any quantity is refused.
    """
    from IPython.display import display  # not through myst_nb, whose import takes two seconds

    plain = {name: _plain(_checked_name(name), value) for name, value in quantities.items()}
    for name, value in plain.items():
        metadata = {"scrapbook": {"name": name, "mime_prefix": _PREFIX}, "nqf": {"quantity": True}}
        # The `repr`, since IPython's own text follows `%precision` and cuts lists after 1000 items.
        display({f"{_PREFIX}text/plain": repr(value)}, raw=True, metadata=metadata)


def read_quantities(path: Path) -> dict[str, Quantity]:
    """The quantities that an executed notebook recorded, by name. Raises as `read_run` does."""
    return read_run(path).quantities


def read_run(path: Path) -> Run:
    """The quantities of an executed notebook, the preset at which it ran and the parameters changed by hand.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a notebook, one quantity is recorded twice, or one cannot be read as a literal.
    """
    try:
        notebook = json.loads(Path(path).read_text("utf-8"))
        cells = notebook["cells"]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a Jupyter notebook: {error}") from None
    quantities: dict[str, Quantity] = {}
    for output in (output for cell in cells for output in cell.get("outputs", [])):
        glued = output.get("metadata", {})
        if "scrapbook" in glued and glued.get("nqf", {}).get("quantity"):
            name = glued["scrapbook"]["name"]
            if name in quantities:
                raise ValueError(f"{path}: the quantity {name} is recorded twice")
            text = output["data"][glued["scrapbook"].get("mime_prefix", "") + "text/plain"]
            quantities[name] = _literal(path, name, "".join(text))
    run = notebook.get("metadata", {}).get("nqf", {}).get("run", {})
    changed = {key: value for key, value in run.get("given", {}).items() if key != "preset"}
    return Run(quantities, run.get("preset", ""), changed)


def _literal(path: Path, name: str, text: str) -> Quantity:
    try:
        return _plain(name, ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError) as error:
        raise ValueError(f"{path}: the quantity {name} reads {text[:80]!r}: {error}") from None


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"quantity names start with a small letter and hold letters, digits and _, got {name!r}")
    return name


def _plain(name: str, value: Any) -> Quantity:
    if hasattr(value, "tolist"):  # NumPy and torch, without importing either
        value = value.tolist()
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError(f"{name} is an empty list; record text that says why there is nothing")
        return [_plain_scalar(f"{name}[{i}]", item) for i, item in enumerate(value)]
    return _plain_scalar(name, value)


def _plain_scalar(name: str, value: Any) -> Scalar:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, bool | int | float | str):
        kind = "a mapping" if isinstance(value, Mapping) else type(value).__name__
        raise TypeError(f"{name} must be a bool, number, text or a flat list of these, got {kind}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; record text that names the outcome, such as 'diverged at step 37'")
    return value
