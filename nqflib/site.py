"""The site: its table of contents, made from the front matter of the notebooks, and its build.

    python -m nqflib.site            # from executed notebooks; `make book` runs what has changed as well

Each notebook says its part and its order, so two pages made at the same time never meet in one list.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from nqflib import runner

BOOK = runner.ROOT / "book"
CONFIG = runner.ROOT / "_config.yml"
TOC = BOOK / "_toc.yml"


class BuildFailed(RuntimeError):
    """The book did not build without a warning. The text is what Sphinx said."""


def table_of_contents() -> dict[str, Any]:
    """The table in the form of sphinx-external-toc.

    `book/parts.yml` lists the parts: prose pages by name, and `notebooks: nqf` where the notebooks of a part go.
    """
    import yaml

    outline = yaml.safe_load((BOOK / "parts.yml").read_text("utf-8"))
    parts = []
    for part in outline["parts"]:
        chapters = [{"file": name} for name in part.get("pages", [])]
        chapters += [
            {"file": f"notebooks/{page}"} for page in runner.pages() if page.split("/")[0] == part.get("notebooks")
        ]
        if chapters:
            parts.append({"caption": part["caption"], "chapters": chapters})
    return {"format": "jb-book", "root": outline["root"], "parts": parts}


def write_table_of_contents() -> None:
    """Write `book/_toc.yml`."""
    import yaml

    TOC.write_text(yaml.safe_dump(table_of_contents(), sort_keys=False), "utf-8")


def build(source: Path, output: Path, builder: str = "html") -> Path:
    """Build the site from a copy of `book/` that holds the executed notebooks, warnings being errors.

    Args:
        source: folder with the prose pages, `_toc.yml` and the executed notebooks under `notebooks/`.
        output: the site goes to `output/_build/<builder>`.
        builder: `html`, or `singlehtml` for the whole book on one page.

    Returns:
        The site's first page.

    Raises:
        BuildFailed: Sphinx warned or failed; everything it said is in `output/_build/site.log` too.
    """
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    command = [str(jupyter_book), "build", str(source), "--config", str(CONFIG)]
    command += [
        "--toc",
        str(source / "_toc.yml"),
        "--path-output",
        str(output),
        "-W",
        "-n",
        "--keep-going",
        "-q",
        "--builder",
        builder,
    ]
    result = subprocess.run(
        command, cwd=runner.ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )
    log = result.stdout + result.stderr
    (output / "_build").mkdir(parents=True, exist_ok=True)
    (output / "_build" / "site.log").write_text(log)
    index = output / "_build" / builder / "index.html"
    if result.returncode or not index.exists():
        raise BuildFailed(log[-10_000:])
    return index


if __name__ == "__main__":
    write_table_of_contents()
    print(build(BOOK, runner.ROOT))
