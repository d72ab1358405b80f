"""A step of laptop pretraining does its arithmetic at 40 % or more of the rate of bare matrix products of its shapes.

    python benchmarks/language_model.py

Both sides run in float32 on one thread. The products' side multiplies, for every weight matrix of the laptop model, the
same three pairs as training does (activation by weight, gradient by weight, gradient by activation), and nothing else:
no attention, no norms, no softmax. The step's side is everything that a step of `pretrain` does: gathering the batch,
loss and gradient, Adam, both running averages; its arithmetic is counted as 6 N a token. Automatic differentiation of
the same model is timed too, for scale. The bar holds for batches of 32 and 128 windows. A batch of 4 has 256 tokens to
share the cost of some 250 calls among, and is shown without a bar.

Times are CPU time, medians of 5 repetitions with the sides interleaved. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nqflib.language_model.optimizer import AVERAGES, Adam, Average
from nqflib.language_model.passes import Passes
from nqflib.language_model.presets import preset
from nqflib.language_model.shards import TokenStream
from nqflib.language_model.transformer import Transformer, flatten, next_token_loss

LAPTOP = preset("laptop")
SIZE = LAPTOP.size
BARS = {4: 0.0, 32: 0.4, 128: 0.4}
REPETITIONS = 5


def products(tokens: int, generator: torch.Generator) -> tuple[Callable[[], None], int]:
    """The matrix products of one pass forward and backward over `tokens` tokens, and their FLOP."""
    D, M, V, L = SIZE.width, SIZE.hidden, SIZE.vocabulary, SIZE.layers
    shapes = {(3 * D, D): L, (D, D): L, (M, D): L, (D, M): L, (V, D): 1}
    cases = [
        tuple(torch.randn(shape, generator=generator) for shape in ((tokens, i), (o, i), (tokens, o)))
        for (o, i), count in shapes.items()
        for _ in range(count)
    ]

    def run() -> None:
        for x, w, y in cases:
            torch.mm(x, w.T)
            torch.mm(y, w)
            torch.mm(y.T, x)

    return run, sum(6 * x.shape[0] * w.numel() for x, w, _ in cases)


def training_step(batch: int, generator: torch.Generator) -> Callable[[], None]:
    """One step of pretraining on random tokens."""
    passes = Passes(SIZE, torch.float32, LAPTOP.micro_batch, torch.device("cpu"))
    weights = 0.1 * torch.randn(SIZE.parameters, generator=generator)
    adam = Adam.start(passes.model, weights)
    averages = [Average.start(window, weights) for window in AVERAGES]
    stream = TokenStream([np.random.default_rng(0).integers(SIZE.vocabulary, size=6_000_000).astype(np.uint16)])
    starts = np.random.default_rng(1).integers(90_000, size=batch) * SIZE.context

    def run() -> None:
        windows = torch.from_numpy(stream.gather(starts, SIZE.context + 1))
        _, gradient = passes.gradient(adam.weights, windows)
        adam.update(gradient, 1.0)
        for average in averages:
            average.update(adam)

    return run


def by_differentiation(batch: int, generator: torch.Generator) -> Callable[[], Tensor]:
    """Loss and gradient of the same model through autograd, in micro-batches."""
    model = Transformer(SIZE, generator=generator)
    windows = torch.randint(SIZE.vocabulary, (batch, SIZE.context + 1), generator=generator)
    parameters = dict(model.named_parameters())

    def run() -> Tensor:
        total = torch.zeros(SIZE.parameters)
        for part in windows.split(LAPTOP.micro_batch):
            gradients = torch.autograd.grad(next_token_loss(model, part), list(parameters.values()))
            total += flatten(dict(zip(parameters, gradients, strict=True)))
        return total

    return run


def measure(batch: int, generator: torch.Generator) -> bool:
    """Print one row of the table; True if the bar is met."""
    tokens = batch * SIZE.context
    bare, flop = products(tokens, generator)
    sides = {
        "products": bare,
        "step": training_step(batch, generator),
        "autograd": by_differentiation(batch, generator),
    }
    rounds = max(1, 4096 // tokens)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repetition in range(REPETITIONS + 1):
        for side, run in sides.items():
            start = time.process_time()
            for _ in range(rounds):
                run()
            if repetition:  # the first is a warm-up
                times[side].append((time.process_time() - start) / rounds)
    median = {side: statistics.median(values) for side, values in times.items()}
    rate = flop / median["products"]
    arithmetic = 6 * SIZE.parameters * tokens / median["step"]
    print(
        f"{batch:>6}{rate / 1e9:>12.1f}{1e3 * median['step']:>10.1f}{tokens / median['step']:>12,.0f}"
        f"{arithmetic / rate:>8.0%}{BARS[batch]:>7.0%}{1e3 * median['autograd']:>11.1f}"
    )
    return arithmetic / rate >= BARS[batch]


def main() -> int:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print(f"{'batch':>6}{'products':>12}{'step':>10}{'tokens/s':>12}{'share':>8}{'bar':>7}{'autograd':>11}")
    print(f"{'':>6}{'GFLOP/s':>12}{'ms':>10}{'':>12}{'':>8}{'':>7}{'ms':>11}")
    met = [measure(batch, generator) for batch in BARS]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
