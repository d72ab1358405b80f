"""Checkpoints of a run: the basis as raw rows in one file for each start, everything else in one small file.

Rows are appended and flushed first, then the state that counts them is put in place of the old one by a rename. A kill
at any moment leaves the old state and perhaps rows that it does not count, or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nqflib.lanczos.basis import Basis
from nqflib.language_model import storage
from nqflib.language_model.storage import DamagedFileError

if TYPE_CHECKING:
    from nqflib.lanczos.iteration import Start

FORMAT = 1
_STATE = "state.safetensors"
_VECTORS = ("alphas", "betas", "monitored")


class Checkpoint:
    """The checkpoint of a run in `folder`. Raises `ValueError` if another run (start, method, format) is there."""

    def __init__(self, folder: Path, starts: Tensor, method: str, dtype: torch.dtype) -> None:
        self.folder, self.file = folder, folder / _STATE
        self.cause = {
            "format": FORMAT,
            "starts": hashlib.sha256(_bytes(starts)).hexdigest(),
            "shape": list(starts.shape),
            "dtype": str(starts.dtype),
            "method": method,
            "basis": str(dtype),
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.written = 0

    def rows_file(self, i: int) -> Path:
        """The rows of start i."""
        return self.folder / f"basis_{i}.rows"

    def save(self, steps: int, runs: list[Start]) -> None:
        """Write the state after `steps` steps, atomically, and before it the rows that are new."""
        tensors: dict[str, Tensor] = {}
        for i, run in enumerate(runs):
            self._append(i, run.basis, min(self.written, run.kept), run.kept)
            tensors |= {f"{i}/{name}": getattr(run, name)[:steps] for name in _VECTORS}
            tensors |= {f"{i}/query": run.query, f"{i}/previous": run.previous, f"{i}/scale": run.scale}
            tensors[f"{i}/inverse_scales"] = run.basis.inverse_scales[:steps]
        tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        stops = [None if run.stop is None else run.stop.name for run in runs]
        state = {"cause": self.cause, "steps": steps, "kept": [run.kept for run in runs], "stops": stops}
        header = {"state": json.dumps(state), "sha256": _digest(tensors)}
        storage.write_atomically(self.file, save(tensors, metadata=header))
        self.written = steps

    def load(self, runs: list[Start]) -> int:
        """Put the stored state into `runs`; return the number of steps done, 0 if there is none."""
        if not self.file.is_file():
            return 0
        state, tensors = self._read()
        if state["cause"] != self.cause:
            other = [key for key, value in self.cause.items() if state["cause"].get(key) != value]
            raise ValueError(f"{self.folder} holds another run: {', '.join(other)} differ; give another folder")
        steps = state["steps"]
        from nqflib.lanczos.iteration import Stop

        for i, run in enumerate(runs):
            kept, stop = state["kept"][i], state["stops"][i]
            if kept > run.basis.capacity or (stop is None and steps > run.basis.capacity):
                raise ValueError(f"depth must be at least the {steps} steps that {self.folder} holds")
            for name in _VECTORS:
                getattr(run, name)[: min(steps, run.basis.capacity)] = tensors[f"{i}/{name}"][: run.basis.capacity]
            run.query.copy_(tensors[f"{i}/query"])
            run.previous.copy_(tensors[f"{i}/previous"])
            run.scale = tensors[f"{i}/scale"].to(run.scale.device)
            run.basis.inverse_scales[:kept] = tensors[f"{i}/inverse_scales"][:kept].to(run.basis.device)
            run.kept, run.stop = kept, None if stop is None else Stop[stop]
            self._restore(i, run.basis, kept)
        self.written = steps
        return steps

    def _read(self) -> tuple[dict, dict[str, Tensor]]:
        try:
            with safe_open(self.file, "pt") as stored:
                header = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
            state, found = json.loads(header["state"]), _digest(tensors)
        except (SafetensorError, KeyError, ValueError) as error:
            raise DamagedFileError(f"{self.file} is damaged ({error}); delete {self.folder} to start anew") from error
        if found != header["sha256"]:
            raise DamagedFileError(f"{self.file} is damaged (SHA-256 differs); delete {self.folder} to start anew")
        return state, tensors

    def _append(self, i: int, basis: Basis, first: int, last: int) -> None:
        """Bring rows first ... last - 1 to the disk, one after the other."""
        if basis.file is not None:  # they are in the file's pages already
            with open(basis.file, "rb") as stream:
                storage._flush(stream.fileno())
            return
        file = self.rows_file(i)
        file.touch()
        with open(file, "r+b") as stream:
            stream.seek(first * basis.n * basis.dtype.itemsize)
            for j in range(first, last):
                storage._write(stream, memoryview(_bytes(basis.rows[j])))
            stream.flush()
            storage._flush(stream.fileno())
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            storage._flush(folder)  # the file's name, when it is new
        finally:
            os.close(folder)

    def _restore(self, i: int, basis: Basis, kept: int) -> None:
        file = self.rows_file(i)
        size = kept * basis.n * basis.dtype.itemsize
        if not file.is_file() or file.stat().st_size < size:
            raise DamagedFileError(f"{file} must hold {size} bytes; delete {self.folder} to start anew")
        if basis.file is None and kept:
            mapped = torch.from_file(str(file), shared=False, size=kept * basis.n, dtype=basis.dtype)
            basis.rows[:kept].copy_(mapped.view(kept, basis.n))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(_bytes(tensors[name].reshape(-1)))
    return digest.hexdigest()
