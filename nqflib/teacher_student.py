"""Layers and their quadratic forms that learn from a teacher online, several seeds and learning rates in one pass.

    two-layer perceptron     f = sum_i v_i tanh(u_i^T x)
    query-key attention      f = sum_i c^T X softmax(X^T W^K_i^T W^Q_i x / sqrt(d_k)),  c fixed

A teacher is a layer of the same shape with weights from N(0, 1). Its student starts from N(0, eps^2) and takes a step
of stochastic gradient descent on every batch of fresh Gaussian inputs; the student's quadratic form starts from the
same weights and sees the same batches. Weights carry leading axes (rates, seeds), so that all runs of a page are one
training loop; `nqflib.layers` has the same two layers for a single run.
Source: Ziyin et al. 2026, section 7 and appendix C (the teacher-student experiment), propositions 1 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nqflib.progress import progress

Tensors = tuple[Tensor, ...]


class Student(Protocol):
    """A layer that a teacher of its own kind can teach."""

    def inputs(self, samples: int, generator: torch.Generator) -> Tensors:
        """Standard normal inputs, `samples` on the first axis of each."""
        ...

    def weights(self, scale: float, generator: torch.Generator) -> Tensors:
        """Trained weights from N(0, scale^2)."""
        ...

    def constants(self, generator: torch.Generator) -> Tensors:
        """Standard normal weights that are not trained and that teacher and student share."""
        ...

    def outputs(self, weights: Tensors, constants: Tensors, inputs: Tensors, quadratic: bool) -> Tensor:
        """f (..., samples) of the layer, or of its quadratic form; leading axes broadcast."""
        ...


@dataclass(frozen=True)
class Perceptron:
    """f = sum_i v_i tanh(u_i^T x) for x of `dim` numbers and `width` units; the form is sum_i v_i u_i^T x."""

    dim: int = 20
    width: int = 100

    def inputs(self, samples: int, generator: torch.Generator) -> Tensors:
        return (_normal((samples, self.dim), generator),)

    def weights(self, scale: float, generator: torch.Generator) -> Tensors:
        return scale * _normal((self.width, self.dim), generator), scale * _normal((self.width, 1), generator)

    def constants(self, generator: torch.Generator) -> Tensors:
        return ()

    def outputs(self, weights: Tensors, constants: Tensors, inputs: Tensors, quadratic: bool) -> Tensor:
        u, v = weights
        if quadratic:
            return (inputs[0] @ (u.mT @ v)).squeeze(-1)
        return (torch.tanh(inputs[0] @ u.mT) @ v).squeeze(-1)


@dataclass(frozen=True)
class QueryKey:
    """Query-key attention of `heads` over `tokens` tokens of `dim` numbers, one fixed merged readout c for all heads.

    The form is f = sum_i [c^T x_avg + (Sigma_X c)^T W^K_i^T W^Q_i x / sqrt(d_k)], Sigma_X the covariance of the tokens.
    """

    dim: int = 16
    tokens: int = 10
    key_dim: int = 8
    heads: int = 4

    def inputs(self, samples: int, generator: torch.Generator) -> Tensors:
        return _normal((samples, self.dim), generator), _normal((samples, self.tokens, self.dim), generator)

    def weights(self, scale: float, generator: torch.Generator) -> Tensors:
        shape = self.heads, self.dim, self.key_dim
        return scale * _normal(shape, generator), scale * _normal(shape, generator)

    def constants(self, generator: torch.Generator) -> Tensors:
        return (_normal((self.dim, 1), generator),)

    def outputs(self, weights: Tensors, constants: Tensors, inputs: Tensors, quadratic: bool) -> Tensor:
        (query, key), (c,), (x, X) = weights, constants, inputs
        product = query @ key.mT / math.sqrt(self.key_dim)  # (..., heads, dim, dim)
        along = (X @ c.unsqueeze(-3)).squeeze(-1)  # c^T X, (..., samples, tokens)
        if quadratic:
            centred = along - along.mean(-1, keepdim=True)
            u = (centred.unsqueeze(-2) @ X).squeeze(-2) / self.tokens  # Sigma_X c, (..., samples, dim)
            return self.heads * along.mean(-1) + ((x @ product.sum(-3)) * u).sum(-1)
        moved = x.unsqueeze(-3) @ product  # (..., heads, samples, dim)
        logits = moved.movedim(-3, -2) @ X.mT  # (..., samples, heads, tokens)
        return (logits.softmax(-1) * along.unsqueeze(-2)).sum((-2, -1))


class Runs(NamedTuple):
    """What T records of all runs hold; losses and squared distances are in units of the teacher's variance."""

    steps: np.ndarray  # (T,) updates done
    layer: np.ndarray  # (T, rates, seeds) loss of the layer on fresh inputs
    form: np.ndarray  # (T, rates, seeds) loss of its quadratic form
    apart: np.ndarray  # (T, rates, seeds) mean square of the difference of their outputs

    def parting_steps(self, level: float) -> np.ndarray:
        """The first recorded step at which the two losses differ by more than `level`, (rates, seeds); inf if never.

        A run whose loss is no longer finite counts as parted.
        """
        parted = ~(np.abs(self.layer - self.form) <= level)
        return np.where(parted.any(0), self.steps[parted.argmax(0)], np.inf)


