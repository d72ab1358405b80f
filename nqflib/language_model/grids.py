"""The paper's measurement of stability: trials over learning rates, batch sizes and seeds, from one checkpoint.

    grid = stability_grid(run, checkpoint, corpus, [8, 32], [0.5, 1, 2], range(3), steps=100)  # doctest: +SKIP
    grid.stable(), grid.boundary()                                                             # doctest: +SKIP

    python -m nqflib.language_model.grids --seeds 10     # writes data/reference/stability_grid.json

A trial is that of `nqflib.language_model.edges`. It is unstable if the loss of a step exceeds `RUNAWAY` times that of
the first; a sharper criterion also calls it unstable if the loss of its last step is above the first. The last and the
first loss belong to different batches, so at small batches their noise alone makes some trials unstable by it.

Each cell, all factors at one batch size with one seed, is kept once it is done, so that a grid that was killed goes on.
Cells run side by side through joblib, whose Dask backend spreads them over a cluster:

    with joblib.parallel_config(backend="dask"):                                               # doctest: +SKIP
        grid = stability_grid(..., jobs=-1)

Source: Meterez et al. 2026; factors 1/4 to 4 of the run's own rate and batch size, ten seeds, a tenth of the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from joblib import Parallel, delayed
from numpy.typing import NDArray
from torch import Tensor

from nqflib import reference
from nqflib.language_model.checkpoints import Checkpoint
from nqflib.language_model.corpus import Corpus
from nqflib.language_model.edges import Frozen, Trial, stream_after, trial_losses
from nqflib.language_model.presets import PRESETS, preset
from nqflib.language_model.pretrain import Run, pretrain
from nqflib.language_model.storage import DamagedFileError, cache_folder, content_key, locked, write_json
from nqflib.progress import progress

FORMAT = 1
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the checkpoint's rate, and of the run's batch size
RECORD = "stability_grid"


@dataclass(frozen=True, eq=False)
class Grid:
    """Trials at `factors` x the checkpoint's `rate`, for each of `batches` (windows a step) and `seeds` of the stream.

    `steps` is the length of a trial for each batch size. Arrays are (batches, factors, seeds): `largest` and `last`
    loss over the first, infinite and not a number where a loss was not finite; `stopped`, the step at which a trial was
    called unstable, 0 for a stable one; `growth`, see `loss_growth`. `seconds` is the wall time of all trials, on one
    core.
    """

    rate: float
    batches: tuple[int, ...]
    factors: tuple[float, ...]
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    largest: NDArray[np.float64]
    last: NDArray[np.float64]
    stopped: NDArray[np.int64]
    growth: NDArray[np.float64]
    seconds: float

    def stable(self, *, sharp: bool = False) -> NDArray[np.float64]:
        """The share of seeds that were stable, (batches, factors); `sharp` asks for a last loss not above the first."""
        held = self.stopped == 0
        return (held & (self.last <= 1) if sharp else held).mean(-1)

    def boundary(self, *, sharp: bool = False) -> NDArray[np.float64]:
        """The largest factor at which more than half of the seeds are stable, (batches,), 0 where there is none.

        Where it is the largest factor of the grid, the edge may lie anywhere above.
        """
        return np.max(np.where(self.stable(sharp=sharp) > 0.5, self.factors, 0.0), axis=1)

    def as_json(self) -> dict[str, Any]:
        """The fields as numbers and lists, with None for what is not finite."""
        stored = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("largest", "last", "growth"):
            values = stored[name].astype(object)
            values[~np.isfinite(stored[name])] = None
            stored[name] = values.tolist()
        return {**stored, "stopped": self.stopped.tolist()}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Grid:
        """The grid that `as_json` wrote. Raises `ValueError` if a field is missing or an array has the wrong shape."""
        try:
            axes = {name: tuple(stored[name]) for name in ("batches", "factors", "seeds", "steps")}
            floats = {name: np.array(stored[name], np.float64) for name in ("largest", "last", "growth")}
            floats["largest"] = np.nan_to_num(floats["largest"], nan=np.inf)
            known: dict[str, Any] = {**axes, **floats, "stopped": np.array(stored["stopped"], np.int64)}
            grid = cls(rate=stored["rate"], seconds=stored["seconds"], **known)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a stability grid: {type(error).__name__} {error}") from error
        shape = (len(grid.batches), len(grid.factors), len(grid.seeds))
        if len(grid.steps) != shape[0] or any(a.shape != shape for a in (*floats.values(), grid.stopped)):
            raise ValueError(f"not a stability grid: its arrays must be {shape}")
        return grid


class _Cell(NamedTuple):
    batch: int
    steps: int
    seed: int


def stability_grid(
    run: Run,
    checkpoint: Checkpoint,
    corpus: Corpus,
    batches: Sequence[int],
    factors: Sequence[float],
    seeds: Sequence[int],
    *,
    steps: int | Sequence[int],
    jobs: int = 1,
    folder: Path | None = None,
) -> Grid:
    """The grid at one checkpoint, computed or read.

    Args:
        run: gives sizes and precision.
        checkpoint: where the quadratic is taken.
        corpus: the run's text. Each seed reads an order of its own; `run.seed` is what the run reads next.
        batches: windows a step.
        factors: of the checkpoint's rate.
        seeds: of the order of the windows.
        steps: of a stable trial, one number or one for each batch size.
        jobs: processes, -1 for one a core, each with one torch thread. The result does not depend on it.
        folder: where cells are kept (default: `cache_folder()`).

    Raises `ValueError` for an empty axis or numbers that are not positive, `DamagedFileError` for a stored cell that
    cannot be read.
    """
    lengths = [steps] * len(batches) if isinstance(steps, int) else list(steps)
    tried = [float(factor) for factor in factors]
    if not (batches and tried and len(seeds)) or len(lengths) != len(batches):
        raise ValueError("batches, factors and seeds must not be empty, and steps one number or one for each batch")
    if min(*batches, *lengths) < 1 or min(tried) <= 0:
        raise ValueError("batches, factors and steps must be positive")

    def stream(cell: _Cell) -> Tensor:
        windows = cell.batch * cell.steps
        return stream_after(run, checkpoint, corpus, windows, seed=cell.seed)[:windows].contiguous()

    home = (folder or cache_folder()) / "grids"
    # All batch sizes of one seed come first: a grid that runs out of time has fewer seeds, and no holes.
    cells = [_Cell(batch, n, seed) for seed in seeds for batch, n in zip(batches, lengths, strict=True)]
    files = {cell: home / f"{_key(checkpoint, stream(cell), cell, tried)}.json" for cell in cells}
    missing = [cell for cell in cells if not files[cell].exists()]
    # joblib draws from this generator as workers become free, so that few streams are held at a time.
    calls = (delayed(_work)(run, checkpoint, stream(cell), cell, tried) for cell in missing)
    done: Any = Parallel(n_jobs=jobs, return_as="generator_unordered")(calls)
    for cell, found in progress(done, "stability grid", total=len(missing)):
        with locked(files[cell]):
            write_json(files[cell], found)
    return _gather(checkpoint, batches, tried, seeds, lengths, [_read(files[cell], tried) for cell in cells])


def loss_growth(losses: Sequence[float]) -> float:
    """The slope of ln loss per step over the second half of a trial, by least squares: an estimate of its exponent.

    Not a number for a half of under two steps or with a loss that has no logarithm. It is 0 or a little below for a
    stable trial, and too small while the loss is not far above the part that does not grow.
    """
    half = np.array(losses[len(losses) // 2 :], dtype=np.float64)
    if len(half) < 2 or not (np.isfinite(half).all() and (half > 0).all()):
        return math.nan
    return float(np.polyfit(np.arange(len(half)), np.log(half), 1)[0])


def _key(checkpoint: Checkpoint, stream: Tensor, cell: _Cell, factors: Sequence[float]) -> str:
    cause = {
        "recipe": checkpoint.recipe,
        "step": checkpoint.step,
        "stream": hashlib.sha256(stream.numpy().tobytes()).hexdigest(),  # says the seed, too
        "options": [cell.batch, cell.steps, list(factors)],
        "format": FORMAT,
    }
    return content_key(cause)


def _work(
    run: Run, checkpoint: Checkpoint, stream: Tensor, cell: _Cell, factors: Sequence[float]
) -> tuple[_Cell, dict[str, Any]]:
    """The losses of all trials of a cell, and what they took; this is what a worker runs."""
    threads, start = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(1)
    try:
        frozen = Frozen(run, checkpoint)
        losses = [trial_losses(frozen, stream.split(cell.batch), factor) for factor in factors]
    finally:
        torch.set_num_threads(threads)
    return cell, {"losses": losses, "seconds": time.perf_counter() - start}


def _read(file: Path, factors: Sequence[float]) -> dict[str, Any]:
    try:
        stored = json.loads(file.read_bytes())
        if len(stored["losses"]) != len(factors) or not (all(stored["losses"]) and stored["seconds"] >= 0):
            raise ValueError("losses are missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{file} is damaged ({error}); delete it to run its trials again") from error
    return stored


def _gather(
    checkpoint: Checkpoint,
    batches: Sequence[int],
    factors: Sequence[float],
    seeds: Sequence[int],
    steps: Sequence[int],
    found: Sequence[dict[str, Any]],
) -> Grid:
    """The grid from its cells, of which all batch sizes of the first seed come first."""
    rows = []
    for cell in found:
        for factor, losses in zip(factors, cell["losses"], strict=True):
            trial = Trial.of(factor, losses)
            rows.append((trial.largest, trial.last, trial.stopped or 0, loss_growth(losses)))
    columns = np.array(rows).T.reshape(4, len(seeds), len(batches), len(factors)).transpose(0, 2, 3, 1)
    return Grid(
        checkpoint.rate,
        tuple(batches),
        tuple(factors),
        tuple(seeds),
        tuple(steps),
        largest=columns[0],
        last=columns[1],
        stopped=columns[2].astype(np.int64),
        growth=columns[3],
        seconds=sum(cell["seconds"] for cell in found),
    )


def record(arguments: Sequence[str] | None = None) -> int:
    """The command line: run, or go on with, the grid of a preset and write it down with what produced it."""
    parser = argparse.ArgumentParser(prog="python -m nqflib.language_model.grids", description=record.__doc__)
    parser.add_argument("--preset", default="laptop", choices=list(PRESETS), help="the scale of the run")
    parser.add_argument("--batch", type=int, default=32, help="windows a step of the run")
    parser.add_argument("--checkpoints", type=float, nargs="+", default=[0.379], help="shares of the run")
    parser.add_argument("--seeds", type=int, default=10, help="how many orders of the text, the run's own among them")
    parser.add_argument("--length", type=float, default=0.1, help="of a trial, as a share of the run's tokens")
    parser.add_argument("--least", type=int, default=100, help="steps that a trial has at least")
    parser.add_argument("--jobs", type=int, default=1, help="processes, -1 for one a core")
    parser.add_argument("--out", type=Path, help="folder to write to (default: data/reference)")
    options = parser.parse_args(arguments)
    run = Run.of(preset(options.preset), options.batch)
    trained = pretrain(run)
    batches = [max(1, round(share * run.batch)) for share in SHARES]
    steps = [max(math.ceil(options.length * run.tokens / (B * run.size.context)), options.least) for B in batches]
    grids = []
    for done in options.checkpoints:
        point, seeds = trained.checkpoint(done), range(run.seed, run.seed + options.seeds)
        grid = stability_grid(run, point, trained.corpus, batches, SHARES, seeds, steps=steps, jobs=options.jobs)
        grids.append({"done": point.done, **grid.as_json()})
    settings = {name: getattr(options, name) for name in ("preset", "batch", "checkpoints", "seeds", "length", "least")}
    shares = " ".join(f"{done:g}" for done in options.checkpoints)
    command = (
        f"{parser.prog} --preset {options.preset} --batch {options.batch} --checkpoints {shares}"
        f" --seeds {options.seeds} --length {options.length:g} --least {options.least}"
    )
    reference.record(RECORD, {"settings": settings, "grids": grids}, command=command, folder=options.out)
    return 0


def recorded(*, folder: Path | None = None) -> list[tuple[float, Grid]]:
    """The recorded grids, each with the share of the run that its checkpoint has done; raises as `reference.load`."""
    return [(entry["done"], Grid.from_json(entry)) for entry in reference.load(RECORD, folder=folder)["grids"]]


if __name__ == "__main__":
    sys.exit(record())
