"""Running notebooks through papermill: one page of the book, or one figure with changed parameters.

    python -m nqflib.runner page nqf/fig3_features            # as the book shows it, into book/notebooks/
    python -m nqflib.runner figure nqf/fig3_features eps=1e-8 # a run of your own, into _build/runs/

A run writes to a file aside and replaces the last good one only when it succeeded. Executed notebooks carry the
commit, the parameters, the seconds, package versions and the hash of everything that the run read.
"""

from __future__ import annotations

import argparse
import ast
import base64
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from nqflib.presets import Declaration, ParameterError, declaration

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
EXECUTED = ROOT / "book" / "notebooks"
RUNS = ROOT / "_build" / "runs"
FAILED = ROOT / "_build" / "failed"

#: One intra-op thread a notebook: two notebooks side by side use two cores, and sums come out bitwise equal.
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

VERSIONS = ("torch", "numpy", "scipy", "matplotlib", "nqflib")


class NotebookFailed(RuntimeError):
    """A cell of a notebook raised. The text is the cell's traceback and where the half-run copy lies."""


def pages() -> list[str]:
    """All pages that are notebooks, as `part/name`, in the order of the table of contents."""
    found = []
    for path in sorted(NOTEBOOKS.glob("*/*.md")):
        front = front_matter(path)
        found.append((front["part"], front["order"], f"{path.parent.name}/{path.stem}"))
    return [page for _, _, page in sorted(found)]


def front_matter(path: Path) -> dict[str, Any]:
    """The `nqf` block of a notebook's front matter.

    Raises:
        ValueError: the block or one of its keys `part` and `order` is missing.
    """
    import yaml

    block = yaml.safe_load(path.read_text("utf-8").split("---\n")[1]).get("nqf", {})
    if not {"part", "order"} <= block.keys():
        raise ValueError(f"{path.name}: the front matter needs `nqf:` with `part` and `order`, got {block}")
    return block


def read_notebook(page: str) -> Any:
    """The notebook of a page, unrun.

    Raises:
        ParameterError: there is no such page; the valid ones are named.
    """
    import jupytext

    path = NOTEBOOKS / f"{page}.md"
    if page not in pages():
        raise ParameterError(f"there is no notebook {page}. Valid: {', '.join(pages())}")
    return jupytext.read(path)


def run_notebook(page: str, given: Mapping[str, Any], output: Path, aside: Path | None = None) -> Any:
    """Run one notebook and put the executed copy in place of `output` if every cell succeeded.

    Args:
        page: `part/name`, as `pages` gives it.
        given: parameters by name, checked against the notebook's declaration.
        output: where the executed notebook goes.
        aside: where the notebook lies while it runs, under `_build/failed` if not given. Two runs of one page at
            a time need two places.

    Returns:
        The executed notebook.

    Raises:
        ParameterError: a name, type or value of `given` is not what the notebook declares.
        NotebookFailed: a cell raised; `output` is untouched and the half-run copy stays aside.
    """
    declared = declaration(read_notebook(page).cells)
    given = declared.check(given)
    aside = aside or FAILED / f"{page}.ipynb"
    for folder in (aside.parent, output.parent):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ |= THREADS
    start = time.perf_counter()
    notebook = _execute(page, given, aside)
    notebook.metadata["nqf"]["run"] = provenance(page, declared, given, time.perf_counter() - start)
    import nbformat

    nbformat.write(notebook, aside)
    os.replace(aside, output)
    return notebook


def _execute(page: str, given: Mapping[str, Any], aside: Path) -> Any:
    import papermill
    from jupyter_client.manager import KernelManager
    from papermill.exceptions import PapermillExecutionError

    # ipykernel otherwise warns at every start that it talks over TCP without encryption.
    if KernelManager.class_traits().get("transport_encryption"):
        KernelManager.transport_encryption.default_value = "auto"  # pyright: ignore
    try:
        return papermill.execute_notebook(
            str(NOTEBOOKS / f"{page}.md"),
            str(aside),
            parameters=dict(given),
            progress_bar=False,
            cwd=str(ROOT),
        )
    except PapermillExecutionError as error:
        raise NotebookFailed(
            f"{page}: cell {error.exec_count} raised {error.ename}\n{error}\n"
            f"The last good page is untouched; the half-run notebook is {aside.relative_to(ROOT)}"
        ) from None


