"""`make pdf`: the whole book as one PDF, printed by a headless Chromium from one long page; no TeX.

The book has to be built first (`make book`), since the PDF shows the same executed notebooks.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import chromium

from nqflib import site

TARGET = site.runner.ROOT / "_build" / "nqf-companion.pdf"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-pdf-header-footer"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
# Mathematics is drawn by a script after the page has loaded; virtual time runs until it is idle.
FLAGS += ["--virtual-time-budget=60000", "--run-all-compositor-stages-before-draw"]


def main(target: Path = TARGET) -> Path:
    browser = chromium.find()
    if browser is None:
        sys.exit("make pdf needs Chromium or Chrome; `make test` says how to get one.")
    missing = [page for page in site.runner.pages() if not (site.runner.EXECUTED / f"{page}.ipynb").exists()]
    if missing:
        sys.exit(f"Not run yet: {', '.join(missing)}. Run `make book` first.")
    with tempfile.TemporaryDirectory() as folder:
        page = site.build(site.BOOK, Path(folder), builder="singlehtml")
        profile = f"--user-data-dir={folder}/profile"
        subprocess.run([browser, *FLAGS, profile, f"--print-to-pdf={target}", page.as_uri()], check=True, timeout=300)
    print(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")
    return target


if __name__ == "__main__":
    main()
