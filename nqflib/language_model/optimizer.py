"""The optimizer of paper 2: Adam with a second moment whose memory grows, its schedules, and running averages.

At step t = 1, 2, ... with gradient g, factors (pre, post) of each parameter and learning rate eta_t,

    m  <- b1 m + (1 - b1) pre g                          b1 = 0.9
    nu <- b_t nu + (1 - b_t) (pre g)^2                   b_t = 1 - 1 / max(20, t / 100)
    w  <- w - eta_t post m^ / (sqrt(nu^) + 1e-8)         m^ = m / (1 - b1^t),   nu^ = nu / (1 - b_1 b_2 ... b_t)

so that nu remembers 20 steps or the last hundredth of the run, whichever is longer. No weight decay, no clipping. All
parameters are one vector. Source: the code of Meterez et al. 2026.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from nqflib.language_model.transformer import Transformer

BETA1 = 0.9
EPS = 1e-8
WARMUP = 0.1  # share of the run
FLOOR = 0.1  # rate at the start, and at the end of the cosine, as a share of the peak
AVERAGES = (0.04, 0.08)  # windows of the running averages, as shares of the elapsed time

Schedule = Literal["cosine", "constant"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def beta2(step: int) -> float:
    """b_t = 1 - 1 / max(20, t / 100) at step t = 1, 2, ..."""
    return 1 - 1 / max(20, 0.01 * step)


def rate_factor(done: float, schedule: str) -> float:
    """The learning rate as a share of its peak when a share `done` in [0, 1] of the run is over.

    Linear from 0.1 to 1 over the first tenth, then `"constant"`, or `"cosine"` down to 0.1. Raises `ValueError` for
    another schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if done < WARMUP:
        return FLOOR + (1 - FLOOR) * done / WARMUP
    if schedule == "constant":
        return 1.0
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP))) / 2


@dataclass
class Adam:
    """The state of the optimizer, vectors of length n that `update` changes in place.

    `weights`, `first_moment` m, `second_moment` nu without bias correction, `pre`, `post`; `step` t and
    `beta2_product` b_1 b_2 ... b_t, with which a surrogate can go on from here.
    """

    weights: Tensor
    first_moment: Tensor
    second_moment: Tensor
    pre: Tensor
    post: Tensor
    step: int = 0
    beta2_product: float = 1.0

    @classmethod
    def start(cls, model: Transformer, weights: Tensor) -> Adam:
        """The state before the first step, at `weights` (n,) of `model`."""
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        factors = model.factors()
        pre = torch.cat([weights.new_full((n,), factors[name].pre) for name, n in sizes.items()])
        post = torch.cat([weights.new_full((n,), factors[name].post) for name, n in sizes.items()])
        return cls(weights, torch.zeros_like(weights), torch.zeros_like(weights), pre, post)

    def update(self, gradient: Tensor, rate: float) -> None:
        """One step t with `gradient` (n,), which is overwritten, at learning rate `rate`."""
        self.step += 1
        b2 = beta2(self.step)
        self.beta2_product *= b2
        gradient.mul_(self.pre)
        self.first_moment.lerp_(gradient, 1 - BETA1)
        self.second_moment.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        scale = torch.div(self.second_moment, 1 - self.beta2_product, out=gradient).sqrt_().add_(EPS)
        torch.div(self.post, scale, out=scale)
        self.weights.addcmul_(self.first_moment, scale, value=-rate / (1 - BETA1**self.step))

    def stale_update(self, gradient: Tensor, rate: float) -> None:
        """The same, but w moves with the nu^ of the step before: what this gradient adds to nu comes a step late."""
        P = self.post / (self.corrected_second_moment().sqrt() + EPS)
        weights = self.weights.clone()
        self.update(gradient, rate)
        self.weights.copy_(weights).addcmul_(self.first_moment, P, value=-rate / (1 - BETA1**self.step))

    def frozen_update(self, gradient: Tensor, rate: float) -> None:
        """The same with a nu^ that only ever sees this gradient: b_t nu^ + (1 - b_t) (pre g)^2, then forgotten."""
        b2 = beta2(self.step + 1)
        scaled = self.pre * gradient
        nu = b2 * self.corrected_second_moment() + (1 - b2) * scaled.square()
        self._momentum_update(scaled, rate, nu)

    def momentum_update(self, gradient: Tensor, rate: float) -> None:
        """The same with nu^ as it stands: gradient descent with averaged momentum and a fixed preconditioner."""
        self._momentum_update(self.pre * gradient, rate, self.corrected_second_moment())

    def _momentum_update(self, scaled: Tensor, rate: float, second_moment: Tensor) -> None:
        self.step += 1
        self.first_moment.lerp_(scaled, 1 - BETA1)
        P = self.post / (second_moment.sqrt() + EPS)
        self.weights.addcmul_(self.first_moment, P, value=-rate / (1 - BETA1**self.step))

    def corrected_second_moment(self) -> Tensor:
        """nu^ = nu / (1 - b_1 ... b_t)."""
        return self.second_moment / (1 - self.beta2_product)


@dataclass
class Average:
    """Running averages of the weights and of nu^ whose memory is a fixed share `window` p of the time elapsed.

    a <- a + (x - a) / h with h = max(1, t p / (1 - p)): at step t, step s has a weight proportional to s^(c - 1) with
    c = (1 - p) / p, and the mean age is p t. Vectors of length n, changed in place.
    """

    window: float
    weights: Tensor
    second_moment: Tensor

    @classmethod
    def start(cls, window: float, weights: Tensor) -> Average:
        """Before the first step; whatever is stored is forgotten there."""
        return cls(window, weights.clone(), torch.zeros_like(weights))

    def update(self, adam: Adam) -> None:
        """Take in the state after its step t."""
        share = 1 / max(1.0, adam.step * self.window / (1 - self.window))
        self.weights.lerp_(adam.weights, share)
        # (1 - share) a + share nu / (1 - product) without storing nu^
        self.second_moment.mul_(1 - share).add_(adam.second_moment, alpha=share / (1 - adam.beta2_product))
