"""The largest learning rate at which training on the frozen quadratic of a checkpoint stays put, for any batch size.

    stream = stream_after(run, checkpoint, corpus, windows=32 * 105)                        # doctest: +SKIP
    found = largest_stable(run, checkpoint, stream, batch=32, steps=105)                    # doctest: +SKIP
    found.factor, found.rate                                                                # doctest: +SKIP

Every trial starts at the averaged weights with the run's own first moment, takes the Gauss-Newton quadratic of each
batch at these weights as its loss, and steps with averaged momentum 0.9 and the frozen preconditioner, at a constant
multiple of the checkpoint's learning rate. It is unstable once the loss of a step exceeds `RUNAWAY` times that of the
first. Source: Meterez et al. 2026, read from their code; they try a grid of five factors, we go down from the largest
factor that could be stable to the first that is, since unstable trials end after a few steps.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from nqflib.curvature import Product
from nqflib.language_model.checkpoints import Checkpoint
from nqflib.language_model.corpus import Corpus
from nqflib.language_model.optimizer import AVERAGES, Adam
from nqflib.language_model.presets import PRECISIONS
from nqflib.language_model.pretrain import Run
from nqflib.language_model.storage import DamagedFileError, cache_folder, content_key, locked, write_atomically
from nqflib.language_model.transformer import Transformer, flatten, unflatten
from nqflib.progress import progress
from nqflib.taylor import Expansion

FORMAT = 1
RUNAWAY = 4.0  # the loss of a step over that of the first
FACTORS = tuple(2.0**k for k in range(7, -6, -1))


@dataclass(frozen=True)
class Trial:
    """One run at `factor` times the checkpoint's rate: the largest loss over the first, and the last over the first.

    `stopped` is the step, from 1, at which the trial was called unstable, None for a stable one.
    """

    factor: float
    largest: float
    last: float
    stopped: int | None

    @classmethod
    def of(cls, factor: float, losses: Sequence[float]) -> Trial:
        """The trial whose steps had these losses, as `trial_losses` gives them."""
        ratios = [loss / losses[0] for loss in losses]
        largest = max(1.0, *ratios) if all(map(math.isfinite, ratios)) else math.inf
        return cls(factor, largest, ratios[-1], None if largest <= RUNAWAY else len(losses))


@dataclass(frozen=True)
class Edge:
    """The largest stable `factor` of the grid and `rate`, 0 if none is stable; the `trials` in the order they ran.

    A factor between the largest stable one and its unstable neighbour was tried too, so the edge is known to a factor
    of the square root of 2.
    """

    factor: float
    rate: float
    trials: tuple[Trial, ...]


def stream_after(run: Run, checkpoint: Checkpoint, corpus: Corpus, windows: int, *, seed: int | None = None) -> Tensor:
    """The windows (at least as many, T + 1) that follow a checkpoint, in the order of the run or of another `seed`."""
    batches = -(-windows // run.batch)
    order = run.seed if seed is None else seed
    return torch.cat([corpus.batch(checkpoint.step + i, run.batch, order) for i in range(batches)])


def largest_stable(
    run: Run,
    checkpoint: Checkpoint,
    stream: Tensor,
    batch: int,
    *,
    steps: int,
    factors: Sequence[float] = FACTORS,
    folder: Path | None = None,
) -> Edge:
    """The edge at one batch size, computed or read.

    Args:
        run: gives sizes and precision.
        checkpoint: where the quadratic is taken.
        stream: windows (at least `batch` x `steps`, T + 1).
        batch: windows a step.
        steps: of a stable trial.
        factors: of the checkpoint's rate, falling.
        folder: where the result is kept (default: `cache_folder()`).

    Raises `ValueError` for a stream that is too short or factors that do not fall, `DamagedFileError` for a stored
    result that cannot be read.
    """
    if len(stream) < batch * steps or batch < 1 or steps < 1:
        raise ValueError(f"stream must hold batch x steps = {batch * steps} windows or more, got {len(stream)}")
    if list(factors) != sorted(factors, reverse=True) or not factors or factors[-1] <= 0:
        raise ValueError("factors must be positive and fall")
    read = stream[: batch * steps].contiguous()
    cause = {
        "recipe": checkpoint.recipe,
        "step": checkpoint.step,
        "stream": hashlib.sha256(read.numpy().tobytes()).hexdigest(),
        "options": [batch, steps, list(factors)],
        "format": FORMAT,
    }
    file = (folder or cache_folder()) / "edges" / f"{content_key(cause)}.json"
    with locked(file):
        if file.exists():
            return _read(file)
        edge = _search(Frozen(run, checkpoint), read.split(batch), factors, f"batch {batch}")
        write_atomically(file, json.dumps(asdict(edge)).encode())
    return edge


def full_batch_limit(product: Product, n: int, *, momentum: float, guess: float, tolerance: float = 0.01) -> float:
    """The rate at which gradient descent on one fixed quadratic starts to grow, by bisection to `tolerance`.

    From a random point the step's length is compared over the second half of a run, which grows beyond the edge and
    shrinks before it; the iteration is m <- b m + (1 - b) C w, w <- w - eta m.

    Args:
        product: v (n,) -> C v, with C symmetric and not negative.
        n: length of vectors.
        momentum: b in [0, 1).
        guess: a rate within a factor of 1.5 of the edge. Raises `ValueError` if it is not.
    """
    start = torch.randn(n, generator=torch.Generator().manual_seed(0))

    def grows(rate: float, steps: int = 120) -> bool:
        w, m, lengths = start.clone(), torch.zeros(n), []
        scale = 0.0
        for _ in range(steps):
            m = momentum * m + (1 - momentum) * product(w)
            w = w - rate * m
            size = float(w.norm())
            w, m, scale = w / size, m / size, scale + math.log(size)  # the iteration is linear: keep it within range
            lengths.append(scale + math.log(float(m.norm())))
        return lengths[-1] > lengths[steps // 2]

    low, high = guess / 1.5, guess * 1.5
    if grows(low) or not grows(high):
        raise ValueError(f"guess must lie within a factor of 1.5 of the edge, got {guess}")
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if grows(middle) else (middle, high)
    return math.sqrt(low * high)


class Frozen:
    """The quadratic at a checkpoint's averaged weights, with the optimizer's state there and the learning `rate`."""

    def __init__(self, run: Run, checkpoint: Checkpoint) -> None:
        average = checkpoint.average(AVERAGES[0])
        self.model = Transformer(run.size, dtype=PRECISIONS[run.precision])
        self.theta0 = flatten(average.weights)
        self.parameters = unflatten(self.theta0.to(PRECISIONS[run.precision]), self.model)
        self.first_moment = flatten(checkpoint.first_moment)
        self.nu = flatten(average.second_moment) * (1 - checkpoint.beta2_product)
        self.step, self.beta2_product = checkpoint.step, checkpoint.beta2_product
        self.rate, self.micro_batch = checkpoint.rate, run.micro_batch

    def adam(self) -> Adam:
        """The optimizer as it starts, to be changed in place."""
        adam = Adam.start(self.model, self.theta0.clone())
        adam.first_moment, adam.second_moment = self.first_moment.clone(), self.nu
        adam.step, adam.beta2_product = self.step, self.beta2_product
        return adam

    def loss_and_gradient(self, weights: Tensor, windows: Tensor) -> tuple[float, Tensor]:
        """The quadratic of a batch (windows, T + 1) at `weights` (n,), in nats a token, and its gradient (n,)."""
        delta = unflatten((weights - self.theta0).to(self.parameters["embedding"].dtype), self.model)
        loss, total = 0.0, torch.zeros_like(self.theta0)
        for part in windows.split(self.micro_batch):
            at = Expansion(self.model, self.parameters, (part[:, :-1], part[:, 1:]))
            one, gradient = at.quad(delta)
            loss += float(one) * len(part) / len(windows)
            total.add_(flatten(gradient), alpha=len(part) / len(windows))
        return loss, total


def trial_losses(frozen: Frozen, batches: Iterable[Tensor], factor: float) -> list[float]:
    """The loss of each step at `factor` times the checkpoint's rate, ending early with the first that is a runaway.

    A runaway is above `RUNAWAY` times the first loss, or not finite.
    """
    adam, losses = frozen.adam(), []
    for windows in batches:
        loss, gradient = frozen.loss_and_gradient(adam.weights, windows)
        losses.append(loss)
        if not (math.isfinite(loss) and loss / losses[0] <= RUNAWAY):
            break
        adam.momentum_update(gradient, factor * frozen.rate)
    return losses


def _search(frozen: Frozen, batches: Sequence[Tensor], factors: Sequence[float], label: str) -> Edge:
    trials: list[Trial] = []
    for i, factor in enumerate(factors):
        trials.append(_trial(frozen, batches, factor, label))
        if trials[-1].stopped is None:
            if i:  # its neighbour is unstable: look once between them
                trials.append(_trial(frozen, batches, math.sqrt(factor * factors[i - 1]), label))
            break
    stable = max((t.factor for t in trials if t.stopped is None), default=0.0)
    return Edge(stable, stable * frozen.rate, tuple(trials))


def _trial(frozen: Frozen, batches: Sequence[Tensor], factor: float, label: str) -> Trial:
    return Trial.of(factor, trial_losses(frozen, progress(batches, f"rate x {factor:.3g}, {label}"), factor))


def _read(file: Path) -> Edge:
    try:
        stored = json.loads(file.read_bytes())
        return Edge(stored["factor"], stored["rate"], tuple(Trial(**t) for t in stored["trials"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{file} is damaged ({error}); delete it to search again") from error
