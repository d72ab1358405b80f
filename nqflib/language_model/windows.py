"""Windows: a stretch of training from a checkpoint, by the network and by its surrogates, on the same batches.

    window = follow(Stretch(run, trained.checkpoint(0.897), trained.corpus))                 # doctest: +SKIP
    window.agreement("quad").last_within                                                     # doctest: +SKIP

Everything starts from the averaged weights theta0 and the averaged second moment of the checkpoint, with the first
moment of the run itself, and reads the batches that follow, at the checkpoint's learning rate. The measure is the true
held-out loss at a surrogate's weights, and at their running average, against the same of the network. Source: the
window, the start and the measure are those of Meterez et al. 2026, read from their code and tables; the measure on the
average, the rate's factor and the control with m = 0 are ours.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nqflib.language_model.checkpoints import Checkpoint
from nqflib.language_model.corpus import Corpus
from nqflib.language_model.optimizer import AVERAGES, Adam, Average
from nqflib.language_model.passes import Passes
from nqflib.language_model.presets import PRECISIONS
from nqflib.language_model.pretrain import Run
from nqflib.language_model.storage import (
    DamagedFileError,
    Key,
    cache_folder,
    content_key,
    free_first,
    locked,
    write_atomically,
)
from nqflib.language_model.transformer import Transformer, flatten, unflatten
from nqflib.progress import progress
from nqflib.taylor import Expansion, Surrogate

FORMAT = 1
BAND = 0.1  # of the change of the true loss
Optimizer = Literal["adam", "stale_adam", "frozen_adam", "sgdm"]
_UPDATES: dict[str, Callable[[Adam, Tensor, float], None]] = {
    "adam": Adam.update,
    "stale_adam": Adam.stale_update,
    "frozen_adam": Adam.frozen_update,
    "sgdm": Adam.momentum_update,
}


class Agreement(NamedTuple):
    """How long a surrogate's loss follows the true one, in percent of the run, and how far off it ends.

    `first_exit`: the first evaluation at which the error of the change exceeds a tenth of it, the window's end if none
    does. `last_within`: the last evaluation at which it does not, 0 if there is none. `end_error`: of the change, at
    the end, relative to it; `end_nats`: in nats; `relative`: over the loss itself. Infinite if the surrogate diverged.
    """

    first_exit: float
    last_within: float
    end_error: float
    end_nats: float
    relative: float


@dataclass(frozen=True)
class Window:
    """Held-out losses along a window, at `percent` (E,) of the run after its start; row 0 is the start itself.

    `loss` and `average_loss` by "none" and by each surrogate, (E,) at the weights and at their running average; NaN
    from where a run `diverged`, which names the step (from 1) of each that did.
    """

    percent: NDArray[np.float64]
    loss: dict[str, NDArray[np.float64]]
    average_loss: dict[str, NDArray[np.float64]]
    diverged: dict[str, int]

    def agreement(self, surrogate: str, *, average: bool = False) -> Agreement:
        """Against the network, at the weights or at their running `average`."""
        losses = self.average_loss if average else self.loss
        return agreement(self.percent, losses["none"], losses[surrogate])

    def change(self, *, average: bool = False) -> float:
        """The true loss at the end less that at the start."""
        losses = (self.average_loss if average else self.loss)["none"]
        return float(losses[-1] - losses[0])

    def null(self) -> float:
        """Relative error of the loss at the end if no change is predicted."""
        return abs(self.change()) / float(self.loss["none"][-1])


def agreement(percent: NDArray[np.float64], true: NDArray[np.float64], told: NDArray[np.float64]) -> Agreement:
    """The measures for a true loss (E,) and a surrogate's (E,), row 0 being the start that they share."""
    change = true[1:] - true[0]
    error = np.where(np.isfinite(told[1:]), np.abs(told[1:] - true[1:]), np.inf)
    within = error <= BAND * np.abs(change)
    outside = np.flatnonzero(~within)
    first_exit = percent[1:][outside[0]] if len(outside) else percent[-1]
    last_within = percent[1:][within][-1] if within.any() else 0.0
    relative_change = error[-1] / abs(change[-1]) if change[-1] else math.inf
    return Agreement(float(first_exit), float(last_within), relative_change, float(error[-1]), error[-1] / true[-1])


