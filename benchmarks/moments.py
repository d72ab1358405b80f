"""Training by order parameters is at least 2.5 times faster than training the weights at d = 4,096, 15 at 16,384.

    python benchmarks/moments.py

Both sides run full-batch gradient descent on the same neural quadratic form: 200 samples, p = 40 parameters per
unit, float32, one thread. The weights' side is what a careful implementation does: it forms M = W W^T (p^2 d
multiplications; A_x W for each sample would be n times that), contracts M with the structure matrices exactly as the
other side does, and updates W by H W in place; units are columns or rows, whichever is faster at that width. So the
ratio compares 2 p^2 d multiplications with 2 p^3 and leaves everything else equal. Automatic differentiation of
the layer itself is timed too, for scale; no bar depends on it.

The bars are those of the perceptron form, whose structure matrices are mostly zero, as they are in every layer of the
paper. On the dense form the contraction, the same on both sides, is more than half of what the order parameters
cost, so the ratio at large d is smaller; it is printed without a bar at 16,384.

Times are CPU time per step, medians of 5 repetitions with the sides interleaved. The setup of the order parameters
(a QR factorisation of W, once) is a column of its own. Exits with 1 if a bar is missed or the outputs disagree.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nqflib.contraction import FormContraction
from nqflib.forms import QuadraticForm
from nqflib.moments import Moments, outputs, train

SAMPLES, P, ETA = 200, 40, 0.02
BARS = {"perceptron": {1024: 0.0, 4096: 2.5, 16384: 15.0}, "dense": {1024: 0.0, 4096: 2.5, 16384: 0.0}}


def perceptron_form(generator: torch.Generator, c: int = 3) -> tuple[QuadraticForm, Tensor, Callable]:
    """Form, targets and layer of c linear read-outs v of hidden units u^T x: A couples u with v, zeros elsewhere."""
    x = torch.randn(SAMPLES, P - c, generator=generator)
    A = torch.zeros(SAMPLES, c, P, P)
    for k in range(c):
        A[:, k, k, c:] = A[:, k, c:, k] = x / 2
    targets = x @ torch.randn(P - c, c, generator=generator) / math.sqrt(P - c)
    return QuadraticForm(torch.zeros(SAMPLES, c), None, A), targets, lambda W: (x @ W[c:]) @ W[:c].T


def dense_form(generator: torch.Generator) -> tuple[QuadraticForm, Tensor, Callable]:
    """Form, targets and layer of matrix sensing: one output, structure matrices without any zero."""
    A = torch.randn(SAMPLES, 1, P, P, generator=generator) / P
    A = (A + A.mT) / 2
    form = QuadraticForm(torch.zeros(SAMPLES, 1), None, A)
    target = torch.randn(P, 2, generator=generator)
    return form, form(target), lambda W: form.from_moments(W @ W.T, W.sum(1))


def train_columns(contraction: FormContraction, W: Tensor, steps: int) -> Tensor:
    """W (p, d) after `steps` of gradient descent, units as columns."""
    W, change = W.clone(), torch.empty_like(W)
    for _ in range(steps):
        _, H = contraction.gradient(None, contraction.outputs(W @ W.T, None))
        W.sub_(torch.mm(H, W, out=change), alpha=ETA)
    return W


def train_rows(contraction: FormContraction, W: Tensor, steps: int) -> Tensor:
    """The same with units as rows of a (d, p) array, which makes W W^T faster and H W slower."""
    W = W.T.contiguous()
    change = torch.empty_like(W)
    for _ in range(steps):
        _, H = contraction.gradient(None, contraction.outputs(W.T @ W, None))
        W.sub_(torch.mm(W, H, out=change), alpha=ETA)
    return W.T


def train_autograd(layer: Callable[[Tensor], Tensor], W: Tensor, y: Tensor, steps: int) -> Tensor:
    """The same by automatic differentiation of the layer and `torch.optim.SGD`."""
    W = W.clone().requires_grad_()
    optimizer = torch.optim.SGD([W], lr=ETA)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (layer(W) - y).square().sum() / len(y)
        loss.backward()
        optimizer.step()
    return W.detach()


def cpu_time(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(name: str, case: tuple[QuadraticForm, Tensor, Callable], d: int, generator: torch.Generator) -> bool:
    """Print one row of the table; True if the bar is met and the outputs agree."""
    form, y, layer = case
    W = 0.5 / math.sqrt(d) * torch.randn(P, d, generator=generator)
    few, many = max(40, 400_000 // d), 3000
    contraction, start = FormContraction.of(form, SAMPLES, many).residual(y, many), Moments.of(W)
    sides: dict[str, tuple[Callable[[], object], int]] = {
        "moments": (lambda: train(form, start, y, eta=ETA, steps=many, record_every=many), many),
        "columns": (lambda: train_columns(contraction, W, few), few),
        "rows": (lambda: train_rows(contraction, W, few), few),
        "autograd": (lambda: train_autograd(layer, W, y, few), few),
        "setup": (lambda: Moments.of(W), 1),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repetition in range(6):
        for side, (run, steps) in sides.items():
            with torch.set_grad_enabled(side == "autograd"):
                elapsed = cpu_time(run) / steps
            if repetition:  # the first is a warm-up
                times[side].append(elapsed)
    median = {side: 1e6 * statistics.median(values) for side, values in times.items()}
    weights = min(median["columns"], median["rows"])
    ratio, bar = weights / median["moments"], BARS[name][d]

    ours = train(form, start, y, eta=ETA, steps=few, record_every=few).final
    theirs = train_columns(contraction, W, few)
    difference = (outputs(form, ours.M, ours.mu) - form(theirs)).abs().max().item()
    agree = difference < 1e-4
    print(
        f"{name:<11}{d:>7}{median['moments']:>10.0f}{median['columns']:>10.0f}{median['rows']:>10.0f}"
        f"{ratio:>8.1f}{bar:>6.1f}"
        f"{median['autograd']:>11.0f}{median['setup'] / 1000:>10.1f}{difference:>12.1e}"
    )
    return agree and ratio >= bar


def main() -> int:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print(f"{'form':<11}{'d':>7}{'moments':>10}{'W columns':>10}{'W rows':>10}{'ratio':>8}{'bar':>6}", end="")
    print(f"{'autograd':>11}{'setup':>10}{'difference':>12}")
    print(f"{'':<18}{'us/step':>10}{'us/step':>10}{'us/step':>10}{'':>14}{'us/step':>11}{'ms':>10}{'max |f|':>12}")
    cases = {"perceptron": perceptron_form(generator), "dense": dense_form(generator)}
    met = [measure(name, case, d, generator) for name, case in cases.items() for d in BARS[name]]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
