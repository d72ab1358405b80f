"""`make lint`: ruff on code and on the code cells of the notebooks, pyright, and a look at the tracked files.

Tracked files may hold no path of somebody's machine and no address of a package index.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jupytext

ROOT = Path(__file__).resolve().parent.parent
RUFF = [sys.executable, "-m", "ruff"]

FORBIDDEN = {
    "path of a machine": re.compile(r"(?<![\w.-])/(?:home|Users|root|work|tmp)/[\w.-]+"),
    "address of a package index": re.compile(r"--(?:extra-)?index-url[= ]+https?:|https?://[\w.-]*/simple\b"),
}
BARE_LINK = re.compile(r"\[[^\]\[]+\]\((\w+)\)")
NOT_TEXT = {".xz", ".npz", ".png", ".ico", ".woff2"}


def forbidden(text: str) -> list[tuple[int, str, str]]:
    """The lines of a text that a tracked file may not hold: (line number, what it is, the match)."""
    return [
        (number, kind, match[0])
        for number, line in enumerate(text.splitlines(), 1)
        for kind, pattern in FORBIDDEN.items()
        if (match := pattern.search(line))
    ]


def bare_links(text: str) -> list[tuple[int, str, str]]:
    """Links to a page by its bare name: a figure or module may share it, and Sphinx can only guess what is meant."""
    pages = {path.stem for path in (ROOT / "notebooks").glob("*/*.md")}
    return [
        (number, "link by a bare name, write {doc}`text <page>`", match[0])
        for number, line in enumerate(text.splitlines(), 1)
        for match in BARE_LINK.finditer(line)
        if match[1] in pages
    ]


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def check_files() -> bool:
    clean = True
    for path in tracked_files():
        if path.suffix in NOT_TEXT:
            continue
        text = path.read_text("utf-8")
        for line, kind, match in forbidden(text) + (bare_links(text) if path.suffix == ".md" else []):
            print(f"{path.relative_to(ROOT)}:{line}: {kind}: {match}")
            clean = False
    return clean


def check_notebooks() -> bool:
    clean = True
    for path in sorted((ROOT / "notebooks").glob("*/*.md")):
        code = jupytext.writes(jupytext.read(path), fmt="py:percent")
        # B018: the last line of a cell may be an expression that is shown. E402: imports stand where they are used.
        # E501: a caption is one line of the header that jupytext writes for a cell.
        options = [
            "check",
            "--quiet",
            "--ignore",
            "B018,E402,E501,I001",
            "--stdin-filename",
            str(path.with_suffix(".py")),
            "-",
        ]
        clean &= subprocess.run([*RUFF, *options], input=code, text=True, cwd=ROOT).returncode == 0
    return clean


def main() -> int:
    checks = {
        "ruff check": lambda: subprocess.run([*RUFF, "check", "--quiet", "."], cwd=ROOT).returncode == 0,
        "ruff format": lambda: subprocess.run([*RUFF, "format", "--quiet", "--check", "."], cwd=ROOT).returncode == 0,
        "notebooks": check_notebooks,
        "tracked files": check_files,
        "pyright": lambda: subprocess.run([sys.executable, "-m", "pyright", "--warnings"], cwd=ROOT).returncode == 0,
    }
    failed = [name for name, check in checks.items() if not check()]
    print(f"lint: {', '.join(failed)} failed" if failed else f"lint: {', '.join(checks)} passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
