"""What a run will cost, computed from its configuration before anything is done.

Two counts of floating-point operations, multiply and add counted apart, forward once and backward twice:

    blocks      6 L (4 D^2 + 2 D M) a token                   the paper's own
    products    6 (L (4 D^2 + 2 D M) + V D) + 6 L D T         all matrix products: the unembedding too, and attention's
                                                              two over the T / 2 positions that the mask leaves
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nqflib.language_model.fineweb import FineWeb
from nqflib.language_model.optimizer import AVERAGES
from nqflib.language_model.presets import PRECISIONS
from nqflib.language_model.pretrain import KEPT, Run

# Dense matrix products in 16 bits, in FLOP/s, from the makers' data sheets; `core`: float32 on a core of a laptop.
DEVICES = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "l40s": 362e12, "rtx4090": 165e12, "core": 5e10}
UTILISATION = 0.4  # of the peak, what well-written training reaches
SHIPPED_TOKENS = 7_200_000  # of the shipped corpus at V = 256


@dataclass(frozen=True)
class Cost:
    """The numbers of one run; bytes, FLOP, and hours on the named device at the share `UTILISATION` of its peak."""

    parameters: int
    block_parameters: int
    tokens: int
    steps: int
    block_flop: float
    product_flop: float
    state_bytes: int  # weights, gradient, two moments, two factors, averages
    activation_bytes: int  # of one micro-batch
    checkpoint_bytes: int
    disk_bytes: int  # the kept checkpoints, the one being written, and the tokens
    device: str
    devices: int
    hours: float

    def table(self) -> str:
        """One line a number."""
        rows = {
            "parameters": f"{self.parameters:,} ({self.block_parameters:,} in blocks)",
            "tokens": f"{self.tokens:,}",
            "steps": f"{self.steps:,}",
            "FLOP, blocks only": f"{self.block_flop:.3g}",
            "FLOP, all matrix products": f"{self.product_flop:.3g}",
            "memory": f"{_bytes(self.state_bytes)} of state, {_bytes(self.activation_bytes)} of activations",
            "disk": f"{_bytes(self.disk_bytes)}: {len(KEPT)} checkpoints of {_bytes(self.checkpoint_bytes)}, tokens",
            "time": f"{self.hours:.3g} hours on {self.devices} {self.device} at {UTILISATION:.0%} of the peak",
        }
        return "\n".join(f"{name:<27}{value}" for name, value in rows.items())


def cost(run: Run, device: str = "h100", *, devices: int = 1) -> Cost:
    """The cost of a run on `devices` of the named `device`; raises `ValueError` for one that is not in `DEVICES`."""
    if device not in DEVICES or devices < 1:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, at least one of them, got {devices} {device!r}")
    size = run.size
    n, blocks, T = size.parameters, size.block_parameters, size.context
    tokens = run.steps * run.batch * T
    product_flop = float(tokens * 6 * (blocks + size.vocabulary * size.width + size.layers * size.width * T))
    wide = torch.promote_types(PRECISIONS[run.precision], torch.float32).itemsize
    passes = PRECISIONS[run.precision].itemsize
    stored = 3 + 2 * len(AVERAGES)  # weights, moments, averages
    checkpoint = stored * n * wide + run.steps * wide
    source = run.source.tokens + run.source.held_out_tokens if isinstance(run.source, FineWeb) else SHIPPED_TOKENS
    return Cost(
        parameters=n,
        block_parameters=blocks,
        tokens=tokens,
        steps=run.steps,
        block_flop=float(6 * blocks * tokens),
        product_flop=product_flop,
        state_bytes=(stored + 3) * n * wide + 2 * n * passes,
        activation_bytes=min(max(run.batch // devices, 1), run.micro_batch) * T * passes * _activations(run),
        checkpoint_bytes=checkpoint,
        disk_bytes=(len(KEPT) + 1) * checkpoint + 2 * source,
        device=device,
        devices=devices,
        hours=product_flop / (UTILISATION * DEVICES[device] * devices) / 3600,
    )


def _activations(run: Run) -> int:
    """Numbers kept for the backward pass, per token: about 14 D + 2 M a layer, and the logits, wide, twice.

    A layer keeps its two inputs and their norms, q, k, v before and after norm and rotation, the mixed values, and the
    hidden channels before and after the GELU; written-out attention keeps its weights too.
    """
    size = run.size
    weights = 0 if run.precision == "bfloat16" else 2 * size.heads * size.context
    return size.layers * (14 * size.width + 2 * size.hidden + weights) + 4 * size.vocabulary


def _bytes(count: int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
