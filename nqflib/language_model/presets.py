"""The four scales of the pretraining run, each a frozen set of numbers.

| preset        | parameters  | tokens | batches (windows) | text               | machine            |
|---------------|-------------|--------|-------------------|--------------------|--------------------|
| `smoke`       | 10,240      | 0.1 M  | 16, 32            | every 12th address | tests, 2 s         |
| `laptop`      | 107,520     | 2.15 M | 4, 32, 128        | the shipped corpus | a core, 1 to 2 min |
| `workstation` | 7,340,032   | 147 M  | 1, 16, 256        | FineWeb-Edu        | a GPU, hours       |
| `paper`       | 167,772,160 | 3 G    | 1, 64, 1024       | FineWeb-Edu        | GPUs, days         |

`evening` is `laptop` with the sweep at full length. The peak learning rate is base * sqrt(min(B, B0)): the paper caps
it at B0 = 64 sequences, `laptop` at its largest batch, so that it is the square root throughout. Source of `paper`:
Meterez et al. 2026, the analysed runs (base rate 2); only `smoke` and `laptop` were run here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from nqflib.language_model.corpus import Shipped, Source
from nqflib.language_model.fineweb import FineWeb
from nqflib.language_model.transformer import Architecture

PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Preset:
    """One scale.

    Fields: `size` of the model; `source` of the text, cut into tokens over bytes if `byte_level`; `tokens` of a run and
    `sweep_tokens` of one run of the sweep; `batches` in windows of `size.context` tokens; `base_rate`, and `base_rates`
    of the sweep; `rate_cap` B0; `held_out` windows; `micro_batch`, windows in one pass (it changes rounding only);
    `precision` of the passes (weights and moments are float32 at least).
    """

    name: str
    size: Architecture
    source: Source
    tokens: int
    sweep_tokens: int
    batches: tuple[int, ...]
    base_rate: float
    base_rates: tuple[float, ...]
    rate_cap: int
    held_out: int
    micro_batch: int
    byte_level: bool = False
    precision: str = "float32"

    def peak_rate(self, batch: int, base_rate: float | None = None) -> float:
        """eta = base * sqrt(min(B, B0)) for a batch of B windows."""
        return (self.base_rate if base_rate is None else base_rate) * math.sqrt(min(batch, self.rate_cap))

    def steps(self, batch: int, tokens: int | None = None) -> int:
        """The fewest steps of B windows that see all the tokens."""
        return -(-(tokens or self.tokens) // (batch * self.size.context))


def _laptop() -> Preset:
    size = Architecture(vocabulary=256, width=48, layers=3, heads=3, hidden=192, context=64)
    return Preset(
        name="laptop",
        size=size,
        source=Shipped(),
        tokens=20 * size.parameters,
        sweep_tokens=4 * size.parameters,
        batches=(4, 32, 128),
        base_rate=0.53,  # eta = 1.06, 3 and 6
        base_rates=(0.265, 0.53, 1.06),
        rate_cap=128,
        held_out=128,
        micro_batch=64,
    )


def _smoke() -> Preset:
    return Preset(
        name="smoke",
        size=Architecture(vocabulary=128, width=16, layers=2, heads=2, hidden=64, context=64),
        source=Shipped(every=12),
        tokens=10 * 10_240,
        sweep_tokens=2 * 10_240,
        batches=(16, 32),
        base_rate=0.53,
        base_rates=(0.53, 1.06),
        rate_cap=128,
        held_out=32,
        micro_batch=32,
    )


def _workstation() -> Preset:
    size = Architecture(vocabulary=2048, width=256, layers=8, heads=4, hidden=1024, context=256)
    return Preset(
        name="workstation",
        size=size,
        source=FineWeb(tokens=20 * size.parameters, held_out_tokens=2_000_000, tokenizer_documents=50_000),
        tokens=20 * size.parameters,
        sweep_tokens=4 * size.parameters,
        batches=(1, 16, 256),
        base_rate=1.06,  # the laptop's rate for as many tokens a step; never run
        base_rates=(0.53, 1.06, 2.12),
        rate_cap=64,
        held_out=2048,
        micro_batch=64,
        byte_level=True,
        precision="bfloat16",
    )


def _paper() -> Preset:
    return Preset(
        name="paper",
        size=Architecture(vocabulary=8192, width=1024, layers=12, heads=16, hidden=4096, context=1024),
        source=FineWeb(tokens=3_000_000_000),
        tokens=3_000_000_000,
        sweep_tokens=3_000_000_000,
        batches=(1, 64, 1024),
        base_rate=2.0,
        base_rates=(0.25, 0.5, 1.0, 2.0, 4.0),
        rate_cap=64,
        held_out=9_765,  # 10 M tokens
        micro_batch=16,
        byte_level=True,
        precision="bfloat16",
    )


def _evening() -> Preset:
    laptop = _laptop()
    return replace(laptop, name="evening", sweep_tokens=laptop.tokens, base_rates=(0.132, 0.265, 0.53, 1.06, 2.12))


PRESETS = {p.name: p for p in (_smoke(), _laptop(), _evening(), _workstation(), _paper())}


def preset(name: str) -> Preset:
    """The preset of that name; raises `ValueError` with the valid names."""
    if name not in PRESETS:
        raise ValueError(f"preset: there is no {name!r}; valid are {', '.join(PRESETS)}")
    return PRESETS[name]