@dataclass(frozen=True)
class Stretch:
    """Which window.

    Args:
        run: whose checkpoint it is; gives batch size, order of the text and precision of the passes.
        checkpoint: where to start.
        corpus: of the run.
        surrogates: "prox", "quad", "hquad"; the network itself is always there.
        optimizer: "adam"; "stale_adam", "frozen_adam" or "sgdm", see `Adam`.
        rate_factor: the learning rate as a multiple of the checkpoint's.
        length: of the window, as a share of the run.
        evaluations: E - 1, at (k / evaluations)^1.5 of the window, so that early exits are seen.
        zero_moment: start from m = 0 in place of the run's own.

    Raises `ValueError` for an unknown optimizer and a window without a step.
    """

    run: Run
    checkpoint: Checkpoint
    corpus: Corpus
    surrogates: tuple[Surrogate, ...] = ("prox", "quad")
    optimizer: Optimizer = "adam"
    rate_factor: float = 1.0
    length: float = 0.1
    evaluations: int = 16
    zero_moment: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in _UPDATES:
            raise ValueError(f"optimizer must be one of {', '.join(_UPDATES)}, got {self.optimizer!r}")
        if self.steps < 1 or self.evaluations < 1:
            raise ValueError(
                "length and evaluations must give at least one step and one look, got "
                f"{self.length}, {self.evaluations}"
            )

    @property
    def steps(self) -> int:
        """Of the window."""
        return math.ceil(self.length * self.run.steps)

    def file(self, folder: Path | None = None) -> Path:
        """Where the result is kept (default: in `cache_folder()`)."""
        names = ("optimizer", "rate_factor", "length", "evaluations", "zero_moment")
        options = [list(self.surrogates), *(getattr(self, name) for name in names)]
        cause = {
            "recipe": self.checkpoint.recipe,
            "step": self.checkpoint.step,
            "options": options,
            "format": FORMAT,
        }
        return (folder or cache_folder()) / "windows" / f"{content_key(cause)}.npz"


def follow(stretch: Stretch, folder: Path | None = None) -> Window:
    """Run a window, or read it if it was run before. Raises `DamagedFileError` for a stored one that is unreadable."""
    file = stretch.file(folder)
    with locked(file):
        if file.exists():
            return _read(file)
        window = _follow(stretch)
        write_atomically(file, _packed(window))
    return window


def follow_all(stretches: Mapping[Key, Stretch], folder: Path | None = None) -> dict[Key, Window]:
    """Every window, by the same keys. Pages that want the same ones at the same time share the work."""
    return free_first({key: s.file(folder) for key, s in stretches.items()}, lambda key: follow(stretches[key], folder))


class _Runner:
    """One trajectory of a window: the optimizer's state and the running average of its weights."""

    def __init__(self, kind: Surrogate, model: Transformer, checkpoint: Checkpoint, zero_moment: bool) -> None:
        start = checkpoint.average(AVERAGES[0])
        self.kind: Surrogate = kind
        self.adam = Adam.start(model, flatten(start.weights).clone())
        self.adam.step, self.adam.beta2_product = checkpoint.step, checkpoint.beta2_product
        self.adam.second_moment = flatten(start.second_moment) * (1 - checkpoint.beta2_product)
        if not zero_moment:
            self.adam.first_moment = flatten(checkpoint.first_moment).clone()
        self.average = Average(AVERAGES[0], self.adam.weights.clone(), torch.zeros_like(self.adam.weights))
        self.diverged: int | None = None


