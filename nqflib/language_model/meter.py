"""The progress of a run: loss, tokens a second, time left; a bar for who watches, a line in a file for a runner."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from nqflib.language_model import parallel
from nqflib.progress import VARIABLE, write_line


class Meter:
    """Shows steps `first` to `last`, each of `tokens` tokens, under `label`; silent in all processes but the first."""

    def __init__(self, first: int, last: int, tokens: int, label: str) -> None:
        self.first, self.last, self.tokens, self.label = first, last, tokens, label
        self.shown, self.started = first, time.monotonic()
        self.file = os.environ.get(VARIABLE)
        self.bar: Any = None

    def __enter__(self) -> Meter:
        if self.file is None and parallel.rank() == 0 and self.last > self.first:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=self.last, initial=self.first, desc=self.label, unit="step", leave=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, step: int, loss: float) -> None:
        """The state after `step` steps (tqdm itself says how much time is left)."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = (step - self.first) * self.tokens / seconds
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            self.bar.update(step - self.shown)
        elif self.file is not None and parallel.rank() == 0:
            left = seconds * (self.last - step) / max(step - self.first, 1)
            text = f"{self.label}: {step / self.last:.0%}, loss {loss:.3f}, {speed:,.0f} tokens/s, {left:.0f} s left"
            write_line(Path(self.file), text)
        self.shown = step
