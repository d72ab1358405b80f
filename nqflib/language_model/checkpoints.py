"""Checkpoints of a run: one safetensors file each, written whole or not at all, with a hash of what it holds.

Tensors are named `group/parameter`: `weights`, `first_moment`, `second_moment`, and for each running average p
`average_p_weights` and `average_p_second_moment`. Everything else (step, learning rate, recipe, history) is JSON in the
header.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nqflib.language_model.storage import DamagedFileError, write_atomically

FORMAT = 1
_HEADER = "nqf"
TRAIN_LOSS = "train_loss"


@dataclass(frozen=True)
class Averaged:
    """A running average over a share `window` of the run: `weights` and corrected `second_moment`, by parameter."""

    window: float
    weights: dict[str, Tensor]
    second_moment: dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A run after `step` of `steps` steps.

    Fields: `rate`, the scheduled learning rate here; `beta2_product` of Adam; `recipe`, everything that determines the
    run; `history`, the evaluations so far, a list for each column; `train_loss` (step,), the loss of every batch. The
    tensors are dictionaries by parameter name: `weights`, `first_moment`, `second_moment` (not corrected) and, for each
    `averages`, the averaged weights and corrected second moments. The next batch is number `step`.
    """

    step: int
    steps: int
    rate: float
    beta2_product: float
    recipe: dict[str, Any]
    history: dict[str, list[float]]
    train_loss: Tensor
    weights: dict[str, Tensor]
    first_moment: dict[str, Tensor]
    second_moment: dict[str, Tensor]
    averages: tuple[Averaged, ...]

    @property
    def done(self) -> float:
        """Share of the run that is over."""
        return self.step / self.steps

    def average(self, window: float = 0.04) -> Averaged:
        """The running average over a share `window` of the run; raises `ValueError` with those there are."""
        for average in self.averages:
            if average.window == window:
                return average
        raise ValueError(f"window must be one of {[a.window for a in self.averages]}, got {window}")

    def to(self, device: torch.device | str) -> Checkpoint:
        """The same with its tensors on a device."""

        def move(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.to(device) for name, tensor in tensors.items()}

        averages = tuple(Averaged(a.window, move(a.weights), move(a.second_moment)) for a in self.averages)
        moved = {name: move(getattr(self, name)) for name in ("weights", "first_moment", "second_moment")}
        return replace(self, averages=averages, train_loss=self.train_loss.to(device), **moved)


def checkpoint_file(folder: Path, step: int) -> Path:
    """The file of the checkpoint after `step` steps."""
    return folder / f"step_{step:08d}.safetensors"


def stored_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints are in a folder, in order."""
    return sorted(int(file.stem.removeprefix("step_")) for file in folder.glob("step_*.safetensors"))


def save_checkpoint(file: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, atomically."""
    groups = {"weights": checkpoint.weights, "first_moment": checkpoint.first_moment}
    groups |= {"second_moment": checkpoint.second_moment}
    for average in checkpoint.averages:
        groups[f"average_{average.window}_weights"] = average.weights
        groups[f"average_{average.window}_second_moment"] = average.second_moment
    tensors = {f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()}
    tensors[TRAIN_LOSS] = checkpoint.train_loss
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    state = {
        "format": FORMAT,
        "step": checkpoint.step,
        "steps": checkpoint.steps,
        "rate": checkpoint.rate,
        "beta2_product": checkpoint.beta2_product,
        "parameters": list(checkpoint.weights),
        "windows": [average.window for average in checkpoint.averages],
        "recipe": checkpoint.recipe,
        "history": checkpoint.history,
    }
    header = json.dumps({"state": state, "sha256": _digest(state, tensors)})
    write_atomically(file, save(tensors, metadata={_HEADER: header}))


def load_checkpoint(file: Path | str, *, vocabulary: int | None = None) -> Checkpoint:
    """Read a checkpoint and compare its hash.

    Arguments: `vocabulary`, the number of ids of the text it is to be used with. Raises `FileNotFoundError`,
    `DamagedFileError` naming a file that is cut short or altered, and `ValueError` for another vocabulary or format.
    """
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"there is no checkpoint {file}")
    damaged = f"{file} is damaged; delete it to resume from the checkpoint before it"
    try:
        with safe_open(file, "pt") as stored:
            header = json.loads((stored.metadata() or {})[_HEADER])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
        state = header["state"]
        found = _digest(state, tensors)
    except (SafetensorError, KeyError, ValueError) as error:
        raise DamagedFileError(f"{damaged} ({type(error).__name__}: {error})") from error
    if found != header["sha256"]:
        raise DamagedFileError(f"{damaged} (SHA-256 {found}, expected {header['sha256']})")
    if state["format"] != FORMAT:
        raise ValueError(f"{file} has format {state['format']}, this version reads {FORMAT}; train it anew")
    trained = state["recipe"]["size"]["vocabulary"]
    if vocabulary is not None and vocabulary != trained:
        raise ValueError(f"{file} was trained on a vocabulary of {trained} tokens, but the text has {vocabulary}")
    return _checkpoint(state, tensors)


def _checkpoint(state: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    def group(prefix: str) -> dict[str, Tensor]:
        return {name: tensors[f"{prefix}/{name}"] for name in state["parameters"]}

    return Checkpoint(
        **{key: state[key] for key in ("step", "steps", "rate", "beta2_product", "recipe", "history")},
        train_loss=tensors[TRAIN_LOSS],
        weights=group("weights"),
        first_moment=group("first_moment"),
        second_moment=group("second_moment"),
        averages=tuple(
            Averaged(p, group(f"average_{p}_weights"), group(f"average_{p}_second_moment")) for p in state["windows"]
        ),
    )


def _digest(state: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the header's state and of every tensor's name and bytes."""
    digest = hashlib.sha256(json.dumps(state).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
