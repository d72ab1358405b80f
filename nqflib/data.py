"""The data files of the project: two text corpora and 5,000 handwritten digits, checked as they are read.

`sotu` holds 233 State of the Union addresses, `austen` six novels, `mnist` balanced digits. A manifest
beside the files keeps their SHA-256; every loader below compares it before it unpacks anything, so
that a result never comes from a damaged file. Sources, licences and cleaning: `data/README.md`.

    >>> from nqflib import data
    >>> [novel.title for novel in data.load_documents("austen")][1]
    'Pride and Prejudice'
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PACKAGE = Path(__file__).resolve().parent
INSTALLED, CHECKOUT = PACKAGE / "_data", PACKAGE.parent / "data"
REINSTALL = "reinstall the package: pip install --force-reinstall --no-deps nqflib"
DOCUMENT_SEPARATOR = "\n\n"  # between documents in `load_text`; no document has an empty line


class DamagedDataError(ValueError):
    """A data file is not the one that its manifest describes."""


@dataclass(frozen=True)
class Document:
    """One address or one novel: ASCII text, paragraphs separated by single newlines."""

    title: str
    author: str
    year: int
    text: str


class Digits(NamedTuple):
    """Handwritten digits: `images` (n, 28, 28) uint8, 0 is background; `labels` (n,) int64, 0 to 9."""

    images: np.ndarray
    labels: np.ndarray


def directory() -> Path:
    """The folder that holds the data files: inside an installed package, or `data/` of a checkout.

    Raises FileNotFoundError, saying what to do, where neither has a manifest.
    """
    # The installed folder comes first: beside an installed package, `data` may belong to somebody else.
    for folder in (INSTALLED, CHECKOUT):
        if (folder / "manifest.json").is_file():
            return folder
    raise FileNotFoundError(
        f"no data files: neither {INSTALLED} nor {CHECKOUT} has a manifest.json; {REINSTALL}, or {_restore(CHECKOUT)}"
    )


def names(*, folder: Path | None = None) -> tuple[str, ...]:
    """The names that `path` knows, in alphabetical order."""
    return tuple(sorted(_manifest(folder or directory())))


def path(name: str, *, folder: Path | None = None) -> Path:
    """The file of a data set, after its SHA-256 has been compared with the manifest.

    Parameters
    ----------
    name : "austen", "mnist" or "sotu".
    folder : where the files and `manifest.json` are; by default found by `directory`.

    Raises ValueError for an unknown name, FileNotFoundError for a missing file, and DamagedDataError
    for one whose bytes differ; the last two say how to get it back.
    """
    return _read(name, folder).path


def load_documents(name: str, *, folder: Path | None = None) -> list[Document]:
    """The addresses (`"sotu"`, by date) or novels (`"austen"`, by publication) of a corpus, one by one.

    To hold out text that a model has never seen, hold out whole documents. Raises as `path` does, and
    ValueError for `"mnist"`.
    """
    file = _read(name, folder)
    if "documents" not in file.entry:
        raise ValueError(f"name: {name!r} holds images, not text; read it with load_mnist()")
    lines = lzma.decompress(file.content).decode("ascii").splitlines()
    return [Document(**json.loads(line)) for line in lines]


def load_text(name: str, *, folder: Path | None = None) -> str:
    """A whole corpus as one string, its documents separated by an empty line (`DOCUMENT_SEPARATOR`).

    Raises as `load_documents` does.
    """
    return DOCUMENT_SEPARATOR.join(document.text for document in load_documents(name, folder=folder))


def load_mnist(*, folder: Path | None = None) -> Digits:
    """5,000 MNIST digits, 500 of each: images (5000, 28, 28) uint8 and labels (5000,) int64.

    The labels run 0, 1, ..., 9, 0, 1, ..., so that the first 10 k digits are balanced for every k.
    Raises as `path` does.
    """
    file = _read("mnist", folder)
    with np.load(io.BytesIO(file.content), allow_pickle=False) as arrays:
        return Digits(arrays["images"], arrays["labels"].astype(np.int64))


class _File(NamedTuple):
    path: Path
    content: bytes  # the very bytes that were hashed, so that nothing changes between check and use
    entry: dict[str, Any]


def _read(name: str, folder: Path | None) -> _File:
    folder = folder or directory()
    manifest = _manifest(folder)
    if name not in manifest:
        close = difflib.get_close_matches(str(name), manifest, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"name: no data set {name!r}; valid names are {', '.join(sorted(manifest))}{hint}")
    entry = manifest[name]
    file = folder / entry["file"]
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; {_remedy(file)}")
    content = file.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != entry["sha256"]:
        raise DamagedDataError(
            f"{file} is damaged: it has {len(content)} bytes and SHA-256 {found}, expected "
            f"{entry['bytes']} bytes and {entry['sha256']}; {_remedy(file)}"
        )
    return _File(file, content, entry)


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / "manifest.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; {_remedy(file)}")
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise DamagedDataError(f"{file} is damaged ({error}); {_remedy(file)}") from error


def _remedy(file: Path) -> str:
    return REINSTALL if file.parent == INSTALLED else _restore(file)


def _restore(file: Path) -> str:
    return f"in a checkout restore it with `git checkout -- {file}`, or rebuild it with `python data/make.py`"
