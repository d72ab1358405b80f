"""The iteration: one product a step, then reorthogonalisation against all vectors before, in blocks.

With q_1 = v / |v| and for j = 1, 2, ... (symmetric C)

    w = C q_j,   alpha_j = q_j . w,   w <- w - alpha_j q_j - beta_(j-1) q_(j-1),   w <- (1 - Q Q^T) w   twice,
    beta_j = |w|,   q_(j+1) = w / beta_j,

so C Q = Q T + beta_m q_(m+1) e_m^T with T = tridiag(alpha, beta). The three-term step comes first, and the last two
vectors are kept in full precision beside the basis: a basis of half width is useless otherwise.

`twice` (CGS2) reads the basis four times a step. `delayed` (DCGS2) reads it twice: the second sweep over q_(j+1) shares
its reads with the first sweep over C q_(j+1), which is therefore the product with a vector u orthogonalised once,

    u = s q + Q c,   s^2 = |u|^2 - |c|^2,   (1 - Q Q^T - q q^T) C u = s beta q_next,   q . C u = s alpha + beta_- c_-,

with beta_- and c_- those of the vector before q, so that alpha, beta and q follow without another product. All inner
products of a step are those of u and C u as they come, so that several ranks need one sum. What is left of |C u| by
Pythagoras is only roughly the length of the next u, and need not be right: s, measured in the next step, makes up for
it. A breakdown shows a step later for that.

Every scalar stays on the vectors' device in float64, together with a flag for each step. The host looks at the flags
every `fetch_every` steps and then drops what was computed after the first that is set.

Source: Bielich, Langou, Thomas et al. 2022 (delayed reorthogonalisation, for Arnoldi's method).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from nqflib.arguments import Array
from nqflib.lanczos.basis import Basis, dot, gram, norm, segment_masses
from nqflib.lanczos.ranks import Ranks
from nqflib.progress import progress

Method = Literal["delayed", "twice"]
Operator = Callable[[Tensor], Tensor]

_INVARIANT, _NOT_FINITE = 1, 2


class Stop(Enum):
    """Why a run ended."""

    DEPTH = "the depth asked for was reached"
    INVARIANT = "beta is at rounding level, so the Krylov space of this start is invariant"
    WHOLE_SPACE = "the basis spans the whole space"
    NOT_FINITE = "the operator returned NaN or infinity; nothing from that step on is kept"


@dataclass(frozen=True)
class Tridiagonal:
    """C Q = Q T + beta_m q_(m+1) e_m^T after m steps, T = tridiag(alphas, betas[:-1]).

    Of a run across ranks, every rank has its own columns in `basis` and everything else alike, and the Ritz vectors and
    masses are to be asked for by all ranks at once.
    """

    alphas: Array  # (m,) float64
    betas: Array  # (m,) float64; the last is the length of the residual vector
    stop: Stop
    step: int  # the step, counted from 1, at which `stop` happened
    start_norm: float  # |v|
    orthogonality: float  # largest |q_i . q_j| of the steps j that were monitored, i < j; 0 if there were none
    basis: Basis  # row j - 1 is q_j
    ranks: Ranks

    @property
    def reason(self) -> str:
        return f"{self.stop.value} (step {self.step})"

    def ritz_vectors(self, weights: Array) -> Tensor:
        """Y = U Q, (k, n), for the rows of `weights` U (k, m), such as eigenvectors of T; one pass over the basis."""
        shards = torch.empty(len(weights), self.basis.n, dtype=self._format, device=self.basis.device)

        def write(first: int, part: Tensor) -> None:
            shards[:, first : first + part.shape[1]] = part

        self.basis.combine(self._rows(weights), write)
        return self.ranks.whole(shards)

    def ritz_masses(self, weights: Array, sizes: list[int]) -> Array:
        """Sums of squares of the rows of U Q over consecutive segments (tensors) of `sizes`, (k, segments).

        The vectors themselves are never stored. Raises `ValueError` unless the sizes sum to n.
        """
        ranks = self.ranks
        if sum(sizes) != ranks.n or min(sizes) < 1:
            raise ValueError(f"sizes must be positive and sum to n = {ranks.n}, got a sum of {sum(sizes)}")
        masses = torch.zeros(len(weights), len(sizes), dtype=torch.float64, device=self.basis.device)

        def add(column: int, part: Tensor) -> None:
            first = ranks.first + column
            segment_masses(sizes, first, part[:, : max(0, ranks.n - first)], masses)

        self.basis.combine(self._rows(weights), add)
        return ranks.sum(masses).cpu().numpy()

    @property
    def _format(self) -> torch.dtype:
        return torch.promote_types(self.basis.dtype, torch.float32)

    def _rows(self, weights: Array) -> Tensor:
        m = self.alphas.size
        if weights.ndim != 2 or weights.shape[1] != m:
            raise ValueError(f"weights must have shape (k, {m}), one row for each vector sought, got {weights.shape}")
        return torch.from_numpy(np.ascontiguousarray(weights)).to(self._format)


class Start:
    """The state of one start, given as a whole vector; a run in lockstep has several.

    Everything here is on the vectors' device. Vectors are this rank's shards, scalars the sums over ranks.
    """

    def __init__(self, vector: Tensor, basis: Basis, tolerance: float, ranks: Ranks | None = None) -> None:
        depth, options = basis.capacity, {"dtype": torch.float64, "device": vector.device}
        self.basis, self.tolerance, self.ranks = basis, tolerance, ranks or Ranks(len(vector))
        self.start_norm = norm(vector)
        self.pair = torch.empty(2, basis.n, dtype=vector.dtype, device=vector.device)
        torch.mul(self.ranks.shard(vector), (1 / self.start_norm).to(vector.dtype), out=self.pair[0])
        self.previous = torch.zeros_like(self.pair[0])
        self.alphas, self.betas, self.monitored = (torch.zeros(depth, **options) for _ in range(3))
        self.scale = torch.zeros((), **options)  # largest |C q| so far, a lower bound of ||C||
        self.flags = torch.zeros(depth, dtype=torch.int8, device=vector.device)
        self.kept = 0
        self.stop: Stop | None = None

    @property
    def query(self) -> Tensor:
        """The vector that the operator is applied to next."""
        return self.pair[0]

    def twice(self, j: int, product: Tensor, monitor: bool) -> None:
        """Step j (counted from 0) with w = C q_j and two sweeps: three sums over ranks."""
        q, w = self.pair
        w.copy_(product)
        self.basis.store(j, q)
        self._monitor(j, monitor)
        self.alphas[j], square = self.ranks.sum(torch.stack([dot(q, w), dot(w, w)]))
        self._see(square)
        _subtract(w, self.alphas[j], q)
        if j:
            _subtract(w, self.betas[j - 1], self.previous)
        self._sweep(j, w)
        beta = self._sweep(j, w).clamp_min(0).sqrt()
        self.betas[j] = beta
        self._flag(j, beta, square)
        self.previous.copy_(q)
        torch.mul(w, _inverse(beta).to(w.dtype), out=q)

    def delayed(self, j: int, product: Tensor, monitor: bool) -> None:
        """Step j with w = C u, u orthogonalised once: both sweeps in two reads of the basis and one sum over ranks."""
        u, w = self.pair
        w.copy_(product)
        old = max(j - 1, 0)  # rows whose only copy is the basis
        within, across = gram(self.pair, self.previous), self.basis.measure(old, self.pair)
        found = self.ranks.sum(torch.cat([within.flatten(), across.flatten()]))
        G, (c, h) = found[:9].view(3, 3), found[9:].view(2, old)
        (c_last, h_last), cross, square = G[2, :2], G[0, 1], G[1, 1]
        self._see(square)
        s = (G[0, 0] - torch.dot(c, c) - c_last.square()).clamp_min(0).sqrt()
        inverse = _inverse(s)
        along = (cross - torch.dot(c, h) - c_last * h_last) * inverse  # q . w
        left = square - torch.dot(h, h) - h_last.square() - along.square()
        if old:
            self.basis.subtract(old, torch.stack([c, h]), self.pair)
        _subtract(u, c_last, self.previous)  # u is now s q
        _subtract(w, h_last, self.previous)
        _subtract(w, along * inverse, u)
        u.mul_(inverse.to(u.dtype))
        self.basis.store(j, u)
        self._monitor(j, monitor)
        alpha = along
        if j:
            self.betas[j - 1] *= s
            self._flag(j - 1, self.betas[j - 1])
            alpha = along - self.betas[j - 1] * c_last
        self.alphas[j] = alpha * inverse
        # The difference is noise below this share, and u must be neither 0 nor blown up for that.
        length = torch.maximum(left, torch.finfo(w.dtype).eps * square).sqrt()
        self.betas[j] = length * inverse
        self._flag(j, self.betas[j], square)
        self.previous.copy_(u)
        torch.mul(w, _inverse(length).to(w.dtype), out=u)

    def _sweep(self, j: int, w: Tensor) -> Tensor:
        """w <- (1 - Q Q^T) w with q_0 ... q_j, the last two in full precision; return |w|^2 by Pythagoras."""
        old = max(j - 1, 0)
        ends = torch.stack([dot(w, w), dot(self.query, w), dot(self.previous, w)])
        found = self.ranks.sum(torch.cat([ends, self.basis.measure(old, w[None])[0]]))
        (square, last, before), c = found[:3], found[3:]
        if old:
            self.basis.subtract(old, c[None], w[None])
        _subtract(w, last, self.query)
        _subtract(w, before, self.previous)
        return square - found[1:].square().sum()

    def _monitor(self, j: int, due: bool) -> None:
        """Measure the stored row j against those before it."""
        if due and j:
            row = self.basis.row(j, self.query.dtype)
            self.monitored[j] = self.ranks.sum(self.basis.measure(j, row[None])).abs().max()

    def last_beta(self, steps: int) -> float:
        """The last beta of a delayed run, whose second sweep has not come yet. The state stays as it is."""
        u = self.query
        ends, old = torch.stack([dot(u, u), dot(self.previous, u)]), self.basis.measure(steps - 1, u[None])[0]
        found = self.ranks.sum(torch.cat([ends, old]))
        square = found[0] - found[1:].square().sum()
        return (self.betas[steps - 1] * square.clamp_min(0).sqrt()).item()

    def _see(self, square: Tensor) -> None:
        """Keep the largest |C q|, given its square."""
        self.scale = torch.maximum(self.scale, torch.nan_to_num(square.sqrt(), nan=0.0, posinf=0.0))

    def _flag(self, j: int, beta: Tensor, square: Tensor | None = None) -> None:
        self.flags[j] |= (beta <= self.tolerance * self.scale).to(torch.int8) * _INVARIANT
        if square is not None:
            self.flags[j] |= (~square.isfinite()).to(torch.int8) * _NOT_FINITE

    def fetch(self, steps: int) -> None:
        """Wait for the device and look at the flags of the first `steps` steps."""
        flags = self.flags[:steps].cpu().numpy()
        if not flags.any():
            self.kept = steps
            return
        j = int(np.argmax(flags > 0))
        failed = flags[j] >= _NOT_FINITE
        self.stop = Stop.NOT_FINITE if failed else Stop.INVARIANT
        self.kept = j if failed else j + 1

    def result(self, delayed: bool) -> Tridiagonal:
        """What was kept, on the host."""
        m, stop = self.kept, self.stop
        alphas, betas, monitored = (t[:m].cpu().numpy().copy() for t in (self.alphas, self.betas, self.monitored))
        if stop is None:
            if delayed:
                betas[-1] = self.last_beta(m)
            stop = Stop.INVARIANT if betas[-1] <= self.tolerance * self.scale.item() else Stop.DEPTH
        if m == self.ranks.n and stop is not Stop.NOT_FINITE:
            stop = Stop.WHOLE_SPACE
        return Tridiagonal(
            alphas=alphas,
            betas=betas,
            stop=stop,
            step=m + (stop is Stop.NOT_FINITE),
            start_norm=self.start_norm.item(),
            orthogonality=float(monitored.max(initial=0.0)),
            basis=self.basis,
            ranks=self.ranks,
        )


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for x = 0: a run that broke down goes on with zeros until the host looks."""
    return torch.where(x > 0, 1 / x, 0.0)