def provenance(page: str, declared: Declaration, given: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """What a stranger needs to get the same numbers again: commit, parameters, versions, hash of the inputs."""
    effective = declared.effective(given)
    return {
        "page": page,
        "commit": commit(),
        "preset": effective.get("preset", ""),
        "parameters": effective,
        "given": dict(given),
        "seconds": round(seconds, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version for name in VERSIONS if (version := _version(name))},
        "python": sys.version.split()[0],
        "input_hash": input_hash(inputs(page), given),
    }


def commit() -> str:
    """The commit of the working tree, with `+` if something differs from it; empty outside a repository."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def inputs(page: str) -> list[Path]:
    """The files that determine what a page shows.

    The notebook, every module of nqflib that it imports, directly or through another, the pinned versions, if
    `nqflib.data` is among the modules the manifest that holds the hash of every data file, and if `nqflib.reference` is
    the page's larger run and the kept results.
    """
    source = _code((NOTEBOOKS / f"{page}.md").read_text("utf-8"))
    modules = import_closure(source)
    files = [NOTEBOOKS / f"{page}.md", ROOT / "requirements.lock", *modules]
    if ROOT / "nqflib" / "data.py" in modules:
        files.append(ROOT / "data" / "manifest.json")
    if ROOT / "nqflib" / "reference.py" in modules:
        kept = ROOT / "data" / "reference"
        files += [path for path in [kept / f"{page}.json", *sorted(kept.glob("*.json"))] if path.exists()]
    return files


def _code(notebook: str) -> str:
    """The code of a text notebook, without options of cells and magics; loading jupytext would slow every build."""
    cells = re.findall(r"^```\{code-cell\}[^\n]*\n(?:---\n.*?^---\n)?(.*?)^```$", notebook, re.MULTILINE | re.DOTALL)
    lines = "\n".join(cells).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!", ":tags:")))


def import_closure(source: str) -> list[Path]:
    """The modules of nqflib that Python source imports, and those that they import, at any depth."""
    found: set[Path] = set()
    waiting = list(_imported_modules(source, package=""))
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting.extend(_imports_of(path, path.stat().st_mtime_ns))
    return sorted(found)


@functools.cache
def _imports_of(path: Path, _changed: int) -> list[Path]:
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    return list(_imported_modules(path.read_text("utf-8"), package))


def _imported_modules(source: str, package: str) -> Iterable[Path]:
    for node in _statements(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.split(".")[0] == "nqflib":
                stem = ROOT.joinpath(*name.split("."))
                yield from (path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists())


def _statements(node: ast.AST) -> Iterable[ast.AST]:
    """The statements below a node; expressions, most of a tree, hold no imports."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from _statements(child)


def input_hash(files: Iterable[Path], given: Mapping[str, Any]) -> str:
    """SHA-256 over the contents of the files, the given parameters and torch's version."""
    digest = hashlib.sha256(json.dumps([dict(given), _version("torch")], sort_keys=True).encode())
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def figures_of(notebook: Any) -> list[dict[str, Any]]:
    """The figures of an executed notebook, in order, as `nqflib.figures.render` made them."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    figures = (output.get("data", {}).get("application/vnd.nqf.figure+json") for output in outputs)
    return [figure for figure in figures if figure]


def export_figures(notebook: Any, folder: Path) -> list[Path]:
    """Write every figure of an executed notebook as SVG, PNG and CSV files into a folder."""
    written = []
    for figure in figures_of(notebook):
        name = figure["name"]
        contents = {f"{name}.svg": figure["svg_light"].encode(), f"{name}.png": base64.b64decode(figure["png"])}
        contents |= {f"{stem}.csv": text.encode() for stem, text in figure["csv"].items()}
        for file, content in contents.items():
            (folder / file).write_bytes(content)
            written.append(folder / file)
    return written


def parse_assignments(words: Iterable[str]) -> dict[str, Any]:
    """`["eps=1e-8", "seeds=[0, 1]", "optimizer=adam"]` as a dictionary; a value that is no literal is text.

    Raises:
        ParameterError: a word has no `=`.
    """
    given = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ParameterError(f"write parameters as name=value, got {word!r}")
        try:
            given[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            given[name] = text
    return given


def run_folder(page: str, given: Mapping[str, Any]) -> Path:
    """Where a run with parameters of the reader's own is kept: `_build/runs/part/name/eps=1e-08,seed=1`.

    A long name is cut, and ends in a hash of the parameters instead.
    """
    name = ",".join(f"{key}={value}" for key, value in sorted(given.items())) or "defaults"
    name = "".join(c if c.isalnum() or c in "=,.+-_" else "_" for c in name)
    if len(name) > 120:
        name = f"{name[:109]}-{hashlib.sha256(json.dumps(dict(given), sort_keys=True).encode()).hexdigest()[:10]}"
    return RUNS / page / name


def run_figure(page: str, given: Mapping[str, Any]) -> Path:
    """Run a page with parameters of the reader's own; the notebook and its figures go to a folder named by them."""
    from nqflib.quantities import read_quantities

    folder = run_folder(page, given)
    notebook = run_notebook(page, given, folder / "notebook.ipynb")
    published = EXECUTED / f"{page}.ipynb"
    before = read_quantities(published) if published.exists() else {}
    for name, value in read_quantities(folder / "notebook.ipynb").items():
        print(f"  {name:<34} {value!s:<24}" + (f" (published: {before[name]})" if name in before else ""))
    for path in export_figures(notebook, folder):
        print(f"  {path.relative_to(ROOT)}")
    return folder


def main(arguments: list[str] | None = None) -> int:
    """The command line: `page NAME [name=value ...]`, `figure NAME [name=value ...]`, `list`."""
    parser = argparse.ArgumentParser(prog="python -m nqflib.runner", description="Run notebooks through papermill.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the notebooks, in the order of the book")
    for command, text in (
        ("page", "run a page for the book"),
        ("figure", "run a page with your own parameters"),
    ):
        sub = commands.add_parser(command, help=text)
        sub.add_argument("page", help="part/name, for example nqf/fig3_features")
        sub.add_argument("parameters", nargs="*", metavar="name=value")
    options = parser.parse_args(arguments)
    if options.command == "list":
        print("\n".join(pages()))
        return 0
    # Half of papermill's time to import is a grammar that jsonschema builds for a format that no notebook uses.
    sys.modules.setdefault("rfc3987_syntax", None)  # pyright: ignore
    page = options.page.removeprefix("notebooks/").removesuffix(".md")
    try:
        given = parse_assignments(options.parameters)
        if options.command == "figure":
            run_figure(page, given)
        else:
            run_notebook(page, given, EXECUTED / f"{page}.ipynb")
    except (ParameterError, NotebookFailed) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
