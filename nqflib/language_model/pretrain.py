"""Pretraining: one run, its loss curve, and the checkpoints that surrogates, spectra and stability start from.

    python -m nqflib.language_model.pretrain --preset laptop --batch 32
    python -m nqflib.language_model.pretrain --preset paper --dry-run
    torchrun --nproc-per-node 2 -m nqflib.language_model.pretrain --preset laptop --batch 32

A run of N steps is cut at k N / 29, k = 1 to 29, as in the paper. At each cut the loss is evaluated and the state is
stored; the ten cuts k = 2, 5, ..., 29 (6.9, 17.2, ... 100 %) are kept, the others only until the next one. A run that
was killed goes on from its last cut and ends with the same bits. The folder of a run is named by the hash of
everything that determines it, so that a finished run is read, not repeated.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nqflib.language_model import parallel
from nqflib.language_model.checkpoints import (
    Averaged,
    Checkpoint,
    checkpoint_file,
    load_checkpoint,
    save_checkpoint,
    stored_steps,
)
from nqflib.language_model.corpus import Corpus, Source, load_corpus
from nqflib.language_model.meter import Meter
from nqflib.language_model.optimizer import AVERAGES, Adam, Average, rate_factor
from nqflib.language_model.passes import Passes
from nqflib.language_model.presets import PRECISIONS, Preset
from nqflib.language_model.storage import cache_folder, content_key, locked
from nqflib.language_model.transformer import Architecture, Transformer, flatten, unflatten

FORMAT = 1  # of what a run computes; a new one makes every run anew
CUTS = 29
KEPT = range(2, CUTS + 1, 3)
_EARLY = 6  # evaluations at N/29/2, N/29/4, ...: the loss falls fastest there
_CHECK_EVERY = 50  # steps between looks for a loss that is not finite, which wait for a GPU


class Diverged(RuntimeError):
    """The loss of a batch is not finite: `step` (from 1) says which, `history` has the evaluations before it."""

    def __init__(self, step: int, loss: float, history: History) -> None:
        super().__init__(f"diverged at step {step}: the loss is {loss}; what was stored before it is left as it is")
        self.step, self.history = step, history


class History(NamedTuple):
    """Evaluations on the held-out windows, one entry each: `loss` at the weights, `average_loss` at their average.

    The average is the one over 0.04 of the run. `tokens` seen and `rate`, the learning rate, belong to the same `step`.
    """

    step: NDArray[np.int64]
    tokens: NDArray[np.int64]
    rate: NDArray[np.float64]
    loss: NDArray[np.float64]
    average_loss: NDArray[np.float64]


class Trained(NamedTuple):
    """A run as far as it went: `history`; `train_loss` of every batch; the kept `checkpoints` by step; the `corpus`."""

    history: History
    train_loss: NDArray[np.float64]
    checkpoints: dict[int, Path]
    corpus: Corpus

    def checkpoint(self, done: float) -> Checkpoint:
        """The kept checkpoint nearest to a share `done` of the run, 0.069 or 0.897, say."""
        steps = load_checkpoint(next(iter(self.checkpoints.values()))).steps
        step = min(self.checkpoints, key=lambda s: abs(s / steps - done))
        return load_checkpoint(self.checkpoints[step], vocabulary=self.corpus.vocabulary)


@dataclass(frozen=True)
class Run:
    """Everything that determines a run, see `Preset` for most fields.

    `batch` windows a step, `peak_rate` eta, `schedule` "cosine" or "constant". A run with `ends_only` is evaluated and
    stored at its end only, as in a sweep. Raises `ValueError` for a batch that micro-batches do not fill.
    """

    size: Architecture
    source: Source
    batch: int
    peak_rate: float
    schedule: str
    tokens: int
    seed: int = 0
    held_out: int = 128
    micro_batch: int = 32
    byte_level: bool = False
    precision: str = "float32"
    ends_only: bool = False

    def __post_init__(self) -> None:
        rate_factor(1.0, self.schedule)
        if self.batch < 1 or (self.batch > self.micro_batch and self.batch % self.micro_batch):
            raise ValueError(f"batch must be a positive multiple of micro_batch {self.micro_batch}, got {self.batch}")
        if not (self.peak_rate > 0 and math.isfinite(self.peak_rate)):
            raise ValueError(f"peak_rate must be positive, got {self.peak_rate}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")

    @classmethod
    def of(
        cls,
        preset: Preset,
        batch: int,
        *,
        schedule: str = "cosine",
        base_rate: float | None = None,
        seed: int = 0,
        sweep: bool = False,
    ) -> Run:
        """The run of a preset; a `sweep` run has the sweep's length and is evaluated at its end only."""
        return cls(
            size=preset.size,
            source=preset.source,
            batch=batch,
            peak_rate=preset.peak_rate(batch, base_rate),
            schedule=schedule,
            tokens=preset.sweep_tokens if sweep else preset.tokens,
            seed=seed,
            held_out=preset.held_out,
            micro_batch=preset.micro_batch,
            byte_level=preset.byte_level,
            precision=preset.precision,
            ends_only=sweep,
        )

    @property
    def steps(self) -> int:
        """N, the fewest steps that see all tokens."""
        return -(-self.tokens // (self.batch * self.size.context))

    def corpus(self, folder: Path | None = None) -> Corpus:
        """The run's text as windows, made if need be."""
        return load_corpus(
            self.source,
            vocabulary=self.size.vocabulary,
            context=self.size.context,
            byte_level=self.byte_level,
            held_out=self.held_out,
            folder=folder,
        )

    def cuts(self) -> tuple[set[int], set[int], set[int]]:
        """The steps at which the run is kept, stored, and evaluated."""
        if self.ends_only:
            return {self.steps}, {self.steps}, {self.steps}
        kept = {k * self.steps // CUTS for k in KEPT} - {0}
        stored = {k * self.steps // CUTS for k in range(1, CUTS + 1)} - {0}
        early = {self.steps // CUTS // 2**j for j in range(1, _EARLY + 1)} - {0}
        return kept, stored, stored | early


def run_folder(run: Run, corpus: Corpus, device: torch.device, folder: Path | None = None) -> Path:
    """Where the run is kept: named by the hash of its fields, the text's digest and the kind of device."""
    return (folder or cache_folder()) / "runs" / content_key(_recipe(run, corpus, device))


def _recipe(run: Run, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    fields = asdict(run)
    del fields["source"]  # the digest of its tokens says it better
    return {**fields, "corpus": corpus.digest, "device": device.type, "format": FORMAT}


@dataclass
class _State:
    """A run in progress."""

    adam: Adam
    averages: list[Average]
    history: dict[str, list[float]]
    train_loss: Tensor  # (steps,)

    def vectors(self) -> list[Tensor]:
        averaged = [vector for a in self.averages for vector in (a.weights, a.second_moment)]
        return [self.adam.weights, self.adam.first_moment, self.adam.second_moment, *averaged, self.train_loss]


def pretrain(
    run: Run,
    *,
    folder: Path | None = None,
    device: str = "auto",
    until: float = 1.0,
    corpus: Corpus | None = None,
) -> Trained:
    """Train, or go on with, or read a run.

    Arguments: `folder` for tokens and runs (default: `cache_folder()`); `device`; `until`, the share of the run after
    which to stop (the schedule is that of the whole); `corpus`, `run.corpus(folder)` if it is open already. Under
    `torchrun` every process takes its share of each batch. Raises `Diverged` for a loss that is not finite,
    `ValueError` if the processes do not divide the batch, and what `load_corpus` and `load_checkpoint` raise; nothing
    stored is overwritten then.
    """
    target = parallel.resolve_device(device)
    if run.batch % parallel.world_size():
        raise ValueError(f"batch must be a multiple of the {parallel.world_size()} processes, got {run.batch}")
    corpus = corpus or run.corpus(folder)
    home = run_folder(run, corpus, target, folder)
    last = math.floor(until * run.steps + 1e-9)
    if not 1 <= last <= run.steps:
        raise ValueError(f"until must lie in 1 / {run.steps} to 1, got {until}")
    with locked(home) if parallel.rank() == 0 else nullcontext():
        passes = Passes(run.size, PRECISIONS[run.precision], run.micro_batch, target)
        state = _resume(home, run, corpus, passes, target)
        _train(run, corpus, home, passes, state, last)
    history = History(*(np.array(column) for column in state.history.values()))
    kept, _, _ = run.cuts()
    files = {step: checkpoint_file(home, step) for step in sorted(kept) if step <= state.adam.step}
    return Trained(history, state.train_loss[: state.adam.step].double().cpu().numpy(), files, corpus)


def _resume(home: Path, run: Run, corpus: Corpus, passes: Passes, device: torch.device) -> _State:
    """The state at the last cut that is stored, or before the first step; the same in every process."""
    state = _initial(run, passes)
    stored = _newest(home, run, corpus, device) if parallel.rank() == 0 else None
    header = None
    if stored is not None:
        groups = [stored.weights, stored.first_moment, stored.second_moment]
        groups += [tensors for a in stored.averages for tensors in (a.weights, a.second_moment)]
        for vector, tensors in zip(state.vectors(), groups, strict=False):
            vector.copy_(flatten(tensors))
        state.train_loss[: stored.step] = stored.train_loss
        header = (stored.step, stored.beta2_product, stored.history)
    header = parallel.from_first(header)
    if header is not None:
        parallel.copy_from_first(state.vectors())
        state.adam.step, state.adam.beta2_product, state.history = header
    return state


def _newest(home: Path, run: Run, corpus: Corpus, device: torch.device) -> Checkpoint | None:
    """The last stored checkpoint of a run's folder, None if there is none."""
    home.mkdir(parents=True, exist_ok=True)
    steps = stored_steps(home)
    if not steps:
        return None
    file = checkpoint_file(home, steps[-1])
    stored = load_checkpoint(file, vocabulary=corpus.vocabulary)
    if stored.recipe != _recipe(run, corpus, device):
        raise ValueError(f"{file} belongs to another run, {stored.recipe}; move it out of this folder")
    _drop_passed(home, run.cuts()[0])  # what a killed process had no time for
    return stored


def _initial(run: Run, passes: Passes) -> _State:
    """The state before the first step."""
    generator = torch.Generator().manual_seed(run.seed)
    wide = torch.promote_types(PRECISIONS[run.precision], torch.float32)
    model = Transformer(run.size, generator=generator, dtype=wide)
    weights = flatten({name: p.detach() for name, p in model.named_parameters()}).to(passes.device)
    adam = Adam.start(model, weights)
    averages = [Average.start(window, weights) for window in AVERAGES]
    history: dict[str, list[float]] = {name: [] for name in History._fields}
    return _State(adam, averages, history, torch.zeros(run.steps, dtype=wide, device=passes.device))


def _train(run: Run, corpus: Corpus, home: Path, passes: Passes, state: _State, last: int) -> None:
    """Steps until `last`, with the evaluations and checkpoints on the way."""
    kept, stored, evaluated = run.cuts()
    adam, first = state.adam, state.adam.step
    stored = stored | {
        last
    }  # not evaluated there, so that a run that was stopped ends with the bits of one that was not
    with Meter(first, last, run.batch * run.size.context, f"pretraining, batch {run.batch}") as meter:
        for step in range(first, last):
            rate = run.peak_rate * rate_factor(step / run.steps, run.schedule)
            loss, gradient = passes.gradient(adam.weights, corpus.batch(step, run.batch, run.seed))
            state.train_loss[step] = loss
            adam.update(gradient, rate)
            for average in state.averages:
                average.update(adam)
            if adam.step in stored | evaluated or adam.step % _CHECK_EVERY == 0:
                _check_finite(state)
                meter.show(adam.step, state.train_loss[step].item())
            if adam.step in evaluated:
                _evaluate(run, corpus, passes, state)
            if adam.step in stored and parallel.rank() == 0:
                save_checkpoint(checkpoint_file(home, adam.step), _snapshot(run, corpus, passes, state))
                _drop_passed(home, kept)


def _drop_passed(home: Path, kept: set[int]) -> None:
    """Delete the checkpoints that are not kept, but for the newest."""
    for step in stored_steps(home)[:-1]:
        if step not in kept:
            checkpoint_file(home, step).unlink()


def _check_finite(state: _State) -> None:
    losses = state.train_loss[: state.adam.step]
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        step = int(bad[0])
        raise Diverged(step + 1, losses[step].item(), History(*(np.array(c) for c in state.history.values())))


def _scheduled_rate(run: Run, step: int) -> float:
    return run.peak_rate * rate_factor(step / run.steps, run.schedule)


def _evaluate(run: Run, corpus: Corpus, passes: Passes, state: _State) -> None:
    """Append one row to the history."""
    step = state.adam.step
    row = (
        step,
        step * run.batch * run.size.context,
        _scheduled_rate(run, step),
        passes.evaluate(state.adam.weights, corpus.held_out),
        passes.evaluate(state.averages[0].weights, corpus.held_out),
    )
    for column, value in zip(state.history.values(), row, strict=True):
        column.append(value)


def _snapshot(run: Run, corpus: Corpus, passes: Passes, state: _State) -> Checkpoint:
    def named(vector: Tensor) -> dict[str, Tensor]:
        return unflatten(vector, passes.model)

    adam = state.adam
    return Checkpoint(
        step=adam.step,
        steps=run.steps,
        rate=_scheduled_rate(run, adam.step),
        beta2_product=adam.beta2_product,
        recipe=_recipe(run, corpus, passes.device),
        history=state.history,
        train_loss=state.train_loss[: adam.step],
        weights=named(adam.weights),
        first_moment=named(adam.first_moment),
        second_moment=named(adam.second_moment),
        averages=tuple(Averaged(a.window, named(a.weights), named(a.second_moment)) for a in state.averages),
    )


if __name__ == "__main__":
    import sys

    from nqflib.language_model.command import main

    sys.exit(main())
