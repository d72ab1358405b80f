"""Executed notebooks as the site reads them: which there are, how each was run, and its cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTEBOOKS = "notebooks"  # folder of executed notebooks inside the book's source
PARTS = ("nqf", "quadratic", "beyond")


def executed_runs(source: Path, docnames: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """Docname and run of every executed notebook of the book, by part and order."""
    found = []
    for path in sorted((source / NOTEBOOKS).rglob("*.ipynb")):
        docname = path.relative_to(source).with_suffix("").as_posix()
        if docname in docnames:
            block = nqf_metadata(path)
            part = block.get("part", "")
            place = PARTS.index(part) if part in PARTS else len(PARTS)
            found.append((place, block.get("order", 0), docname, block.get("run", {})))
    return [(docname, run) for _, _, docname, run in sorted(found, key=lambda item: item[:3])]


def nqf_metadata(path: Path) -> dict[str, Any]:
    """The `nqf` block of an executed notebook's metadata; empty for any other file."""
    if path.suffix != ".ipynb" or not path.exists():
        return {}
    return json.loads(path.read_text("utf-8"))["metadata"].get("nqf", {})


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of an executed notebook, the source of each as one text; none for any other file."""
    if path.suffix != ".ipynb" or not path.exists():
        return []
    return [{**cell, "source": "".join(cell["source"])} for cell in json.loads(path.read_text("utf-8"))["cells"]]


def run_metadata(path: Path) -> dict[str, Any]:
    """What `nqflib.runner` wrote about the run of a notebook."""
    return nqf_metadata(path).get("run", {})
