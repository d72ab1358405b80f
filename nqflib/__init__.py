"""The core of the NQF companion: neural quadratic forms and the quadratic model of training.

Each module is one idea of the two papers and is imported by name (`from nqflib import forms`).
This file imports nothing: papermill loads it at every start, and `lotka_volterra`, `power_laws`
and `quadrature` are meant to work without torch.
"""

__version__ = "0.1.0"
