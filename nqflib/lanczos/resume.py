"""Checkpoints of a run: the basis as raw rows in one file for each start, everything else in one small file.

Rows are appended and flushed first, then the state that counts them is put in place of the old one by a rename. A kill
at any moment leaves the old state and perhaps rows that it does not count, or the new one.

Across ranks each has a file of its columns of the rows, in one folder that all of them see, and the first writes the
state once all have flushed theirs. The state holds whole vectors and the number of ranks, so that a run goes on with
another number: each rank then reads its columns from the files of those before, and writes all of its rows anew.
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
from nqflib.lanczos.ranks import Ranks
from nqflib.language_model import storage
from nqflib.language_model.storage import DamagedFileError

if TYPE_CHECKING:
    from nqflib.lanczos.iteration import Start

FORMAT = 1
_STATE = "state.safetensors"
_VECTORS = ("alphas", "betas", "monitored")


class Checkpoint:
    """The checkpoint of a run in `folder`. Raises `ValueError` if another run (start, method, format) is there."""

    def __init__(self, folder: Path, starts: Tensor, method: str, dtype: torch.dtype, ranks: Ranks) -> None:
        self.folder, self.file, self.ranks = folder, folder / _STATE, ranks
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
        """The rows of start i, or this rank's columns of them."""
        return self._rows_files(i, self.ranks.count)[self.ranks.rank]

    def _rows_files(self, i: int, count: int) -> list[Path]:
        if count == 1:
            return [self.folder / f"basis_{i}.rows"]
        return [self.folder / f"basis_{i}_rank_{rank}_of_{count}.rows" for rank in range(count)]

    def save(self, steps: int, runs: list[Start]) -> None:
        """Write the state after `steps` steps, atomically, and before it the rows that are new."""
        tensors: dict[str, Tensor] = {}
        for i, run in enumerate(runs):
            self._append(i, run.basis, min(self.written, run.kept), run.kept)
            tensors |= {f"{i}/{name}": getattr(run, name)[:steps] for name in _VECTORS}
            tensors[f"{i}/scale"] = run.scale
            # A rank takes part in these once its rows are flushed, so that the state below never counts rows to come.
            for name, shard in (("query", run.query), ("previous", run.previous)):
                tensors[f"{i}/{name}"] = self.ranks.whole(shard[None])[0].cpu()
            tensors[f"{i}/inverse_scales"] = self.ranks.stack(run.basis.inverse_scales[:steps]).flatten()
        if self.ranks.rank == 0:
            self._commit(steps, runs, tensors)
        self.written = steps

    def _commit(self, steps: int, runs: list[Start], tensors: dict[str, Tensor]) -> None:
        tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        stops = [None if run.stop is None else run.stop.name for run in runs]
        state = {"cause": self.cause, "steps": steps, "kept": [run.kept for run in runs], "stops": stops}
        state["ranks"] = self.ranks.count
        header = {"state": json.dumps(state), "sha256": _digest(tensors)}
        storage.write_atomically(self.file, save(tensors, metadata=header))
        current = {file for i in range(len(runs)) for file in self._rows_files(i, self.ranks.count)}
        for file in set(self.folder.glob("basis_*.rows")) - current:  # of another number of ranks
            file.unlink()

    def load(self, runs: list[Start]) -> int:
        """Put the stored state into `runs`; return the number of steps done, 0 if there is none."""
        if not self.file.is_file():
            return 0
        state, tensors = self._read()
        if state["cause"] != self.cause:
            other = [key for key, value in self.cause.items() if state["cause"].get(key) != value]
            raise ValueError(f"{self.folder} holds another run: {', '.join(other)} differ; give another folder")
        steps, count = state["steps"], state.get("ranks", 1)
        from nqflib.lanczos.iteration import Stop

        for i, run in enumerate(runs):
            kept, stop = state["kept"][i], state["stops"][i]
            if kept > run.basis.capacity or (stop is None and steps > run.basis.capacity):
                raise ValueError(f"depth must be at least the {steps} steps that {self.folder} holds")
            for name in _VECTORS:
                getattr(run, name)[: min(steps, run.basis.capacity)] = tensors[f"{i}/{name}"][: run.basis.capacity]
            run.query.copy_(self.ranks.shard(tensors[f"{i}/query"]))
            run.previous.copy_(self.ranks.shard(tensors[f"{i}/previous"]))
            run.scale = tensors[f"{i}/scale"].to(run.scale.device)
            run.kept, run.stop = kept, None if stop is None else Stop[stop]
            scales = tensors[f"{i}/inverse_scales"].view(count, -1)[:, :kept].to(run.basis.device)
            if count == self.ranks.count:
                self._restore(i, run.basis, scales[self.ranks.rank])
            else:
                self._reshard(i, run.basis, scales)
        self.written = steps if count == self.ranks.count else 0
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

    def _restore(self, i: int, basis: Basis, scales: Tensor) -> None:
        """Read the rows that this rank wrote, with their scales (kept,)."""
        kept = len(scales)
        basis.inverse_scales[:kept] = scales
        stored = self._map(self.rows_file(i), kept, basis.n, basis.dtype)
        if basis.file is None:
            basis.rows[:kept].copy_(stored)

    def _reshard(self, i: int, basis: Basis, scales: Tensor) -> None:
        """Read this rank's columns from the files of another number of ranks, with their scales (count, kept)."""
        count, kept = scales.shape
        other = -(-self.ranks.n // count)  # the width of their shards
        files = [self._map(file, kept, other, basis.dtype) for file in self._rows_files(i, count)]
        first, last = self.ranks.first, min(self.ranks.first + self.ranks.width, self.ranks.n)
        row = torch.zeros(basis.n, dtype=torch.promote_types(basis.dtype, torch.float32), device=basis.device)
        for j in range(kept):
            for rank, stored in enumerate(files):
                start, end = max(first, rank * other), min(last, (rank + 1) * other)
                if start < end:
                    piece = stored[j, start - rank * other : end - rank * other].to(row)
                    row[start - first : end - first] = piece * scales[rank, j]
            basis.store(j, row)

    def _map(self, file: Path, kept: int, n: int, dtype: torch.dtype) -> Tensor:
        """The first rows of a file, (kept, n)."""
        size = kept * n * dtype.itemsize
        if not file.is_file() or file.stat().st_size < size:
            raise DamagedFileError(f"{file} must hold {size} bytes; delete {self.folder} to start anew")
        if not kept:
            return torch.empty(0, n, dtype=dtype)
        return torch.from_file(str(file), shared=False, size=kept * n, dtype=dtype).view(kept, n)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(_bytes(tensors[name].reshape(-1)))
    return digest.hexdigest()
