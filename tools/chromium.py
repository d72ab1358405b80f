"""A Chromium for the browser tests: the system's, else Debian's, else Playwright's own, else none.

`find` only looks; `ensure`, which `make test` calls through `python tools/chromium.py`, also installs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


def find() -> str | None:
    """The path of a Chromium that can be started, or None."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    if MAC.exists():
        return str(MAC)
    try:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            path = playwright.chromium.executable_path
        return path if Path(path).exists() else None
    except Exception:  # playwright raises its own errors when its driver cannot start
        return None


def ensure() -> str | None:
    """As `find`, after trying to install one where that can be done without asking anybody."""
    if path := find():
        return path
    if os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (
            ["apt-get", "update"],
            ["apt-get", "install", "-y", "--no-install-recommends", "chromium"],
        ):
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    else:
        command = [sys.executable, "-m", "playwright", "install", "chromium-headless-shell"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, timeout=60, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return find()


if __name__ == "__main__":
    if not ensure():
        print(
            "NO CHROMIUM: the browser tests will be skipped. Install Chromium or Chrome to run them.",
            file=sys.stderr,
        )
        sys.exit(1 if os.environ.get("CI") == "true" else 0)
