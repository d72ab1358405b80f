"""One Lanczos run on several ranks: vectors sharded along the parameters, data along the samples.

Rank r of W holds columns r w ... (r + 1) w - 1 of the basis and of every vector, w = ceil(n / W), the last padded with
zeros. Its operator gets whole vectors and returns its own samples' share of the product. Each step is

    v = all-gather(v_r),     (C v)_r = reduce-scatter(C_r v),  C = sum_r C_r,     c = all-reduce(V_r (C v)_r),

with one all-reduce for each start by the method "delayed" and three by "twice", whatever the depth: the coefficients of
all basis vectors, the norms and alpha travel together. A step at which orthogonality is monitored has one more. All
ranks hold the same alphas and betas, and NaN from one rank's operator reaches all of them within the step.

A file `spectrum.py` run by `torchrun --nproc-per-node 4 spectrum.py`, with gloo on CPUs and NCCL on CUDA:

    device = parallel.resolve_device("auto")
    with parallel.process_group(device, timeout=timedelta(minutes=5)):
        mine = batches[parallel.rank() :: parallel.world_size()]             # every rank its own samples
        curvature = Curvature(model, mine)
        product = share_of_mean(curvature.gauss_newton, curvature.terms)     # C_r: its share of the mean over all
        start = random_starts(1, curvature.n, torch.Generator().manual_seed(0))[0].to(device)   # the same everywhere
        run = lanczos(product, start, 300, across_ranks=True, folder="run")

A diagonal geometry wraps the share, `preconditioned(product, P)` with the whole P. Run again, with any number of ranks,
the file goes on from the checkpoint in `folder`, which must be seen by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from nqflib.language_model import parallel

# torch 2.13 renamed both and warns of the old names.
_all_gather: Callable = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class LostRankError(RuntimeError):
    """Another rank ended or did not answer in time."""


class Ranks:
    """The shards of n parameters, and the collectives of a run; without others, every one of them does nothing.

    Arguments: `n`; `across`, whether the ranks of the default process group share the run. Raises `LostRankError` from
    any collective when another rank ended, or was silent for the group's timeout. On NCCL, whose collectives return
    before they are done, torch's watchdog may end the process first, with a message of its own.
    """

    def __init__(self, n: int, across: bool = False) -> None:
        self.n = n
        self.rank, self.count = (parallel.rank(), parallel.world_size()) if across else (0, 1)
        self.width = -(-n // self.count)

    @property
    def first(self) -> int:
        """The parameter of this shard's first column; n or more if the shard is padding alone."""
        return self.rank * self.width

    def shard(self, vectors: Tensor) -> Tensor:
        """This rank's columns (..., width) of whole vectors (..., n)."""
        if self.count == 1:
            return vectors
        part = vectors[..., self.first : self.first + self.width]
        return F.pad(part, (0, self.width - part.shape[-1]))

    def stack(self, tensor: Tensor) -> Tensor:
        """The ranks' tensors of one shape, (count, ...)."""
        if self.count == 1:
            return tensor[None]
        stacked = tensor.new_empty(self.count * tensor.numel())  # gloo takes no other shape of several dimensions
        with self._others():
            _all_gather(stacked, tensor.flatten())
        return stacked.view(self.count, *tensor.shape)

    def whole(self, shards: Tensor) -> Tensor:
        """Whole vectors (k, n) from every rank's shards (k, width)."""
        joined = self.stack(shards).movedim(0, 1).reshape(len(shards), -1)
        return joined[:, : self.n].contiguous()

    def sum_to_shard(self, products: Tensor) -> Tensor:
        """This rank's columns (k, width) of the sum over ranks of (k, n)."""
        if self.count == 1:
            return products
        padded = F.pad(products, (0, self.count * self.width - self.n))
        pieces = padded.view(len(products), self.count, self.width).movedim(1, 0).flatten()
        total = products.new_empty(len(products) * self.width)
        with self._others():
            _reduce_scatter(total, pieces)
        return total.view(len(products), self.width)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.count > 1:
            with self._others():
                dist.all_reduce(values)
        return values

    def agree(self, **settings: Any) -> None:
        """Raise `ValueError` on all ranks if one of the settings (small things) is not the same on all of them."""
        if self.count == 1:
            return
        found: list[Any] = [None] * self.count
        with self._others():
            dist.all_gather_object(found, settings)
        for name in settings:
            values = [other[name] for other in found]
            if any(value != values[0] for value in values):
                raise ValueError(f"{name} must be the same on all ranks, got {', '.join(map(str, values))}")

    @contextmanager
    def _others(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self.rank} of {self.count} stops: another rank ended or did not answer ({error}). "
                "Start the run again, on any number of ranks, to go on from its last checkpoint"
            ) from error


def share_of_mean(product: Callable[[Tensor], Tensor], terms: int) -> Callable[[Tensor], Tensor]:
    """This rank's share of a mean over the samples of all ranks, v -> (terms / sum of all terms) product(v).

    Args:
        product: v (n,) or (k, n) to the product with the mean over this rank's samples.
        terms: what that mean was divided by, as `Curvature.terms`; ranks may differ.

    Raises:
        ValueError: unless terms is positive.
    """
    if terms < 1:
        raise ValueError(f"terms must be at least 1 on every rank, got {terms}")
    device = torch.device("cuda") if dist.is_initialized() and dist.get_backend() == "nccl" else None
    total = parallel.sum_over_ranks(torch.tensor(terms, device=device)).item()
    return lambda v: product(v) * (terms / total)
