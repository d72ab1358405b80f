"""Spectra of a checkpoint's curvature, as the optimizer sees it, kept on disk so that pages share them.

    spectrum = lanczos_at(run, trained.checkpoint(0.897), corpus=trained.corpus, starts=2)       # doctest: +SKIP
    rank_curve(spectrum.runs, spectrum.size)                                                     # doctest: +SKIP

The operator is P^(1/2) C P^(1/2) at the averaged weights, with C the Gauss-Newton matrix or the Hessian of the mean
loss over the windows that follow the checkpoint, and P = pre post / (sqrt(nu^) + eps) of the averaged second moment
("adam") or pre post ("raw"). P is capped at a quantile, as rare tokens with a vanishing nu^ would rule the spectrum
otherwise; the paper leaves such sequences out instead. Source: Meterez et al. 2026, read from their code; the cap is
ours.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from nqflib.curvature import Curvature, adam_geometry, capped, preconditioned, raw_geometry
from nqflib.lanczos import lockstep, random_starts
from nqflib.language_model.checkpoints import Checkpoint
from nqflib.language_model.corpus import Corpus
from nqflib.language_model.optimizer import AVERAGES, Adam
from nqflib.language_model.presets import PRECISIONS
from nqflib.language_model.pretrain import Run
from nqflib.language_model.storage import DamagedFileError, cache_folder, content_key, locked, write_atomically
from nqflib.language_model.transformer import Transformer, flatten

FORMAT = 1
Matrix = Literal["gauss_newton", "hessian"]
Geometry = Literal["adam", "raw"]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Spectrum:
    """Tridiagonal matrices of one operator, from random starts and from the gradient.

    Fields: `runs`, (alphas, betas) of each random start; `gradient_run`, that of the preconditioned gradient, whose
    squared length is `gradient_square`; `size` N; `masses` (m, tensors), how the squared length of each Ritz vector of
    the first start is shared out over the parameters `names`, in increasing order of the Ritz values; `cap` of P,
    infinite without one; `orthogonality`, the largest |q_i . q_j| that was looked at.
    """

    runs: list[tuple[Array, Array]]
    gradient_run: tuple[Array, Array]
    gradient_square: float
    size: int
    masses: Array
    names: list[str]
    cap: float
    orthogonality: float


def lanczos_at(
    run: Run,
    checkpoint: Checkpoint,
    *,
    corpus: Corpus,
    matrix: Matrix = "gauss_newton",
    geometry: Geometry = "adam",
    tokens: int = 8192,
    depth: int = 100,
    starts: int = 1,
    cap: float | None = 0.95,
    seed: int = 0,
    folder: Path | None = None,
) -> Spectrum:
    """The spectrum at a checkpoint, computed or read.

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
        folder: where the result is kept (default: `cache_folder()`).

    Raises `ValueError` for an unknown matrix or geometry and for fewer tokens than one window, `DamagedFileError` for a
    stored result that cannot be read.
    """
    for name, value, kind in (("matrix", matrix, Matrix), ("geometry", geometry, Geometry)):
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
    if tokens < run.size.context or starts < 1:
        raise ValueError(f"tokens must be {run.size.context} or more and starts 1 or more, got {tokens} and {starts}")
    options = [matrix, geometry, tokens, depth, starts, cap, seed]
    cause = {"recipe": checkpoint.recipe, "step": checkpoint.step, "options": options, "format": FORMAT}
    file = (folder or cache_folder()) / "spectra" / f"{content_key(cause)}.npz"
    with locked(file):
        if file.exists():
            return _read(file)
        P, highest = preconditioner(run, checkpoint, geometry, cap)
        curvature = curvature_at(run, checkpoint, corpus, tokens)
        spectrum = _spectrum(curvature, P, matrix, depth, starts, seed, highest)
        write_atomically(file, _packed(spectrum))
    return spectrum


def curvature_at(run: Run, checkpoint: Checkpoint, corpus: Corpus, tokens: int) -> Curvature:
    """Products at the averaged weights on the windows that follow the checkpoint, in the precision of the passes."""
    model = Transformer(run.size, dtype=PRECISIONS[run.precision])
    weights = {name: p.to(PRECISIONS[run.precision]) for name, p in checkpoint.average(AVERAGES[0]).weights.items()}
    windows = corpus.batch(checkpoint.step, tokens // run.size.context, run.seed)
    batches = [(part[:, :-1], part[:, 1:]) for part in windows.split(run.micro_batch)]
    return Curvature(model, batches, parameters=weights)


def preconditioner(run: Run, checkpoint: Checkpoint, geometry: Geometry, cap: float | None) -> tuple[Tensor, float]:
    """P (n,) and the value it is capped at, infinite without a cap."""
    average = checkpoint.average(AVERAGES[0])
    adam = Adam.start(Transformer(run.size), flatten(average.weights))
    if geometry == "raw":
        return raw_geometry(adam.pre, adam.post), float("inf")
    P = adam_geometry(flatten(average.second_moment), adam.pre, adam.post)
    return (P, float("inf")) if cap is None else capped(P, cap)


def _spectrum(
    curvature: Curvature, P: Tensor, matrix: Matrix, depth: int, starts: int, seed: int, cap: float
) -> Spectrum:
    P = P.to(curvature.dtype)
    product: Callable[[Tensor], Tensor] = preconditioned(getattr(curvature, matrix), P)
    gradient = P.sqrt() * curvature.gradient()
    drawn = random_starts(starts, curvature.n, torch.Generator().manual_seed(seed), dtype=curvature.dtype)
    found = lockstep(product, torch.cat([drawn, gradient[None]]), depth, label=matrix.replace("_", "-"))
    solved: Any = eigh_tridiagonal(found[0].alphas, found[0].betas[:-1])
    return Spectrum(
        runs=[(t.alphas, t.betas) for t in found[:-1]],
        gradient_run=(found[-1].alphas, found[-1].betas),
        gradient_square=float(gradient.double().square().sum()),
        size=curvature.n,
        masses=found[0].ritz_masses(solved[1].T, curvature.sizes),
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
    np.savez(content, masses=spectrum.masses, names=np.array(spectrum.names), numbers=numbers, **arrays)
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
                names=[str(name) for name in stored["names"]],
                cap=cap,
                orthogonality=orthogonality,
            )
    except (OSError, ValueError, KeyError, IndexError, EOFError, BadZipFile) as error:
        raise DamagedFileError(f"{file} is damaged ({error}); delete it to compute the spectrum again") from error
