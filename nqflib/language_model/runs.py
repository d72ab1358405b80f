"""Several runs at once: pages that need the same ones share the work instead of waiting for each other.

    results = pretrain_all([Run.of(preset("laptop"), batch) for batch in (4, 32, 128)])     # doctest: +SKIP
    results[0].history.average_loss[-1]                                                     # doctest: +SKIP

A finished run is read from the cache, see `pretrain`. Two processes that start with the same list at the same time
train each run once, between them: a run that the other has in hand is left for later.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nqflib.language_model import parallel
from nqflib.language_model.checkpoints import load_checkpoint
from nqflib.language_model.corpus import Corpus
from nqflib.language_model.passes import Passes
from nqflib.language_model.presets import PRECISIONS
from nqflib.language_model.pretrain import Diverged, Run, Trained, pretrain, run_folder
from nqflib.language_model.storage import free_first
from nqflib.language_model.transformer import flatten


def pretrain_all(runs: Iterable[Run], *, folder: Path | None = None, device: str = "auto") -> list[Trained | Diverged]:
    """Train or read every run; the results are in the order of `runs`.

    Arguments: as for `pretrain`. A run whose loss stops being finite is returned as the `Diverged` that says when.
    Raises what `pretrain` raises otherwise.
    """
    runs = list(runs)
    target = parallel.resolve_device(device)
    opened: dict[tuple[Any, ...], Corpus] = {}  # a text is hashed when it is opened: once is enough
    corpora: dict[Run, Corpus] = {}
    for run in runs:
        text = (run.source, run.size.vocabulary, run.size.context, run.byte_level, run.held_out)
        if text not in opened:
            opened[text] = run.corpus(folder)
        corpora[run] = opened[text]
    homes = {run: run_folder(run, corpus, target, folder) for run, corpus in corpora.items()}

    def train(run: Run) -> Trained | Diverged:
        try:
            return pretrain(run, folder=folder, device=device, corpus=corpora[run])
        except Diverged as error:
            return error

    results = free_first(homes, train)
    return [results[run] for run in runs]


def average_losses(trained: Trained, run: Run, window: float, *, device: str = "auto") -> NDArray[np.float64]:
    """Held-out loss of the average over a share `window` of `run`, at each kept checkpoint of its result `trained`.

    `History` has that of the shortest window. Raises what `load_checkpoint` and `Checkpoint.average` raise.
    """
    passes = Passes(run.size, PRECISIONS[run.precision], run.micro_batch, parallel.resolve_device(device))
    losses = []
    for file in trained.checkpoints.values():
        average = load_checkpoint(file, vocabulary=trained.corpus.vocabulary).to(passes.device).average(window)
        losses.append(passes.evaluate(flatten(average.weights), trained.corpus.held_out))
    return np.array(losses)
