"""Theorems 14 and 15 on a stack of perceptrons' quadratic forms: closure, and compression layer by layer.

Closure: the moments (M, mu) of every layer, trained by `moments.train_deep`, give the outputs of the weights
themselves. Compression: layer l can be compressed exactly if its subspace V_l holds what it reads at ANY step, since
the inputs of layer l move with the layers below.
Source: Ziyin et al. 2026, appendix B.4, theorems 14 and 15.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nqflib.compression import Compression, compress, training_subspace
from nqflib.forms import QuadraticForm
from nqflib.layers import MLP
from nqflib.moments import Layer, Moments, Trajectory, deep_outputs, squared_loss, train_deep
from nqflib.stacks import DeepMLP
from nqflib.units import unit_matrix


def closure_error(
    stack: DeepMLP, x: Tensor, y: Tensor, *, rate: float, steps: int, batches: Sequence[Tensor], record_every: int = 25
) -> float:
    """The largest |f_moments - f_weights| / max |f_weights| on all samples at the recorded steps (theorem 14).

    Both descend on the same batches, one by the moments of each layer, the other by the weights of `stack.twin()`,
    of which `stack` is left as it was. Arguments: `x` (n, k), `y` (n, c); `batches` sample indices for every step.
    """
    layers, states = _layers(stack), _moments(stack)
    runs = train_deep(layers, x, states, y, eta=rate, steps=steps, batches=batches, record_every=record_every)
    twin = stack.twin()
    weights = list(twin.parameters())
    worst, recorded = 0.0, runs[0].steps.tolist()
    for step in range(steps + 1):
        if step in recorded:
            with torch.no_grad():
                f = twin(x)
                moments = _outputs(layers, x, runs, recorded.index(step))
                worst = max(worst, ((moments - f).abs().max() / f.abs().max()).item())
        if step < steps:
            loss = squared_loss(twin(x[batches[step]]), y[batches[step]])
            slopes = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for w, slope in zip(weights, slopes, strict=True):
                    w.sub_(slope, alpha=rate)
    return worst


class DeepCompression(NamedTuple):
    """What a compressed stack does to the outputs on the training samples, and how many units it has."""

    error: float  # largest |f_small - f| / max |f| over all steps and samples
    initial_subspace_error: float  # the same with V_2 ... V_L taken at the start only; inf if that diverged
    widths: tuple[int, ...]  # units per layer, compressed
    initial_subspace_widths: tuple[int, ...]


def compression_error(stack: DeepMLP, x: Tensor, y: Tensor, *, rate: float, steps: int) -> DeepCompression:
    """Compress every layer of the forms of `stack` and train both by gradient descent (theorem 15).

    Arguments: `x` (n, k), `y` (n, c); every layer needs more units than k_l + 1, else `compress` raises ValueError.
    """
    layers, states = _layers(stack), _moments(stack)
    runs = train_deep(layers, x, states, y, eta=rate, steps=steps)
    with torch.no_grad():
        reads = [[x]] + [[] for _ in layers[1:]]  # what each layer reads, step by step
        for t in range(len(runs[0].steps)):
            h = x
            for below, layer in enumerate(layers[:-1]):
                h = layer(h).from_moments(runs[below].M[t], runs[below].mu[t])
                reads[below + 1].append(h)
    errors, widths = [], []
    for seen in (reads, [steps_read[:1] for steps_read in reads]):
        small = [_compress(*parts, rate) for parts in zip(layers, states, seen, strict=True)]
        scaled = [_scaled(layer, c.scale) for layer, c in zip(layers, small, strict=True)]
        started = [Moments.of(c.W) for c in small]
        compressed = train_deep(scaled, x, started, y, eta=[c.eta for c in small], steps=steps)
        widths.append(tuple(c.W.shape[1] for c in small))
        errors.append(_largest_difference(layers, runs, scaled, compressed, x))
    return DeepCompression(errors[0], errors[1], widths[0], widths[1])


def _layers(stack: DeepMLP) -> list[Layer]:
    return [layer.form for layer in stack.layers if isinstance(layer, MLP)]


def _moments(stack: DeepMLP) -> list[Moments]:
    return [Moments.of(unit_matrix(layer).detach()) for layer in stack.layers]


def _outputs(layers: Sequence[Layer], x: Tensor, runs: Sequence[Trajectory], t: int) -> Tensor:
    return deep_outputs(layers, x, [run.M[t] for run in runs], [run.mu[t] for run in runs])


def _compress(layer: Layer, state: Moments, reads: Sequence[Tensor], rate: float) -> Compression:
    # A form is linear in what it reads: a basis of all that was read has the same columns of A as the readings.
    _, sizes, directions = torch.linalg.svd(torch.cat(list(reads)), full_matrices=False)
    form = layer(directions[sizes > 1e-12 * sizes[0]])
    return compress(form, state, eta=rate, basis=training_subspace(form))


def _scaled(layer: Layer, scale: float) -> Layer:
    def form(h: Tensor) -> QuadraticForm:
        whole = layer(h)
        return replace(whole, A=whole.A * scale)

    return form


def _largest_difference(
    layers: Sequence[Layer],
    runs: Sequence[Trajectory],
    small: Sequence[Layer],
    compressed: Sequence[Trajectory],
    x: Tensor,
) -> float:
    if compressed[0].outcome != "finished":
        return float("inf")
    worst = 0.0
    with torch.no_grad():
        for t in range(len(runs[0].steps)):
            f = _outputs(layers, x, runs, t)
            worst = max(worst, ((_outputs(small, x, compressed, t) - f).abs().max() / f.abs().max()).item())
    return worst
