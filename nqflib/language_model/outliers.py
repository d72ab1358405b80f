"""Scores of sequences by their own preconditioned curvature, by which the paper leaves out the rarest.

    scores = sequence_scores(run, checkpoint, windows, P)                                    # doctest: +SKIP
    windows[scores < np.quantile(scores, 0.99)]                                              # doctest: +SKIP

The score of sequence s is |P^(1/2) G_s P^(1/2)|_F^2, with G_s the Gauss-Newton matrix of its own mean loss. With
independent Rademacher vectors z_k, every pair gives an estimate without bias,

    E (z_k . P^(1/2) G_s P^(1/2) z_l)^2 = |P^(1/2) G_s P^(1/2)|_F^2,
    z_k . P^(1/2) G_s P^(1/2) z_l = (J_s P^(1/2) z_k) . l'' (J_s P^(1/2) z_l) / T,

so K products with the Jacobian serve K (K - 1) / 2 pairs and all sequences of a batch. Source: the score and its use
are those of Meterez et al. 2026, read from their code, where each sequence takes a product with G_s for every probe.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nqflib.curvature import CROSS_ENTROPY
from nqflib.language_model.checkpoints import Checkpoint
from nqflib.language_model.linearization import linearize
from nqflib.language_model.optimizer import AVERAGES
from nqflib.language_model.presets import PRECISIONS
from nqflib.language_model.pretrain import Run
from nqflib.language_model.transformer import Transformer, flatten, unflatten
from nqflib.progress import progress


@torch.no_grad()
def sequence_scores(
    run: Run, checkpoint: Checkpoint, windows: Tensor, P: Tensor, *, probes: int = 10, seed: int = 0
) -> NDArray[np.float64]:
    """The scores (S,) of windows (S, T + 1) at a checkpoint's averaged weights.

    Args:
        run: gives size and precision.
        checkpoint: gives the weights.
        windows: ids of tokens.
        P: (n,), diagonal of the preconditioner.
        probes: K, at least 2; K (K - 1) / 2 pairs are averaged.
        seed: of the probes.
    """
    if probes < 2:
        raise ValueError(f"probes must be at least 2, since a score needs pairs, got {probes}")
    dtype = PRECISIONS[run.precision]
    model = Transformer(run.size, dtype=dtype)
    parameters = unflatten(flatten(checkpoint.average(AVERAGES[0]).weights).to(dtype), model)
    generator, root = torch.Generator().manual_seed(seed), P.sqrt().to(dtype)
    signs = torch.randint(0, 2, (probes, len(P)), generator=generator, dtype=torch.int8)
    directions = [unflatten(root * (2 * z.to(dtype) - 1), model) for z in signs]
    above = torch.triu_indices(probes, probes, 1)
    found = []
    for part in progress(windows.split(run.micro_batch), "scores"):
        at = linearize(model, parameters, part[:, :-1])
        changes = torch.stack([at.jvp(direction) for direction in directions])  # (K, B, T, V)
        bent = torch.stack([CROSS_ENTROPY.hessian(at.logits, part[:, 1:], change) for change in changes])
        products = torch.einsum("kbtv,lbtv->bkl", changes, bent).double() / (part.shape[1] - 1)
        found.append(products[:, above[0], above[1]].square().mean(1))
    return torch.cat(found).numpy()
