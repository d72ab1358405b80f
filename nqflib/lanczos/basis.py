"""The Lanczos basis: rows of any float format in memory or in a file, with products over all of them at once.

    measure    C = W V^T,   C_kj = w_k . v_j          (k, rows), accumulated in float64 over tiles of columns
    subtract   W <- W - C V

for k vectors W (k, n) and the first `rows` vectors V, both by matrix products over the whole basis, never vector by
vector. Rows may be stored in less precision than the vectors they meet; products are made in the vectors' own. A
float16 row is stored times a power of two of its own, since the entries of a long unit vector would be subnormal.

The error of a half-width basis is a rounding of each stored vector, relative 2^-9 in bfloat16 and 2^-12 in float16. In
a spread-out vector roundings average out, and orthogonality is lost to about 4 x 2^-9 / sqrt(n); where eigenvectors
are concentrated on few coordinates they do not, and bfloat16 is one to two orders worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FORMATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Columns a tile on a CPU: long enough for full memory bandwidth, short enough that float32 sums of one tile are right
# to 1e-7. Summing whole rows of localised vectors in float32 loses two digits at n = 400,000.
_CPU_TILE = 1 << 14
_CPU_HALF_TILE = 1 << 12  # a tile is widened first, and is to stay in the cache
_DEVICE_TILE_BYTES = 1 << 28
# Rows a block product of `subtract` takes on a CPU: MKL's product of 2 by k and k by many runs at memory bandwidth for
# short k, and at half of it beyond 24 or so.
_CPU_ROWS = 16
_SCALED_TO = 14  # exponent of a float16 row's largest entry; the format ends at 2^16


class Basis:
    """`capacity` vectors of length n as rows of one array (capacity, n).

    Arguments: `n`; `capacity`; `dtype`, one of `FORMATS`, how rows are stored; `device` of the vectors that meet them;
    `file`, a path to map instead of memory: its bytes are the rows, one after the other, and it is kept; `rows` on
    another device than the vectors (`storage="cpu"` for a basis in the host's memory) are brought over tile by tile.
    Raises `ValueError` for another format.
    """

    def __init__(
        self,
        n: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        storage: torch.device | str | None = None,
        file: Path | None = None,
    ) -> None:
        if dtype not in FORMATS:
            raise ValueError(f"dtype of the basis must be one of {', '.join(map(str, FORMATS))}, got {dtype}")
        self.n, self.capacity, self.dtype, self.device, self.file = n, capacity, dtype, device, file
        self.inverse_scales = torch.ones(capacity, dtype=torch.float32, device=device)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            mapped = torch.from_file(str(file), shared=True, size=capacity * n, dtype=dtype)
            self.rows = mapped.view(capacity, n)
        else:
            place = device if storage is None else torch.device(storage)
            pinned = place.type == "cpu" and device.type == "cuda"
            self.rows = torch.empty(capacity, n, dtype=dtype, device=place, pin_memory=pinned)

    @property
    def nbytes(self) -> int:
        """capacity x n x bytes of an entry: 4 m n in float32."""
        return self.capacity * self.n * self.dtype.itemsize

    def store(self, j: int, vector: Tensor) -> None:
        """Round `vector` (n,) into row j, without waiting for a device."""
        if self.dtype is torch.float16:
            exponent = torch.frexp(vector.abs().amax()).exponent
            self.inverse_scales[j] = torch.ldexp(vector.new_ones((), dtype=torch.float32), exponent - _SCALED_TO)
            vector = vector / self.inverse_scales[j]
        self.rows[j].copy_(vector, non_blocking=True)

    def row(self, j: int, dtype: torch.dtype) -> Tensor:
        """Row j as it is stored, in another format and on the vectors' device."""
        row = self.rows[j].to(device=self.device, dtype=dtype)
        return row * self.inverse_scales[j] if self.dtype is torch.float16 else row

    def measure(self, rows: int, vectors: Tensor) -> Tensor:
        """w_k . v_j for the first `rows` rows, (k, rows) float64, of vectors W (k, n)."""
        total = torch.zeros(len(vectors), rows, dtype=torch.float64, device=vectors.device)
        for V, W in self._tiles(rows, vectors):
            # A matrix times a vector, and a product of two by many, are the fast forms on a CPU.
            total += torch.mv(V, W[0]) if len(W) == 1 else W @ V.T
        return total.mul_(self.inverse_scales[:rows]) if self.dtype is torch.float16 else total

    def subtract(self, rows: int, coefficients: Tensor, vectors: Tensor) -> None:
        """W <- W - C V with C (k, rows) and the first `rows` rows, in place of `vectors` W (k, n)."""
        if self.dtype is torch.float16:
            coefficients = coefficients * self.inverse_scales[:rows]
        C = coefficients.to(vectors.dtype)
        step = _CPU_ROWS if vectors.device.type == "cpu" else rows
        pieces = C.split(step, 1)
        for V, W in self._tiles(rows, vectors):
            if len(W) == 1:
                W[0].addmv_(V.T, C[0], alpha=-1)
                continue
            for rows_of, c in zip(V.split(step), pieces, strict=True):
                W.addmm_(c, rows_of, alpha=-1)

    def combine(self, weights: Tensor, write: Callable[[int, Tensor], None]) -> None:
        """Y = U V for weights U (k, m) by one pass: `write(first, Y_part)` is called for each tile of columns."""
        U = weights.to(self.device)
        if self.dtype is torch.float16:
            U = U * self.inverse_scales[: U.shape[1]]
        first = 0
        for V, _ in self._tiles(U.shape[1], None, U.dtype):
            write(first, U @ V)
            first += V.shape[1]

    def gram_error(self, rows: int) -> float:
        """The largest entry of |V V^T - 1| in float64, of the rows as stored: m^2 n operations, for tests."""
        gram = torch.zeros(rows, rows, dtype=torch.float64, device=self.device)
        for V, _ in self._tiles(rows, None, torch.float64):
            gram += V @ V.T
        if self.dtype is torch.float16:
            gram *= self.inverse_scales[:rows, None] * self.inverse_scales[:rows]
        return (gram - torch.eye(rows, dtype=gram.dtype, device=gram.device)).abs().max().item()

    def _tiles(
        self, rows: int, vectors: Tensor | None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Columns of the first rows in the vectors' format and on their device, with those of the vectors."""
        wanted = dtype or (vectors.dtype if vectors is not None else self.dtype)
        if self.device.type == "cpu":
            width = _CPU_TILE if wanted == self.dtype else _CPU_HALF_TILE
        else:
            width = max(1, _DEVICE_TILE_BYTES // (max(rows, 1) * wanted.itemsize))
        tiles: Sequence[Tensor] = self.rows[:rows].split(width, 1)
        parts = vectors.split(width, 1) if vectors is not None else tiles
        for tile, part in zip(tiles, parts, strict=True):
            yield tile.to(device=self.device, dtype=wanted, non_blocking=True), part


def dot(x: Tensor, y: Tensor) -> Tensor:
    """x . y in float64, of vectors (n,), on their device: a float32 sum is wrong by 1e-3 at n = 1e8."""
    if x.dtype is torch.float64:
        return torch.dot(x, y)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    width = _CPU_TILE if x.device.type == "cpu" else _DEVICE_TILE_BYTES // 8
    for a, b in zip(x.split(width), y.split(width), strict=True):
        total += torch.dot(a.double(), b.double())
    return total


def gram(pair: Tensor, other: Tensor) -> Tensor:
    """X X^T in float64 of the three vectors X = (pair, other), by one pass; pair (2, n), other (n,)."""
    total = torch.zeros(3, 3, dtype=torch.float64, device=pair.device)
    width = _CPU_HALF_TILE if pair.device.type == "cpu" else _DEVICE_TILE_BYTES // 24
    for two, one in zip(pair.split(width, 1), other.split(width), strict=True):
        X = torch.cat([two, one[None]]).double()
        total += X @ X.T
    return total


def norm(x: Tensor) -> Tensor:
    """|x| in float64, on its device: torch's float32 norm on a CPU is wrong by 4e-4 at n = 1e7."""
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def segment_masses(sizes: Sequence[int], first: int, part: Tensor, masses: Tensor) -> None:
    """Add the squares of columns first, first + 1, ... (`part`, (k, width)) to their segments in `masses`."""
    ends = np.cumsum(sizes)
    start = first
    while start < first + part.shape[1]:
        segment = int(np.searchsorted(ends, start, side="right"))
        stop = min(int(ends[segment]), first + part.shape[1])
        piece = part[:, start - first : stop - first]
        masses[:, segment] += torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64).square()
        start = stop
