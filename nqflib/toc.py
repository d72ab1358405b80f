"""The table of contents of the book, made from the front matter of the notebooks.

Each notebook says its part and its order, so two pages made at the same time never meet in one list.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nqflib import runner

TARGET = runner.ROOT / "book" / "_toc.yml"
PARTS = runner.ROOT / "book" / "parts.yml"


def sources() -> list[Path]:
    """The files that the table of contents is made from."""
    return [PARTS, *sorted(runner.NOTEBOOKS.glob("*/*.md"))]


def table_of_contents() -> dict[str, Any]:
    """The table in the form of sphinx-external-toc.

    `book/parts.yml` lists the parts: prose pages by name, and `notebooks: nqf` where the notebooks of a part go.
    """
    import yaml

    outline = yaml.safe_load(PARTS.read_text("utf-8"))
    parts = []
    for part in outline["parts"]:
        chapters = [{"file": name} for name in part.get("pages", [])]
        chapters += [
            {"file": f"notebooks/{page}"} for page in runner.pages() if page.split("/")[0] == part.get("notebooks")
        ]
        chapters += [{"file": name} for name in part.get("pages_after", [])]
        if chapters:
            parts.append({"caption": part["caption"], "chapters": chapters})
    return {"format": "jb-book", "root": outline["root"], "parts": parts}


def write() -> None:
    """Write `book/_toc.yml`."""
    import yaml

    TARGET.write_text(yaml.safe_dump(table_of_contents(), sort_keys=False), "utf-8")
