"""What came out of a run beside what the published page holds: its figures, and the differences of all numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nqflib import runner
from nqflib.quantities import Quantity, read_quantities

FILE = "result.json"


def collect(page: str, folder: Path) -> dict[str, Any]:
    """Write the figures of an executed run and `result.json` into its folder; return what the latter holds.

    Args:
        page: `part/name`.
        folder: the run's folder, which holds `notebook.ipynb`.

    Returns:
        `figures`: name, alternative text and files of each; `differences` as `differences` gives them; `published`:
        whether there is a published page to compare with.
    """
    import nbformat

    notebook = nbformat.read(folder / "notebook.ipynb", 4)
    runner.export_figures(notebook, folder)
    figures = []
    for figure in runner.figures_of(notebook):
        name = figure["name"]
        (folder / f"{name}-dark.svg").write_text(figure["svg_dark"], "utf-8")
        files = {"light": f"{name}.svg", "dark": f"{name}-dark.svg", "png": f"{name}.png"}
        figures.append({"name": name, "alt": figure["alt"], **files, "csv": [f"{stem}.csv" for stem in figure["csv"]]})
    published = runner.EXECUTED / f"{page}.ipynb"
    before = read_quantities(published) if published.exists() else {}
    result = {
        "figures": figures,
        "published": published.exists(),
        "differences": differences(before, read_quantities(folder / "notebook.ipynb")),
    }
    (folder / FILE).write_text(json.dumps(result, indent=1), "utf-8")
    return result


def differences(before: Mapping[str, Quantity], now: Mapping[str, Quantity]) -> list[dict[str, Any]]:
    """Every recorded quantity of either run: its value `before` and `now`, and by how much a number moved.

    `difference` is now - before; for lists of equal length the largest of it in absolute value; None where there is
    no number to subtract. `same` says whether the values are equal.
    """
    names = [*now, *(name for name in before if name not in now)]
    return [
        {
            "name": name,
            "before": before.get(name),
            "now": now.get(name),
            "difference": _difference(before.get(name), now.get(name)),
            "same": name in before and name in now and before[name] == now[name],
        }
        for name in names
    ]


def _difference(before: Any, now: Any) -> float | None:
    if isinstance(before, list) and isinstance(now, list):
        moved = [_difference(*pair) for pair in zip(before, now, strict=False)]
        steps = [step for step in moved if step is not None]
        return max(steps, key=abs) if len(steps) == len(before) == len(now) else None
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in (before, now)):
        return None
    return now - before
