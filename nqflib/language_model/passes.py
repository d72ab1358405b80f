"""Forward and backward passes of pretraining: micro-batches, precision, and each process's share of a batch."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor
from torch.func import functional_call

from nqflib.language_model import parallel
from nqflib.language_model.linearization import linearize, loss_and_gradient
from nqflib.language_model.transformer import Architecture, Transformer, flatten, next_token_loss, unflatten


class Passes:
    """Loss and gradient of a decoder of `size` at weights given as one vector (n,), float32 or float64.

    Arguments: `dtype` of the passes; `micro_batch`, windows in one pass; `device`. On the CPU the gradient is the
    written-out one of `linearization`, which is faster; on a GPU and in half precision it comes from automatic
    differentiation with fused attention, and is summed over micro-batches in the dtype of the weights.
    """

    def __init__(self, size: Architecture, dtype: torch.dtype, micro_batch: int, device: torch.device) -> None:
        self.dtype, self.micro_batch, self.device = dtype, micro_batch, device
        self.written_out = device.type == "cpu" and dtype != torch.bfloat16
        if device.type == "cpu":
            keep_freed_memory()
        # Its own weights are never used.
        self.model = Transformer(size, dtype=dtype, fused=not self.written_out).to(device)

    def gradient(self, weights: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss (), and its gradient (n,), over windows (B, T + 1), of which each process computes its share."""
        share = len(windows) // parallel.world_size()
        mine = windows[parallel.rank() * share : (parallel.rank() + 1) * share]
        loss = weights.new_zeros(())
        total = torch.zeros_like(weights)
        parameters = self._parameters(weights)
        for part in mine.split(self.micro_batch):
            one, gradient = self._one(parameters, part.to(self.device))
            loss += one.to(loss.dtype) * (len(part) / len(windows))
            total.add_(gradient, alpha=len(part) / len(windows))
        return parallel.sum_over_ranks(loss), parallel.sum_over_ranks(total)

    @torch.no_grad()
    def evaluate(self, weights: Tensor, windows: Tensor) -> float:
        """Mean loss over windows (n, T + 1), which the processes share out."""
        parameters = self._parameters(weights)

        def logits(tokens: Tensor) -> Tensor:
            if self.written_out:
                return linearize(self.model, parameters, tokens).logits
            return functional_call(self.model, parameters, tokens)

        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in windows[parallel.rank() :: parallel.world_size()].split(self.micro_batch):
            total += next_token_loss(logits, part.to(self.device)).double() * len(part)
        return parallel.sum_over_ranks(total).item() / len(windows)

    def _parameters(self, weights: Tensor) -> dict[str, Tensor]:
        return unflatten(weights.to(self.dtype), self.model)

    def _one(self, parameters: dict[str, Tensor], windows: Tensor) -> tuple[Tensor, Tensor]:
        if self.written_out:
            loss, gradient = loss_and_gradient(self.model, parameters, windows)
            return loss, flatten(gradient)
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        loss = next_token_loss(lambda tokens: functional_call(self.model, leaves, tokens), windows)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return loss.detach(), flatten(dict(zip(leaves, gradients, strict=True)))


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def keep_freed_memory() -> None:
    """Let the process keep up to 256 MB that it freed, on Linux with glibc; elsewhere nothing happens.

    By default freed activations go back to the kernel, which hands out zeroed pages anew at the next step: over a
    thousand page faults a step of the laptop model, and a tenth of the time.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 1 << 28)
        mallopt(_MMAP_THRESHOLD, 1 << 28)