def train(
    student: Student,
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    eps: float,
    records: np.ndarray,
    batch_size: int = 64,
    test_samples: int = 1000,
    teacher_scale: float = 1.0,
) -> Runs:
    """Train a layer and its quadratic form online, for every learning rate and seed.

        W <- W - rate dL/dW,   L = mean over the batch of (f - y)^2

    Arguments: `student` the kind of layer; `rates` learning rates; `seeds` one teacher, start and stream of batches
    for each, shared by all rates; `eps` standard deviation of the initial weights; `records` increasing numbers of
    updates at which the losses are evaluated on `test_samples` fresh inputs; `teacher_scale` factor on the teacher's
    outputs. Raises `ValueError` if `records` do not increase from at least 0.
    """
    if len(records) == 0 or records[0] < 0 or np.any(np.diff(records) <= 0):
        raise ValueError(f"records must be increasing numbers of updates from at least 0, got {records}")
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def stacked(draw) -> Tensors:
        return tuple(torch.stack(parts) for parts in zip(*map(draw, generators), strict=True))

    teacher, constants = stacked(lambda g: student.weights(1.0, g)), stacked(student.constants)
    test = stacked(lambda g: student.inputs(test_samples, g))
    start = stacked(lambda g: student.weights(eps, g))

    def targets(inputs: Tensors) -> Tensor:
        return teacher_scale * student.outputs(teacher, constants, inputs, quadratic=False)

    y_test = targets(test)
    variance = y_test.var(-1, correction=0)
    kinds = (False, True)
    trained = {kind: tuple(w.repeat(len(rates), *[1] * w.ndim).requires_grad_() for w in start) for kind in kinds}
    eta = torch.tensor(rates, dtype=torch.float64)
    layer, form, apart = [], [], []
    for step in progress(range(int(records[-1]) + 1), "learning from a teacher"):
        if step == records[len(layer)]:
            with torch.no_grad():
                f, q = (student.outputs(trained[kind], constants, test, kind) for kind in kinds)
                layer.append(((f - y_test).square().mean(-1) / variance).numpy())
                form.append(((q - y_test).square().mean(-1) / variance).numpy())
                apart.append(((f - q).square().mean(-1) / variance).numpy())
            if len(layer) == len(records):
                break
        batch = stacked(lambda g: student.inputs(batch_size, g))
        y = targets(batch)
        for kind, weights in trained.items():
            loss = (student.outputs(weights, constants, batch, kind) - y).square().mean(-1).sum()
            slopes = torch.autograd.grad(loss, weights)  # the runs do not mix, so each gets its own gradient
            with torch.no_grad():
                for w, slope in zip(weights, slopes, strict=True):
                    w.sub_(eta.view(-1, *[1] * (w.ndim - 1)) * slope)
    return Runs(np.asarray(records), np.stack(layer), np.stack(form), np.stack(apart))


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
