"""Progress of long work: a bar for who watches, a line in a file for who runs the notebook from outside.

    for step in progress(range(25_000), "gradient descent"):
        ...

In a notebook or a terminal this is a tqdm bar. When the environment names a file in NQF_PROGRESS (our runner does),
the bar would end up in the executed page, so one short line is written to that file instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")

VARIABLE = "NQF_PROGRESS"
_SECONDS_BETWEEN_WRITES = 0.25


def progress(items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
    """Yield `items`, telling how far the work is.

    Args:
        items: what to go through.
        label: a few words on what is being done.
        total: the number of items, where `len(items)` does not give it.
    """
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # pyright: ignore[reportArgumentType]
    file = os.environ.get(VARIABLE)
    if file is None:
        from tqdm.auto import tqdm

        yield from tqdm(items, desc=label, total=total, leave=False)
        return
    written = 0.0
    for count, item in enumerate(items):
        if time.monotonic() - written > _SECONDS_BETWEEN_WRITES:
            written = time.monotonic()
            write_line(Path(file), f"{label} {count / total:.0%}" if total else f"{label} {count}")
        yield item
    write_line(Path(file), f"{label} 100%")


def write_line(file: Path, text: str) -> None:
    """Put one line in place of what the file says, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(file.name + ".new")
    aside.write_text(text)
    os.replace(aside, file)
