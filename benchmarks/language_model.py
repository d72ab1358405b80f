"""A step of laptop pretraining does its arithmetic at 40 % or more of the rate of its bare matrix products.

    python benchmarks/language_model.py

Both sides run in float32 on one thread. The products' side multiplies, in the shapes of the laptop model, every pair of
matrices that a step multiplies and does nothing else: for each weight activation by weight, gradient by weight and
gradient by activation, and attention's six products a layer. The step's side is everything that a step of `pretrain`
does: gathering the batch, loss and gradient, Adam, both running averages; its arithmetic is counted as 6 N a token,
without attention. The column `weights` takes the rate of the weights' products alone, which are the faster ones.
Automatic differentiation of the same model is timed too, for scale. The bar holds for batches of 32 and 128 windows; a
batch of 4 has 256 tokens to share the cost of some 450 calls among, and is shown without a bar.

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


Pairs = list[tuple[Tensor, Tensor]]


def weight_products(tokens: int, generator: torch.Generator) -> Pairs:
    """What is multiplied, forward and backward, for every weight matrix."""
    D, M, V, L = SIZE.width, SIZE.hidden, SIZE.vocabulary, SIZE.layers
    pairs: Pairs = []
    for (o, i), count in {(3 * D, D): L, (D, D): L, (M, D): L, (D, M): L, (V, D): 1}.items():
        for _ in range(count):
            x, w, y = (torch.randn(shape, generator=generator) for shape in ((tokens, i), (o, i), (tokens, o)))
            pairs += [(x, w.T), (y, w), (y.T, x)]
    return pairs


def attention_products(tokens: int, generator: torch.Generator) -> Pairs:
    """What attention multiplies, for all heads at once: scores, mixing, and their gradients."""
    T, K = SIZE.context, SIZE.head_width
    pairs: Pairs = []
    for _ in range(SIZE.layers):
        heads = tokens // T * SIZE.heads
        q, k, v, d = (torch.randn(heads, T, K, generator=generator) for _ in range(4))
        scores = torch.randn(heads, T, T, generator=generator)
        pairs += [(q, k.mT), (scores, v), (d, v.mT), (scores, k), (scores.mT, q), (scores.mT, d)]
    return pairs


def multiply(pairs: Pairs) -> Callable[[], None]:
    def run() -> None:
        for a, b in pairs:
            torch.matmul(a, b)

    return run


def flop(pairs: Pairs) -> int:
    """Multiplications and additions."""
    return sum(2 * a.numel() * b.shape[-1] for a, b in pairs)


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
    micro = min(tokens, LAPTOP.micro_batch * SIZE.context)  # products of the sizes that a step has
    weights, attention = weight_products(micro, generator), attention_products(micro, generator)
    sides: dict[str, tuple[Callable[[], object], int]] = {
        "weights": (multiply(weights), tokens // micro),
        "attention": (multiply(attention), tokens // micro),
        "step": (training_step(batch, generator), 1),
        "autograd": (by_differentiation(batch, generator), 1),
    }
    rounds = max(1, 4096 // tokens)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repetition in range(REPETITIONS + 1):
        for side, (run, count) in sides.items():
            start = time.process_time()
            for _ in range(rounds * count):
                run()
            if repetition:  # the first is a warm-up
                times[side].append((time.process_time() - start) / (rounds * count))
    median = {side: statistics.median(values) for side, values in times.items()}
    rate = (flop(weights) + flop(attention)) / (median["weights"] + median["attention"])
    weights_rate = flop(weights) / median["weights"]
    arithmetic = 6 * SIZE.parameters * tokens / median["step"]
    print(
        f"{batch:>6}{rate / 1e9:>12.1f}{weights_rate / 1e9:>10.1f}{1e3 * median['step']:>9.1f}"
        f"{tokens / median['step']:>11,.0f}{arithmetic / rate:>8.0%}{BARS[batch]:>6.0%}"
        f"{arithmetic / weights_rate:>10.0%}{1e3 * median['autograd']:>11.1f}"
    )
    return arithmetic / rate >= BARS[batch]


def main() -> int:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    heads = ("products", "weights", "step", "tokens/s", "share", "bar", "weights", "autograd")
    units = ("GFLOP/s", "GFLOP/s", "ms", "", "", "", "share", "ms")
    for first, names in (("batch", heads), ("", units)):
        columns = (f"{name:>{width}}" for name, width in zip(names, (12, 10, 9, 11, 8, 6, 10, 11), strict=True))
        print(f"{first:>6}" + "".join(columns))
    met = [measure(batch, generator) for batch in BARS]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