def _subtract(w: Tensor, factor: Tensor, q: Tensor) -> None:
    """w <- w - factor q with a factor on the device."""
    w.addcmul_(q, factor.to(w.dtype), value=-1)


def random_starts(
    count: int, n: int, generator: torch.Generator, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    """Gaussian vectors (count, n), drawn in float64 on the generator's device so that formats start from the same."""
    drawn = torch.randn(count, n, generator=generator, dtype=torch.float64, device=generator.device)
    return drawn.to(device=device, dtype=dtype)


def lanczos(operator: Operator, start: Tensor, depth: int, **options) -> Tridiagonal:
    """Run Lanczos on a symmetric operator from one start.

    Args:
        operator: C as a function of q (n,) to C q (n,), in the start's format; it must not change q.
        start: v (n,), float32 or float64, of any length but 0; on the device on which to work.
        depth: m, the number of products. More than n, or more than the Krylov space holds, gives a shorter T.
        options: those of `lockstep`.
    """
    if start.ndim != 1:
        raise ValueError(f"start must be a vector (n,), got shape {tuple(start.shape)}; `lockstep` takes several")
    return lockstep(lambda block: operator(block[0])[None], start[None], depth, **options)[0]


def lockstep(
    operator: Operator,
    starts: Tensor,
    depth: int,
    *,
    method: Method | None = None,
    basis_dtype: torch.dtype | None = None,
    storage: str | None = None,
    tolerance: float | None = None,
    fetch_every: int | None = None,
    monitor_every: int = 32,
    folder: Path | str | None = None,
    on_disk: bool = False,
    save_every: int = 50,
    across_ranks: bool = False,
    label: str = "Lanczos",
) -> list[Tridiagonal]:
    """Run Lanczos from several independent starts that share the calls of the operator.

    Args:
        operator: C as a function of Q (k, n) to the products of its rows (k, n); k falls when a start breaks down.
        starts: (S, n), float32 or float64, on the device on which to work.
        depth: m, the number of products for each start.
        method: "delayed" (two reads of the basis a step), the default, or "twice" (four), the default and the only
            choice for a basis of less precision than the starts: there, the delayed sweep lets errors of the stored
            vectors grow by up to ||C|| / beta a step, which ruined a localised spectrum within 150 steps.
        basis_dtype: format of the stored vectors, the starts' if not given; see `nqflib.lanczos.basis` for what
            bfloat16 and scaled float16 cost in orthogonality.
        storage: "cpu" keeps the basis in the host's memory when the starts are on another device.
        tolerance: a beta below this share of the largest |C q| so far is a breakdown; 64 units of rounding by default.
        fetch_every: steps between looks at the flags: 1 on a CPU and 32 elsewhere if not given.
        monitor_every: steps between measurements of orthogonality, each of which reads the basis once.
        folder: where to keep a checkpoint, and to resume from it if there is one; the same bits either way.
        on_disk: map the basis into a file in `folder` in place of memory.
        save_every: steps between checkpoints.
        across_ranks: share the run with the other ranks of the process group, which make the same call. The starts are
            whole and the same on all; `operator` returns this rank's share of the products; see `nqflib.lanczos.ranks`.
        label: of the progress bar.

    Raises:
        ValueError: for starts that are empty, zero, not finite or not of a full-precision format, and for a
            checkpoint of another run; across ranks, for settings that differ between them.
        LostRankError: across ranks, when another one ended or was silent for the group's timeout.
    """
    basis_dtype = basis_dtype or starts.dtype
    method = method or ("delayed" if basis_dtype.itemsize >= starts.dtype.itemsize else "twice")
    capacity = _check(starts, depth, method, on_disk, folder)
    if method == "delayed" and basis_dtype.itemsize < starts.dtype.itemsize:
        raise ValueError(f"method must be 'twice' for a basis in {basis_dtype} and starts in {starts.dtype}")
    fetch_every = fetch_every or (1 if starts.device.type == "cpu" else 32)
    tolerance = 64 * torch.finfo(starts.dtype).eps if tolerance is None else tolerance
    from nqflib.lanczos.resume import Checkpoint

    ranks = Ranks(starts.shape[1], across_ranks)
    saved = None if folder is None else Checkpoint(Path(folder), starts, method, basis_dtype, ranks)
    runs = []
    for i, vector in enumerate(starts):
        file = saved.rows_file(i) if saved is not None and on_disk else None
        basis = Basis(ranks.width, capacity, basis_dtype, starts.device, storage=storage, file=file)
        runs.append(Start(vector, basis, tolerance, ranks))
    ranks.agree(
        starts=(starts.dtype, [run.start_norm.item() for run in runs]),
        depth=depth,
        method=method,
        basis_dtype=basis_dtype,
        tolerance=tolerance,
        fetch_every=fetch_every,
        monitor_every=monitor_every,
        save_every=save_every,
        folder=folder if folder is None else str(folder),
    )
    first = saved.load(runs) if saved is not None else 0
    ranks.agree(checkpoint=f"{first} steps")  # of a folder that not all of them see, for instance
    steps = range(first, capacity)
    for j in progress(steps, label) if ranks.rank == 0 else steps:
        active = [run for run in runs if run.stop is None]
        if not active:
            break
        products = operator(ranks.whole(torch.stack([run.query for run in active])))
        if products.shape != (len(active), starts.shape[1]):
            raise ValueError(
                f"operator must return shape {(len(active), starts.shape[1])}, got {tuple(products.shape)}"
            )
        products = ranks.sum_to_shard(products.to(starts.dtype))
        monitor = (j + 1) % monitor_every == 0 or j + 1 == capacity
        for run, product in zip(active, products, strict=True):
            (run.delayed if method == "delayed" else run.twice)(j, product, monitor)
        save = saved is not None and ((j + 1) % save_every == 0 or j + 1 == capacity)
        if save or (j + 1) % fetch_every == 0 or j + 1 == capacity:
            for run in active:
                run.fetch(j + 1)
            stopped = [run for run in active if run.stop is not None]
            hopeless = all(r.stop is not None for r in runs) and any(r.stop is Stop.NOT_FINITE for r in stopped)
            if saved is not None and (save or stopped) and not hopeless:  # else the checkpoint before is worth more
                saved.save(j + 1, runs)
    return [run.result(method == "delayed") for run in runs]


def _check(starts: Tensor, depth: int, method: str, on_disk: bool, folder: Path | str | None) -> int:
    """Return the number of rows to allocate, or raise ValueError."""
    if starts.ndim != 2 or not starts.numel():
        raise ValueError(f"starts must have shape (S, n), neither of them 0, got {tuple(starts.shape)}")
    if starts.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"starts must be float32 or float64, got {starts.dtype}")
    lengths = norm(starts) if len(starts) == 1 else torch.stack([norm(v) for v in starts])
    if not (lengths.isfinite() & (lengths > 0)).all():
        raise ValueError("starts must be finite and not zero")
    if not (isinstance(depth, int) and depth > 0):
        raise ValueError(f"depth must be a positive integer, got {depth!r}")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if on_disk and folder is None:
        raise ValueError("on_disk needs a folder")
    return min(depth, starts.shape[1])
