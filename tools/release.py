"""`make release`: what a release holds, under dist/: the built site as a zip, wheel, sdist, PDF if made, checksums.

The zip is for the reader without a network: unpack it and open index.html. Its entries carry a fixed date and come in a
fixed order, so that the same site gives the same bytes.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from nqflib import __version__
from nqflib.runner import ROOT

DIST = ROOT / "dist"
HTML = ROOT / "_build" / "html"
PDF = ROOT / "_build" / "nqf-companion.pdf"
FIXED_DATE = (2026, 1, 1, 0, 0, 0)


def zip_folder(folder: Path, target: Path, prefix: str) -> None:
    """Write a folder as a zip whose bytes depend on its contents only."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != ".buildinfo":
                entry = zipfile.ZipInfo(f"{prefix}/{path.relative_to(folder).as_posix()}", FIXED_DATE)
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(entry, path.read_bytes())


def checksums(folder: Path) -> str:
    """SHA-256 of every file of a folder, in the form that `sha256sum --check` reads."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def main() -> None:
    if not (HTML / "index.html").exists():
        sys.exit("There is no built site. Run `make book` first.")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    name = f"nqf-companion-{__version__}"
    zip_folder(HTML, DIST / f"{name}-site.zip", f"{name}-site")
    if PDF.exists():
        shutil.copy(PDF, DIST / f"{name}.pdf")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(DIST)], check=True
    )
    (DIST / "SHA256SUMS").write_text(checksums(DIST))
    print((DIST / "SHA256SUMS").read_text(), end="")


if __name__ == "__main__":
    main()
