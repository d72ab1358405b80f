"""Create .venv with every pinned package, then torch, then this package; do nothing if that is already done.

Only the standard library, since this runs before anything is installed:

    python3 tools/bootstrap.py

Environment:
    TORCH_VERSION  the version of torch (default below)
    TORCH_INDEX    a package index to take torch from instead of pip's own, empty by default
    TORCH          `cuda` agrees to a CUDA build of several gigabytes
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements.lock"
STAMP = VENV / "nqf-stamp"
SUPPORTED = ("3.11", "3.12", "3.13")
TORCH_VERSION = os.environ.get("TORCH_VERSION") or "2.13.0"
LARGE = 1_000_000_000


def main() -> int:
    choose_python()
    stamp = wanted_stamp()
    if STAMP.exists() and STAMP.read_text() == stamp:
        return 0
    start = time.time()
    STAMP.unlink(missing_ok=True)
    if not PYTHON.exists():
        print(f"Creating {VENV.name} with Python {sys.version.split()[0]}", flush=True)
        venv.create(VENV, with_pip=True)
    install_locked()
    install_torch()
    pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    pip("check")
    STAMP.write_text(stamp)
    print(f"Ready in {time.time() - start:.0f} s.", flush=True)
    return 0


def choose_python() -> None:
    """Start again under a supported Python if this one is not."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" in SUPPORTED:
        return
    for version in SUPPORTED:
        other = shutil.which(f"python{version}")
        if other and subprocess.run([other, "--version"], capture_output=True).returncode == 0:
            os.execv(other, [other, *sys.argv])
    sys.exit(f"Python {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]} is needed, this is {sys.version.split()[0]}.")


def wanted_stamp() -> str:
    """What the environment depends on: the lock, the package's metadata, torch's version, Python, the folder."""
    parts = [LOCK.read_bytes(), (ROOT / "pyproject.toml").read_bytes()]
    parts += [f"{TORCH_VERSION} {sys.version_info[:2]} {ROOT}".encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{result.stdout[-3000:]}{result.stderr[-3000:]}\n`pip {' '.join(arguments)}` failed.")


def install_locked() -> None:
    """Install what requirements.lock pins, each file checked against its hash.

    The newest pip goes first: it unpacks three times faster than the one that older Pythons bring. The lock is
    complete, so nothing has to be resolved (--no-deps), and byte code is made when a module is first imported.
    """
    lock = LOCK.read_text()
    block = re.search(r"^pip==.*?(?=^\S|\Z)", lock, re.M | re.S)
    if block:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as only_pip:
            only_pip.write(block[0])
            only_pip.flush()
            pip("install", "--quiet", "--require-hashes", "-r", only_pip.name)
    total = len(re.findall(r"^\S+==", lock, re.M))
    print(f"Installing {total} pinned packages (about 300 MB to download, once)", flush=True)
    options = ["--no-deps", "--no-compile", "--require-hashes", "--progress-bar", "off", "-r", str(LOCK)]
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        lines, done = [], 0
        for line in process.stdout or ():
            lines.append(line)
            done += line.startswith(("Collecting", "Requirement already", "Ignoring"))
            if sys.stdout.isatty():
                print(f"\r  {min(done, total)} of {total}", end="", flush=True)
    if process.returncode:
        sys.exit("".join(lines[-30:]) + "\nInstalling requirements.lock failed; the lines above say why.")
    if sys.stdout.isatty():
        print("\r", end="")


def install_torch() -> None:
    """Install torch, after asking pip what it would take: on Linux that may be a CUDA build of gigabytes."""
    source = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    wanted = [f"torch=={TORCH_VERSION}", *source]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("install", "--quiet", "--dry-run", "--report", str(report), *wanted)
        items = json.loads(report.read_text())["install"]
    if not items:
        return
    size = sum(download_size(item["download_info"]["url"]) for item in items)
    names = ", ".join(f"{i['metadata']['name']} {i['metadata']['version']}" for i in items)
    if size > LARGE and os.environ.get("TORCH") != "cuda":
        sys.exit(
            f"pip would download {size / 1e9:.1f} GB for torch {TORCH_VERSION} ({len(items)} packages).\n"
            "The book needs no GPU. Choose one:\n"
            "  make book TORCH_INDEX=<address of PyTorch's CPU wheels>   about 0.2 GB; the address for your platform\n"
            "                                                            is shown on pytorch.org under Get Started\n"
            "  make book TORCH=cuda                                      take the CUDA build all the same"
        )
    print(f"Installing {names} ({size / 1e6:.0f} MB)", flush=True)
    pip("install", "--quiet", "--no-compile", *wanted)


def download_size(url: str) -> int:
    """The bytes behind a wheel's address, 0 if the server does not tell."""
    parsed = urlparse(url)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path)).stat().st_size
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=20) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
