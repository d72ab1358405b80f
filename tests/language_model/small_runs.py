"""A text, a model and a run small enough to be trained, killed and resumed many times in a test."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from nqflib import data
from nqflib.language_model.corpus import OwnText
from nqflib.language_model.pretrain import Run
from nqflib.language_model.transformer import Architecture

SIZE = Architecture(vocabulary=80, width=8, layers=2, heads=2, hidden=16, context=16)


def write_text(folder: Path) -> OwnText:
    """Forty thousand characters in one file of `folder`."""
    file = folder / "text.txt"
    file.write_text(data.load_documents("austen")[0].text[:40_000])
    return OwnText((str(file),))


def small_run(text: OwnText, **changes) -> Run:
    """Forty steps of two windows."""
    run = Run(
        size=SIZE,
        source=text,
        batch=4,
        peak_rate=1.0,
        schedule="cosine",
        tokens=40 * 4 * 16,
        held_out=8,
        micro_batch=4,
    )
    return replace(run, **changes)


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file of a folder, by name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
