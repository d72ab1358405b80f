"""Several processes that share one batch: the few collectives of pretraining, which do nothing when there is but one.

Started by `torchrun`, which sets RANK, WORLD_SIZE and the address; gloo on CPUs, NCCL on CUDA (never run here).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """This process's number, 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes, 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def from_first(value: Any) -> Any:
    """The first process's value, in every process; small things only (it is pickled between the processes)."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def copy_from_first(tensors: list[Tensor]) -> None:
    """Overwrite the tensors with those of the first process."""
    if world_size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


@contextmanager
def process_group(device: torch.device, timeout: timedelta | None = None) -> Iterator[None]:
    """The group that `torchrun` announces in the environment, if any, for the duration.

    A process that waits longer than `timeout` for the others ends with an error; torch's own is 10 or 30 minutes.
    """
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one (this process's own GPU under `torchrun`), else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(device)
