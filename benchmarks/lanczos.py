"""Block Gram-Schmidt is faster than row by row: CGS2 at least 1.7 times, its delayed form at least 3 times.

    python benchmarks/lanczos.py

First table: one step of reorthogonalisation in float32 against 200, 250 and 300 vectors of length 1,000,000, one
thread: two sweeps of modified Gram-Schmidt row by row with in-place axpy, as in the paper's code; `twice`, which reads
the basis four times; `delayed`, which reads it twice and is to do so at 70 % or more of the bandwidth of STREAM's add
(three arrays of 200 MB), timed in between. Our sides include the three-term step, norms and the storing of the vector.

Second table: a known spectrum (1/i and six outliers, n = 20,000, localised eigenvectors) at depth 300: CPU seconds,
max |Q^T Q - 1|, error of the 20 largest eigenvalues as a share of ||A||, and ghosts, beside SciPy's `eigsh`
for 20 pairs. Tools are compared in `peers.py`.

CPU times, medians of 5 repetitions with the sides interleaved. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from nqflib.curvature import as_linear_operator
from nqflib.lanczos import Basis, lanczos, random_starts
from nqflib.lanczos.basis import dot
from nqflib.lanczos.iteration import Start
from nqflib.quadrature import gauss

LENGTH, DEPTHS, REPETITIONS = 1_000_000, (200, 250, 300), 5
BARS = {"twice": 1.7, "delayed": 3.0}
STREAM_SHARE = 0.7
SPECTRUM, DEPTH = 20_000, 300


def cpu_time(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def row_by_row(rows: Tensor, w: Tensor) -> None:
    """Two sweeps of modified Gram-Schmidt."""
    for _ in range(2):
        for v in rows:
            w.add_(v, alpha=-torch.dot(v, w).item())


def reorthogonalisation(basis: Basis, start: Start, stream: tuple[Tensor, ...], j: int) -> bool:
    """Print one row of the first table; True if its bars are met."""
    product = torch.randn(LENGTH, generator=torch.Generator().manual_seed(j))
    w = torch.empty_like(product)

    def ours(method: str) -> Callable[[], None]:
        def run() -> None:
            start.query.copy_(start.previous)
            getattr(start, method)(j, product, False)

        return run

    sides: dict[str, Callable[[], object]] = {
        "rows": lambda: row_by_row(basis.rows[:j], w.copy_(product)),
        "twice": ours("twice"),
        "stream": lambda: torch.add(*stream[:2], out=stream[2]),
        "delayed": ours("delayed"),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repetition in range(REPETITIONS + 1):
        for side, run in sides.items():
            elapsed = cpu_time(run)
            if repetition:  # the first is a warm-up
                times[side].append(elapsed)
    median = {side: statistics.median(values) for side, values in times.items()}
    bandwidth = sum(x.nbytes for x in stream) / median["stream"]
    moved = 2 * 4 * LENGTH * j / median["delayed"]
    ratios = {side: median["rows"] / median[side] for side in BARS}
    print(
        f"{j:>6}{1e3 * median['rows']:>10.0f}{1e3 * median['twice']:>9.0f}{1e3 * median['delayed']:>9.0f}"
        f"{ratios['twice']:>8.2f}{BARS['twice']:>6.1f}{ratios['delayed']:>9.2f}{BARS['delayed']:>6.1f}"
        f"{bandwidth / 1e9:>9.1f}{moved / 1e9:>9.1f}{moved / bandwidth:>8.0%}{STREAM_SHARE:>6.0%}"
    )
    return moved >= STREAM_SHARE * bandwidth and all(ratios[side] >= bar for side, bar in BARS.items())


def known_operator(dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], np.ndarray]:
    """H D H with three reflections, and its eigenvalues."""
    generator = torch.Generator().manual_seed(0)
    eigenvalues = 1 / torch.arange(1, SPECTRUM + 1, dtype=torch.float64)
    eigenvalues[:6] += torch.tensor([10, 6, 4, 2.5, 1.7, -0.8], dtype=torch.float64)
    mirrors = torch.randn(3, SPECTRUM, generator=generator, dtype=torch.float64)
    mirrors = (mirrors / mirrors.norm(dim=1, keepdim=True)).to(dtype)
    diagonal = eigenvalues.to(dtype)

    def apply(v: Tensor) -> Tensor:
        for m in mirrors:
            v = v - 2 * dot(m, v).to(dtype) * m
        v = diagonal * v
        for m in mirrors.flip(0):
            v = v - 2 * dot(m, v).to(dtype) * m
        return v

    return apply, eigenvalues.numpy()


def plain_lanczos(apply: Callable[[Tensor], Tensor], v: Tensor) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """alphas, betas and basis of the peer: row by row, twice, scalars in the vectors' format."""
    rows, alphas, betas = torch.empty(DEPTH, len(v), dtype=v.dtype), np.empty(DEPTH), np.empty(DEPTH)
    q = v / v.norm()
    for j in range(DEPTH):
        rows[j] = q
        w = apply(q)
        alphas[j] = torch.dot(q, w).item()
        row_by_row(rows[: j + 1], w)
        betas[j] = w.norm().item()
        q = w / betas[j]
    return alphas, betas, rows


