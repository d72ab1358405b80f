"""Runs and results that take too long for every build, made once by hand and kept in `data/reference/`.

A page has at most one kept run at a larger scale. It holds every recorded quantity, the columns of every figure that
has data, and what a stranger needs to get them again:

    python -m nqflib.reference quadratic/sample_size preset=evening    # run the page, keep its numbers and curves

    larger = reference("quadratic/sample_size")                                             # doctest: +SKIP
    larger.quantities["sample_size_gap_hessian"]                                            # doctest: +SKIP
    larger.tables["sample-size-hessian-32768"]["eigenvalue"]                                # doctest: +SKIP

A result that is no page's run, such as a grid over many seeds, is one JSON file with what produced it:

    load("stability_grid")["made_by"]["command"]                                            # doctest: +SKIP
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from nqflib.quantities import Quantity

_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parent / "data" / "reference"
FOLDER = _CHECKOUT if _CHECKOUT.is_dir() else _HERE / "_data" / "reference"  # an installed wheel carries a copy
DIGITS = 7  # of a number in a curve: far below what a plot or a fit can tell apart
_FIELDS = ("commit", "preset", "parameters", "given", "date", "versions", "python")  # no time: it may read a cache

Columns = dict[str, list[Any]]


class Reference(NamedTuple):
    """What a run left: `run`, how it was made; `quantities` by name; `tables`, columns by figure and header."""

    run: dict[str, Any]
    quantities: dict[str, Quantity]
    tables: dict[str, Columns]

    @property
    def origin(self) -> str:
        """One line that says where the numbers come from: preset, own parameters, date, versions."""
        run = self.run
        given = [f"{name}={value}" for name, value in run["given"].items() if name != "preset"]
        parts = [f"preset {run['preset']}", *given, run["date"][:10], f"torch {run['versions']['torch']}"]
        return " · ".join([*parts, f"commit {run['commit']}"])


def reference_file(page: str, folder: Path | None = None) -> Path:
    """Where the run of `part/name` is kept."""
    return (folder or FOLDER) / f"{page}.json"


def reference(page: str, folder: Path | None = None) -> Reference | None:
    """The kept run of `part/name`, None if there is none. Raises `ValueError` for a file that is none of ours."""
    file = reference_file(page, folder)
    if not file.exists():
        return None
    try:
        stored = json.loads(file.read_text("utf-8"))
        return Reference(stored["run"], stored["quantities"], stored["tables"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); `git checkout` brings it back") from None


def keep(page: str, notebook: Path, folder: Path | None = None) -> Path:
    """Keep the numbers and curves of an executed notebook as the page's larger run; returns the file."""
    import nbformat

    from nqflib.quantities import read_quantities
    from nqflib.runner import figures_of

    executed = nbformat.read(notebook, as_version=4)
    run = executed.metadata["nqf"]["run"]
    texts = {stem: text for figure in figures_of(executed) for stem, text in figure["csv"].items()}
    stored = {
        "run": {name: run[name] for name in _FIELDS},
        "quantities": read_quantities(notebook),
        "tables": {stem: _columns(text) for stem, text in sorted(texts.items())},
    }
    file = reference_file(page, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_lines(stored), "utf-8")
    return file


def load(name: str, folder: Path | None = None) -> dict[str, Any]:
    """A kept result, with what made it under `made_by`. Raises `ValueError` with the known names for another one."""
    file = (folder or FOLDER) / f"{name}.json"
    if not file.exists():
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.json"))) or "none"
        raise ValueError(f"there is no kept result {name!r}; there are {known}")
    return json.loads(file.read_text("utf-8"))


def record(name: str, content: Mapping[str, Any], *, command: str, folder: Path | None = None) -> Path:
    """Keep a result with the `command` that makes it again, versions and machine; returns the file.

    `content` must be JSON without infinities (raises `ValueError`).
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in ("torch", "numpy")}
    machine = f"{os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB"
    made_by = {"command": command, "versions": versions, "machine": machine}
    file = (folder or FOLDER) / f"{name}.json"
    text = json.dumps({"made_by": made_by, **content}, allow_nan=False) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    return file


def _columns(text: str) -> Columns:
    header, *rows = csv.reader(text.splitlines())
    return {name: [_value(row[i]) for row in rows if row[i]] for i, name in enumerate(header)}


def _value(cell: str) -> Any:
    try:
        number = float(cell)
    except ValueError:
        return cell
    if not math.isfinite(number):
        return cell
    return int(cell) if cell.lstrip("-").isdigit() else float(f"{number:.{DIGITS}g}")


def _lines(stored: Mapping[str, Any]) -> str:
    """JSON with one column or quantity a line, which git can show a change of."""
    run = json.dumps(stored["run"], sort_keys=True)
    quantities = _members(stored["quantities"], 2)
    tables = ",\n".join(f"  {json.dumps(name)}: {{\n{_members(c, 3)}\n  }}" for name, c in stored["tables"].items())
    return f'{{\n "run": {run},\n "quantities": {{\n{quantities}\n }},\n "tables": {{\n{tables}\n }}\n}}\n'


def _members(values: Mapping[str, Any], indent: int) -> str:
    return ",\n".join(f"{' ' * indent}{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())


def main(arguments: list[str] | None = None) -> int:
    """Run a page with the given parameters and keep what it left."""
    from nqflib.presets import ParameterError
    from nqflib.runner import ROOT, NotebookFailed, parse_assignments, run_folder, run_notebook

    parser = argparse.ArgumentParser(prog="python -m nqflib.reference", description=main.__doc__)
    parser.add_argument("page", help="part/name, for example quadratic/sample_size")
    parser.add_argument("parameters", nargs="+", metavar="name=value", help="for example preset=evening")
    options = parser.parse_args(arguments)
    try:
        given = parse_assignments(options.parameters)
        notebook = run_folder(options.page, given) / "notebook.ipynb"
        run_notebook(options.page, given, notebook)
    except (ParameterError, NotebookFailed) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Kept in {keep(options.page, notebook).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