def _follow(stretch: Stretch) -> Window:
    run, checkpoint, steps, evaluations = stretch.run, stretch.checkpoint, stretch.steps, stretch.evaluations
    passes = Passes(run.size, PRECISIONS[run.precision], run.micro_batch, torch.device("cpu"))
    model, rate = passes.model, stretch.rate_factor * checkpoint.rate
    theta0 = flatten(checkpoint.average(AVERAGES[0]).weights)
    kinds: list[Surrogate] = ["none", *stretch.surrogates]
    runners = [_Runner(kind, model, checkpoint, stretch.zero_moment) for kind in kinds]
    at = sorted({round(steps * (k / evaluations) ** 1.5) for k in range(evaluations + 1)})
    looks: dict[int, list[tuple[float, float]]] = {}

    def look(step: int) -> None:
        held_out = stretch.corpus.held_out
        looks[step] = [
            (math.nan, math.nan)
            if r.diverged
            else (passes.evaluate(r.adam.weights, held_out), passes.evaluate(r.average.weights, held_out))
            for r in runners
        ]

    look(0)
    for step in progress(range(steps), f"window, batch {run.batch}"):
        batch = stretch.corpus.batch(checkpoint.step + step, run.batch, run.seed)
        for r, gradient in zip(runners, _gradients(passes, theta0, runners, batch), strict=True):
            if r.diverged:
                continue
            _UPDATES[stretch.optimizer](r.adam, gradient, rate)
            r.average.update(r.adam)
            if not torch.isfinite(r.adam.weights).all():
                r.diverged = step + 1
        if step + 1 in at:
            look(step + 1)
    losses = np.array([looks[step] for step in at])  # (E, runners, 2)
    return Window(
        percent=100 * np.array(at) / run.steps,
        loss={kind: losses[:, i, 0] for i, kind in enumerate(kinds)},
        average_loss={kind: losses[:, i, 1] for i, kind in enumerate(kinds)},
        diverged={r.kind: r.diverged for r in runners if r.diverged},
    )


def _gradients(passes: Passes, theta0: Tensor, runners: Sequence[_Runner], batch: Tensor) -> list[Tensor]:
    """Of every runner on the same windows (B, T + 1); micro-batches share the pass at theta0."""
    total = [torch.zeros_like(theta0) for _ in runners]
    start = unflatten(theta0, passes.model)
    for part in batch.split(passes.micro_batch):
        at = Expansion(passes.model, start, (part[:, :-1], part[:, 1:]))
        for r, sum_ in zip(runners, total, strict=True):
            if r.diverged:
                continue
            if r.kind == "none":
                _, gradient = passes.gradient(r.adam.weights, part)
            else:
                gradient = flatten(at.surrogate(r.kind, unflatten(r.adam.weights - theta0, passes.model))[1])
            sum_.add_(gradient, alpha=len(part) / len(batch))
    return total


def _packed(window: Window) -> bytes:
    kinds = list(window.loss)
    content = io.BytesIO()
    np.savez(
        content,
        percent=window.percent,
        kinds=np.array(kinds),
        loss=np.stack([window.loss[kind] for kind in kinds]),
        average_loss=np.stack([window.average_loss[kind] for kind in kinds]),
        diverged=np.array([window.diverged.get(kind, 0) for kind in kinds]),
    )
    return content.getvalue()


def _read(file: Path) -> Window:
    try:
        with np.load(file, allow_pickle=False) as stored:
            kinds = [str(kind) for kind in stored["kinds"]]
            return Window(
                percent=stored["percent"],
                loss=dict(zip(kinds, stored["loss"], strict=True)),
                average_loss=dict(zip(kinds, stored["average_loss"], strict=True)),
                diverged={k: int(step) for k, step in zip(kinds, stored["diverged"], strict=True) if step},
            )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DamagedFileError(f"{file} is damaged ({error}); delete it to run the window again") from error
