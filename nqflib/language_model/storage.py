"""Files that are whole or absent: atomic writes, locks, and names made from the content's cause.

A file is written aside, flushed to the disk, and renamed; a kill at any moment leaves the old file or the new one.
Every write, flush and rename of the corpus and of pretraining goes through the three functions `_write`, `_flush` and
`_rename`, so that a test can fail each of them in turn.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from filelock import FileLock, Timeout

CACHE_VARIABLE = "NQF_CACHE"
_CHECKOUT = Path(__file__).resolve().parent.parent.parent
_PIECE = 1 << 24  # bytes a write
Key = TypeVar("Key")
Result = TypeVar("Result")


class DamagedFileError(ValueError):
    """A stored file is not what was written. The text names it; nothing is overwritten."""


def cache_folder() -> Path:
    """Where token files and runs are kept: $NQF_CACHE, else `_build/cache` of a checkout, else the user's cache."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "notebooks").is_dir():
        return _CHECKOUT / "_build" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "nqflib"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nqflib"


def content_key(cause: Mapping[str, Any]) -> str:
    """Twenty hexadecimal digits of the SHA-256 of `cause`, everything that determines a content, as JSON."""
    return hashlib.sha256(json.dumps(cause, sort_keys=True).encode()).hexdigest()[:20]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; a second process waits here until the first is done (or dead)."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        yield


def is_locked(folder: Path) -> bool:
    """Whether another process, or another part of this one, holds the lock of a folder at the moment."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.with_name(folder.name + ".lock"), timeout=0):
            return False
    except Timeout:
        return True


def free_first(files: Mapping[Key, Path], work: Callable[[Key], Result]) -> dict[Key, Result]:
    """The result of `work` for every key, in the order of the keys.

    Processes that start with the same keys at the same time share them: a key whose file another has locked is left for
    later. `work` takes the lock itself and reads what is finished.
    """
    results: dict[Key, Result] = {}
    while waiting := [key for key in files if key not in results]:
        # Whoever takes the key first after this look holds its lock, so a wrong guess costs a wait and nothing else.
        free = next((key for key in waiting if not is_locked(files[key])), waiting[0])
        results[free] = work(free)
    return {key: results[key] for key in files}


def write_atomically(file: Path, content: bytes | memoryview) -> None:
    """Put `content` in place of `file`, whole or not at all, on the disk when this returns.

    The caller holds the lock of the folder, since the name aside is always the same: what a killed process left there
    is overwritten by the next write.
    """
    aside = file.with_name(file.name + ".new")
    view = memoryview(content).cast("B")
    with open(aside, "wb") as stream:
        for start in range(0, len(view), _PIECE):
            _write(stream, view[start : start + _PIECE])
        stream.flush()
        _flush(stream.fileno())
    _rename(aside, file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        _flush(directory)  # the rename itself
    finally:
        os.close(directory)


def write_json(file: Path, value: Any) -> None:
    """`value` as indented JSON, atomically."""
    write_atomically(file, (json.dumps(value, indent=1) + "\n").encode())


def read_json(file: Path) -> Any:
    """What `write_json` wrote. Raises `DamagedFileError` if it is not JSON, `FileNotFoundError` if it is not there."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise DamagedFileError(
            f"{file} is damaged ({error}); delete the folder {file.parent} to make it anew"
        ) from error


def _write(stream: BinaryIO, piece: memoryview) -> None:
    stream.write(piece)


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


def _rename(source: Path, target: Path) -> None:
    os.replace(source, target)
