"""Lanczos with full reorthogonalisation, for matrices that exist only as products with vectors.

    >>> spectrum = torch.cat([torch.tensor([10.0, -3.0]), torch.linspace(0, 1, 998)])
    >>> start = random_starts(1, 1000, torch.Generator().manual_seed(0))[0]
    >>> run = lanczos(lambda v: spectrum * v, start, 40)
    >>> run.reason
    'the depth asked for was reached (step 40)'
    >>> rule = gauss(run.alphas, run.betas)
    >>> [round(float(theta), 4) for theta in (rule.nodes[0], rule.nodes[-1])]
    [-3.0, 10.0]

`nqflib.quadrature` turns alphas and betas into spectra; `nqflib.curvature` makes the operators. The command
`python -m nqflib.lanczos plan` tells what a run needs before it is started.
"""

from __future__ import annotations

from nqflib.lanczos.basis import Basis
from nqflib.lanczos.iteration import Stop, Tridiagonal, lanczos, lockstep, random_starts

__all__ = ["Basis", "Stop", "Tridiagonal", "lanczos", "lockstep", "random_starts"]
