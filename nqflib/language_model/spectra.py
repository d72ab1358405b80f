"""Spectra of a checkpoint's curvature, as the optimizer sees it, kept on disk so that pages share them.

    cell = Cell(run, trained.checkpoint(0.897), trained.corpus, matrix="hessian")             # doctest: +SKIP
    lanczos_at(cell).curve()                                                                  # doctest: +SKIP

The operator is P^(1/2) C P^(1/2) at the averaged weights, with C the Gauss-Newton matrix or the Hessian of the mean
loss over the windows that follow the checkpoint, and P = pre post / (sqrt(nu^) + eps) of the averaged second moment
("adam") or pre post ("raw"). P is capped at a quantile, as rare tokens with a vanishing nu^ would rule the spectrum
otherwise; the paper leaves such sequences out instead. Source: Meterez et al. 2026, read from their code; the cap is
ours.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from nqflib.curvature import Curvature
from nqflib.geometry import adam_geometry, capped, preconditioned, raw_geometry
from nqflib.lanczos import lockstep, random_starts
from nqflib.language_model.checkpoints import Averaged, Checkpoint
from nqflib.language_model.corpus import Corpus
from nqflib.language_model.optimizer import AVERAGES, Adam
from nqflib.language_model.presets import PRECISIONS
from nqflib.language_model.pretrain import Run
from nqflib.language_model.storage import (
    DamagedFileError,
    Key,
    cache_folder,
    content_key,
    free_first,
    locked,
    write_atomically,
)
from nqflib.language_model.transformer import Transformer, flatten
from nqflib.quadrature import RankCurve, gauss, node_ranks, rank_curve
from nqflib.tails import SourceFit, source

FORMAT = 2
LEADING = 10  # Ritz vectors whose rows in the unembedding are looked at
Matrix = Literal["gauss_newton", "hessian"]
Geometry = Literal["adam", "raw"]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Spectrum:
    """Tridiagonal matrices of one operator, from random starts and from the gradient.

    Fields: `runs`, (alphas, betas) of each random start; `gradient_run`, that of the preconditioned gradient, whose
    squared length is `gradient_square`; `size` N; `masses` (m, tensors), how the squared length of each Ritz vector of
    the first start is shared out over the parameters `names`, in increasing order of the Ritz values; `rows`
    (LEADING, V), the same over the rows of the unembedding for the largest Ritz values, largest first; `cap` of P,
    infinite without one; `orthogonality`, the largest |q_i . q_j| that was looked at.
    """

    runs: list[tuple[Array, Array]]
    gradient_run: tuple[Array, Array]
    gradient_square: float
    size: int
    masses: Array
    rows: Array
    names: list[str]
    cap: float
    orthogonality: float

    def curve(self) -> RankCurve:
        """Ranks with bounds and the noise of the starts, see `nqflib.quadrature`."""
        return rank_curve(self.runs, self.size)

    def nodes(self, *, negative: bool = False) -> tuple[Array, Array]:
        """(ranks, values) of the first start, values falling; with `negative`, those of the negative end, as positive
        numbers from the most negative on."""
        alphas, betas = self.runs[0]
        ranks, values = node_ranks(gauss(-alphas if negative else alphas, betas), self.size)
        return ranks[values > 0], values[values > 0]

    def leading(self, count: int) -> Array:
        """The largest Ritz values of the first start, largest first."""
        return gauss(*self.runs[0]).nodes[: -count - 1 : -1]

    def share(self, parameter: str, *, top: int = 0, bottom: int = 0) -> float:
        """Mean share of all parameters whose name ends in `parameter` in the `top` or `bottom` Ritz vectors."""
        columns = [i for i, name in enumerate(self.names) if name.split(".")[-1] == parameter]
        if not columns or (top < 1) == (bottom < 1):
            raise ValueError(f"parameter must be one of {self.names}, and either top or bottom at least 1")
        rows = self.masses[-top:] if top else self.masses[:bottom]
        return float(rows[:, columns].sum(1).mean())

    def source(self, window: tuple[float, float], curve: RankCurve | None = None) -> SourceFit:
        """The source exponent between two ranks, see `nqflib.tails`."""
        return source(self.gradient_run, math.sqrt(self.gradient_square), curve or self.curve(), window)


@dataclass(frozen=True)
class Cell:
    """Which spectrum.

    Args:
        run: whose checkpoint it is.
        checkpoint: gives weights and second moments (their averages over 0.04 of the run) and the place in the text.
        corpus: of the run.
        matrix: "gauss_newton" or "hessian".
        geometry: "adam" or "raw".
        tokens: how many predictions the mean loss is over, in whole windows.
        depth: m of every start.
        starts: random starts, beside that of the gradient; all share the passes over the data.
        cap: quantile at which P is capped, None for no cap; the raw geometry has none.
        seed: of the random starts.
        shuffled: a control: the tokens of all windows in random order.
        gradient_tokens: as `tokens`, for the gradient, where more of them are wanted: the gradient of few tokens is
            mostly noise, which lies along large eigenvalues of the same tokens' curvature.

    Raises `ValueError` for an unknown matrix or geometry and for fewer tokens than one window.
    """

    run: Run
    checkpoint: Checkpoint
    corpus: Corpus
    matrix: Matrix = "gauss_newton"
    geometry: Geometry = "adam"
    tokens: int = 2048
    depth: int = 60
    starts: int = 1
    cap: float | None = 0.95
    seed: int = 0
    shuffled: bool = False
    gradient_tokens: int = 0

    def __post_init__(self) -> None:
        for name, value, kind in (("matrix", self.matrix, Matrix), ("geometry", self.geometry, Geometry)):
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        context = self.run.size.context
        if self.tokens < context or self.starts < 1:
            raise ValueError(
                f"tokens must be {context} or more and starts 1 or more, got {self.tokens} and {self.starts}"
            )

    def file(self, folder: Path | None = None) -> Path:
        """Where the result is kept (default: in `cache_folder()`)."""
        names = ("matrix", "geometry", "tokens", "depth", "starts", "cap", "seed", "shuffled", "gradient_tokens")
        cause = {
            "recipe": self.checkpoint.recipe,
            "step": self.checkpoint.step,
            "options": [getattr(self, name) for name in names],
            "format": FORMAT,
        }
        return (folder or cache_folder()) / "spectra" / f"{content_key(cause)}.npz"


def lanczos_at(cell: Cell, folder: Path | None = None) -> Spectrum:
    """The spectrum at a checkpoint, computed or read. Raises `DamagedFileError` for a stored one that is unreadable."""
    file = cell.file(folder)
    with locked(file):
        if file.exists():
            return _read(file)
        spectrum = _spectrum(cell)
        write_atomically(file, _packed(spectrum))
    return spectrum


def lanczos_all(cells: Mapping[Key, Cell], folder: Path | None = None) -> dict[Key, Spectrum]:
    """Every spectrum, by the same keys. Pages that want the same ones at the same time share the work."""
    return free_first(
        {key: cell.file(folder) for key, cell in cells.items()}, lambda key: lanczos_at(cells[key], folder)
    )


def untrained(run: Run, checkpoint: Checkpoint) -> Checkpoint:
    """The run before its first step, as a control; for the raw geometry, since Adam has no second moment yet."""
    generator = torch.Generator().manual_seed(run.seed)
    model = Transformer(run.size, generator=generator, dtype=next(iter(checkpoint.weights.values())).dtype)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    start = Averaged(AVERAGES[0], weights, {name: torch.zeros_like(p) for name, p in weights.items()})
    return replace(checkpoint, step=0, weights=weights, averages=(start,))


def curvature_at(run: Run, checkpoint: Checkpoint, windows: Tensor) -> Curvature:
    """Products at the averaged weights on windows (S, T + 1), in the precision of the passes."""
    model = Transformer(run.size, dtype=PRECISIONS[run.precision])
    weights = {name: p.to(PRECISIONS[run.precision]) for name, p in checkpoint.average(AVERAGES[0]).weights.items()}
    batches = [(part[:, :-1], part[:, 1:]) for part in windows.split(run.micro_batch)]
    return Curvature(model, batches, parameters=weights)


def windows_after(cell: Cell, tokens: int) -> Tensor:
    """The windows that follow the checkpoint, with that many predictions; shuffled if the cell says so."""
    windows = cell.corpus.batch(cell.checkpoint.step, tokens // cell.run.size.context, cell.run.seed)
    if cell.shuffled:
        order = torch.randperm(windows.numel(), generator=torch.Generator().manual_seed(cell.run.seed))
        windows = windows.flatten()[order].view_as(windows)
    return windows


def preconditioner(run: Run, checkpoint: Checkpoint, geometry: Geometry, cap: float | None) -> tuple[Tensor, float]:
    """P (n,) and the value it is capped at, infinite without a cap."""
    average = checkpoint.average(AVERAGES[0])
    adam = Adam.start(Transformer(run.size), flatten(average.weights))
    if geometry == "raw":
        return raw_geometry(adam.pre, adam.post), float("inf")
    P = adam_geometry(flatten(average.second_moment), adam.pre, adam.post)
    return (P, float("inf")) if cap is None else capped(P, cap)


def _spectrum(cell: Cell) -> Spectrum:
    curvature = curvature_at(cell.run, cell.checkpoint, windows_after(cell, cell.tokens))
    P, cap = preconditioner(cell.run, cell.checkpoint, cell.geometry, cell.cap)
    P = P.to(curvature.dtype)
    product: Callable[[Tensor], Tensor] = preconditioned(getattr(curvature, cell.matrix), P)
    more = max(cell.gradient_tokens, cell.tokens)
    larger = curvature if more == cell.tokens else curvature_at(cell.run, cell.checkpoint, windows_after(cell, more))
    gradient = P.sqrt() * larger.gradient()
    drawn = random_starts(cell.starts, curvature.n, torch.Generator().manual_seed(cell.seed), dtype=curvature.dtype)
    label = cell.matrix.replace("_", "-")
    found = lockstep(product, torch.cat([drawn, gradient[None]]), cell.depth, label=label)
    solved: Any = eigh_tridiagonal(found[0].alphas, found[0].betas[:-1])
    vectors = solved[1].T
    unembedding = list(curvature.shapes).index("unembedding")
    width, before = cell.run.size.width, curvature.sizes[:unembedding]
    after = curvature.sizes[unembedding + 1 :]
    by_row = [*before, *[width] * cell.run.size.vocabulary, *after]
    largest = vectors[: -LEADING - 1 : -1].copy()
    rows = found[0].ritz_masses(largest, by_row)[:, len(before) : len(by_row) - len(after)]
    return Spectrum(
        runs=[(t.alphas, t.betas) for t in found[:-1]],
        gradient_run=(found[-1].alphas, found[-1].betas),
        gradient_square=float(gradient.double().square().sum()),
        size=curvature.n,
        masses=found[0].ritz_masses(vectors, curvature.sizes),
        rows=rows,
        names=list(curvature.shapes),
        cap=cap,
        orthogonality=max(t.orthogonality for t in found),
    )


def _packed(spectrum: Spectrum) -> bytes:
    content = io.BytesIO()
    arrays: dict[str, Any] = {
        f"{kind}_{i}": part
        for i, run in enumerate([*spectrum.runs, spectrum.gradient_run])
        for kind, part in zip(("alphas", "betas"), run, strict=True)
    }
    numbers = np.array([spectrum.gradient_square, spectrum.size, spectrum.cap, spectrum.orthogonality])
    np.savez(
        content, masses=spectrum.masses, rows=spectrum.rows, names=np.array(spectrum.names), numbers=numbers, **arrays
    )
    return content.getvalue()


def _read(file: Path) -> Spectrum:
    try:
        with np.load(file, allow_pickle=False) as stored:
            count = sum(name.startswith("alphas_") for name in stored.files)
            runs = [(stored[f"alphas_{i}"], stored[f"betas_{i}"]) for i in range(count)]
            square, size, cap, orthogonality = stored["numbers"].tolist()
            return Spectrum(
                runs=runs[:-1],
                gradient_run=runs[-1],
                gradient_square=square,
                size=int(size),
                masses=stored["masses"],
                rows=stored["rows"],
                names=[str(name) for name in stored["names"]],
                cap=cap,
                orthogonality=orthogonality,
            )
    except (OSError, ValueError, KeyError, IndexError, EOFError, BadZipFile) as error:
        raise DamagedFileError(f"{file} is damaged ({error}); delete it to compute the spectrum again") from error
