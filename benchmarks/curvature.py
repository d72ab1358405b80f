"""A Gauss-Newton product of the shipped decoder costs at most 1.8 gradients; of any module 2.8, a Hessian product 3.5.

    python benchmarks/curvature.py

A decoder of half a million parameters in float32, 8,192 tokens in micro-batches of 1,024, one thread. The unit is the
gradient by automatic differentiation in the same micro-batches. `retain` keeps the graphs of all micro-batches between
products, `recompute` builds them for each. By counting matrix products with the primal kept, a Hessian product cannot
cost less than 2 gradients and a Gauss-Newton product less than 4/3. `4 starts` is the cost for each of four vectors
that share the primal pass.

CPU times, medians of 5 repetitions with the sides interleaved. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from nqflib.curvature import Curvature, Way
from nqflib.language_model.linearization import loss_and_gradient
from nqflib.language_model.transformer import Architecture, Transformer

SIZE = Architecture(vocabulary=512, width=96, layers=4, heads=4, hidden=384, context=64)
WINDOWS, MICRO, REPETITIONS = 128, 16, 5
BARS = {"gauss-newton, shipped": 1.8, "gauss-newton, any module": 2.8, "hessian, any module": 3.5}


def sides() -> dict[str, tuple[Callable[[], object], int]]:
    """Name of each side: what to run, and for how many vectors."""
    model = Transformer(SIZE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.unembedding.normal_(generator=generator).mul_(SIZE.width**-0.5)
    windows = torch.randint(SIZE.vocabulary, (WINDOWS, SIZE.context + 1), generator=generator)
    batches = [(part[:, :-1], part[:, 1:]) for part in windows.split(MICRO)]
    weights = dict(model.named_parameters())

    def any_module(way: Way, plan: str) -> Curvature:
        function = lambda p, x: torch.func.functional_call(model, p, (x,))  # noqa: E731 (hides `linearize`)
        return Curvature(function, batches, parameters=weights, way=way, plan=plan)  # pyright: ignore[reportArgumentType]

    shipped, again = Curvature(model, batches, plan="retain"), Curvature(model, batches, plan="recompute")
    reverse, forward = any_module("reverse", "retain"), any_module("forward", "recompute")
    rebuilt = any_module("reverse", "recompute")
    v = torch.randn(shipped.n, generator=generator)
    four = torch.randn(4, shipped.n, generator=generator)

    def by_hand() -> None:
        for part in windows.split(MICRO):
            loss_and_gradient(model, weights, part)

    return {
        "gradient": (reverse.gradient, 1),
        "gradient, shipped": (by_hand, 1),
        "gauss-newton, shipped": (lambda: shipped.gauss_newton(v), 1),
        "  recompute": (lambda: again.gauss_newton(v), 1),
        "  recompute, 4 starts": (lambda: again.gauss_newton(four), 4),
        "gauss-newton, any module": (lambda: reverse.gauss_newton(v), 1),
        "  forward, recompute": (lambda: forward.gauss_newton(v), 1),
        "hessian, any module": (lambda: reverse.hessian(v), 1),
        "  reverse, recompute": (lambda: rebuilt.hessian(v), 1),
        "  reverse, 4 starts": (lambda: rebuilt.hessian(four), 4),
        "  forward over reverse": (lambda: forward.hessian(v), 1),
    }


def main() -> int:
    torch.set_num_threads(1)
    runs = sides()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(REPETITIONS + 1):
        for name, (run, vectors) in runs.items():
            begin = time.process_time()
            run()
            if repetition:  # the first builds the graphs
                times[name].append((time.process_time() - begin) / vectors)
    unit, met = statistics.median(times["gradient"]), []
    print(f"{'a vector of ' + format(SIZE.parameters, ','):<28}{'CPU s':>8}{'gradients':>11}{'bar':>6}")
    for name, values in times.items():
        ratio = statistics.median(values) / unit
        bar = BARS.get(name)
        met.append(bar is None or ratio <= bar)
        print(f"{name:<28}{statistics.median(values):>8.2f}{ratio:>11.2f}{bar or '':>6}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