def quality(alphas: np.ndarray, betas: np.ndarray, true: np.ndarray) -> str:
    rule = gauss(alphas, betas)
    found, wanted = (np.sort(x[np.argsort(-np.abs(x))[:20]]) for x in (rule.nodes, true))
    converged = rule.nodes[rule.residuals < 1e-6 * np.abs(rule.nodes)]
    ghosts = converged.size - np.unique(np.abs(converged[:, None] - true).argmin(1)).size
    return f"{np.abs(found - wanted).max() / np.abs(true).max():>11.1e}{ghosts:>8}"


def known_spectrum(dtype: torch.dtype) -> None:
    """Print the rows of the second table for one format."""
    apply, true = known_operator(dtype)
    v = random_starts(1, SPECTRUM, torch.Generator().manual_seed(1), dtype=dtype)[0]
    name = str(dtype).removeprefix("torch.")
    cases = [(method, dtype, method) for method in ("delayed", "twice")]
    if dtype is torch.float32:
        cases += [(f"twice, {h} basis", getattr(torch, h), "twice") for h in ("bfloat16", "float16")]
    for label, basis_dtype, method in cases:
        begin = time.process_time()
        run = lanczos(apply, v, DEPTH, method=method, basis_dtype=basis_dtype)  # pyright: ignore[reportArgumentType]
        elapsed = time.process_time() - begin
        error = run.basis.gram_error(DEPTH)
        print(f"{label:<24}{name:<9}{elapsed:>8.2f}{error:>11.1e}{quality(run.alphas, run.betas, true)}")
    begin = time.process_time()
    alphas, betas, rows = plain_lanczos(apply, v)
    elapsed = time.process_time() - begin
    error = (rows.double() @ rows.double().T - torch.eye(DEPTH, dtype=torch.float64)).abs().max().item()
    print(f"{'row by row, twice':<24}{name:<9}{elapsed:>8.2f}{error:>11.1e}{quality(alphas, betas, true)}")
    operator = as_linear_operator(lambda rows: torch.stack([apply(v) for v in rows]), SPECTRUM, dtype)
    begin = time.process_time()
    found = np.sort(eigsh(operator, 20, which="LM", v0=v.numpy(), return_eigenvectors=False))
    elapsed = time.process_time() - begin
    wanted = np.sort(true[np.argsort(-np.abs(true))[:20]])
    print(f"{'eigsh, 20 pairs':<24}{name:<9}{elapsed:>8.2f}{'':>11}{np.abs(found - wanted).max() / true.max():>11.1e}")


def main() -> int:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    basis = Basis(LENGTH, max(DEPTHS) + 1, torch.float32, torch.device("cpu"))
    for row in basis.rows:
        row.normal_(generator=generator).div_(LENGTH**0.5)
    start = Start(torch.ones(LENGTH), basis, 0.0)
    start.previous.normal_(generator=generator).div_(LENGTH**0.5)
    stream = tuple(torch.ones(50_000_000) for _ in range(3))
    heads = ("depth", "rows ms", "twice", "delayed", "ratio", "bar", "ratio", "bar", "STREAM", "moved", "share", "bar")
    print("".join(f"{h:>{w}}" for h, w in zip(heads, (6, 10, 9, 9, 8, 6, 9, 6, 9, 9, 8, 6), strict=True)))
    met = [reorthogonalisation(basis, start, stream, j) for j in DEPTHS]
    del basis, start, stream
    print(f"\n{'':<24}{'format':<9}{'CPU s':>8}{'|QtQ - 1|':>11}{'top 20':>11}{'ghosts':>8}")
    with tempfile.TemporaryDirectory() as folder:  # no progress bars between the rows
        os.environ["NQF_PROGRESS"] = f"{folder}/progress"
        for dtype in (torch.float32, torch.float64):
            known_spectrum(dtype)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
