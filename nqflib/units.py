"""Where the exchangeable units of a module sit: parameters of a torch module <-> W of shape (p, d).

A module says it with a map from parameter name to the axis of that parameter which counts the units, either
as an attribute `unit_axes` or as an argument. Unit i is the concatenation, in the order of the map, of slice i
of every named parameter, each flattened row-major; it is column i of W. For a two-layer perceptron with
weights u (d, k) and v (d, c) and the map {"u": 0, "v": 0}, p = k + c and w_i = (u_i, v_i).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

Inputs = Tensor | tuple[Tensor, ...]  # what a module is called with; the first axis of each is the sample
UnitAxes = Mapping[str, int | None]  # parameter name -> the axis that counts the units


def unit_axes_of(module: nn.Module, unit_axes: UnitAxes | None = None) -> dict[str, int | None]:
    """The map parameter name -> unit axis: `unit_axes` if given, else the module's own attribute `unit_axes`.

    An axis counts the units of that parameter (may be negative); None says that the whole parameter belongs
    to one single unit, and then every entry must be None (d = 1, for layers without exchangeable units).
    Parameters that are not named stay constants. Raises `ValueError` for unknown names, an axis out of
    range, or parameters that disagree about the number of units.
    """
    axes = unit_axes if unit_axes is not None else getattr(module, "unit_axes", None)
    if not axes:
        raise ValueError(
            "unit_axes is required: a mapping from parameter name to the axis that counts the units "
            f"(the module has no attribute unit_axes); its parameters are {[n for n, _ in module.named_parameters()]}"
        )
    parameters = dict(module.named_parameters())
    widths: dict[str, int] = {}
    for name, axis in axes.items():
        if name not in parameters:
            raise ValueError(f"unit_axes names {name!r}, which is not one of the parameters {list(parameters)}")
        shape = tuple(parameters[name].shape)
        if axis is not None and not -len(shape) <= axis < len(shape):
            raise ValueError(f"unit_axes[{name!r}] = {axis} is not an axis of a parameter of shape {shape}")
        widths[name] = 1 if axis is None else shape[axis]
    if len({axis is None for axis in axes.values()}) > 1:
        raise ValueError(f"unit_axes must be None for every parameter or for none of them, got {dict(axes)}")
    if len(set(widths.values())) > 1:
        raise ValueError(f"the parameters named in unit_axes disagree about the number of units: {widths}")
    return dict(axes)


def unit_matrix(module: nn.Module, unit_axes: UnitAxes | None = None) -> Tensor:
    """W (p, d): column i stacks unit i's slice of every named parameter, each flattened row-major, in map order."""
    columns = []
    for name, axis in unit_axes_of(module, unit_axes).items():
        parameter = module.get_parameter(name)
        parameter = parameter.unsqueeze(-1) if axis is None else parameter.movedim(axis, -1)
        columns.append(parameter.reshape(-1, parameter.shape[-1]))
    return torch.cat(columns)


def unit_parameters(module: nn.Module, W: Tensor, unit_axes: UnitAxes | None = None) -> dict[str, Tensor]:
    """The named parameters with the values of `W` (p, d): the inverse of `unit_matrix`."""
    parameters: dict[str, Tensor] = {}
    start = 0
    for name, axis in unit_axes_of(module, unit_axes).items():
        shape = module.get_parameter(name).shape
        rest = shape if axis is None else torch.Size([s for i, s in enumerate(shape) if i != axis % len(shape)])
        block = W[start : start + rest.numel()]
        start += rest.numel()
        if axis is None:
            parameters[name] = block.reshape(rest)
        else:
            parameters[name] = block.reshape(*rest, W.shape[1]).movedim(-1, axis)
    if W.shape[0] != start:
        raise ValueError(f"W must have p = {start} rows, one per parameter of a unit, got {tuple(W.shape)}")
    return parameters


def evaluate(module: nn.Module, W: Tensor, x: Inputs, unit_axes: UnitAxes | None = None) -> Tensor:
    """f(W; x), shape (n, c): the module's output with its units replaced by `W` (p, d).

    `x` is the module's input, or a tuple of inputs, with the sample on the first axis of each. An output of
    shape (n,) counts as one output, c = 1. Raises `ValueError` for an output that is not (n,) or (n, c).
    """
    f = functional_call(module, unit_parameters(module, W, unit_axes), x if isinstance(x, tuple) else (x,))
    n = (x[0] if isinstance(x, tuple) else x).shape[0]
    if f.ndim not in (1, 2) or f.shape[0] != n:
        raise ValueError(f"the module must return (n,) or (n, c) for n = {n} samples, got {tuple(f.shape)}")
    return f if f.ndim == 2 else f.unsqueeze(1)
