"""Parameters and presets of a notebook: what may be changed, within which bounds, and what a preset sets.

A notebook declares its parameters in a cell tagged `parameters`, one typed assignment a line,

    eps: float | None = None  # abundance of every mode at t = 0 [1e-30 .. 1e-2]

with the permitted range (`low .. high`) or choices (`a | b | c`) in brackets at the end, and what each preset
sets in a cell tagged `presets` that holds one literal dictionary. Both are read here without running anything,
so the command line, the book and a form on a page all show and check the same declaration.
"""

from __future__ import annotations

import ast
import difflib
import io
import math
import re
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from typing import Any

#: From the smallest to the largest; each takes over what the one before it sets and does not change itself.
ORDER = ("smoke", "laptop", "evening", "workstation", "paper")

_SCALARS = {"int": int, "float": float, "bool": bool, "str": str}


class ParameterError(ValueError):
    """A parameter that a notebook does not take: its name, type or value is wrong. The text says what is valid."""


@dataclass(frozen=True)
class Parameter:
    """One declared parameter of a notebook."""

    name: str
    type: str  # as written, without "| None": "float", "int", "bool", "str", "list[float]", ...
    default: Any
    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()

    @property
    def bounds(self) -> str:
        """The permitted values as text, empty if there is no limit."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if math.isfinite(self.low):
            return f"from {self.low:g} to {self.high:g}"
        return ""

    def check(self, value: Any) -> Any:
        """Return `value` in the declared type.

        Raises:
            ParameterError: the type is not the declared one or the value lies outside the declared range.
        """
        if value is None and self.default is None:
            return None
        if self.type.startswith("list["):
            if isinstance(value, str) or not isinstance(value, Sequence) or not value:
                raise ParameterError(f"{self.name} needs a non-empty {self.type}, got {value!r}")
            return [self._check_scalar(self.type[5:-1], item) for item in value]
        return self._check_scalar(self.type, value)

    def _check_scalar(self, type_name: str, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = {
            "float": is_number,
            "int": is_number and float(value).is_integer(),
            "bool": isinstance(value, bool),
            "str": isinstance(value, str),
        }[type_name]
        if not fits:
            raise ParameterError(f"{self.name} needs a value of type {type_name}, got {value!r}")
        value = _SCALARS[type_name](value)
        outside = type_name in ("int", "float") and not self.low <= value <= self.high
        if outside or (self.choices and str(value) not in self.choices):
            raise ParameterError(f"{self.name} must be {self.bounds}, got {value!r}")
        return value


@dataclass(frozen=True)
class Declaration:
    """The parameters of a notebook, by name, and the dictionary of its presets."""

    parameters: dict[str, Parameter]
    presets: dict[str, dict[str, Any]]

    def check(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given parameters in their declared types.

        Raises:
            ParameterError: a name is unknown (the nearest valid one is suggested), or a type or value is wrong.
        """
        for name in given:
            if name not in self.parameters:
                raise ParameterError(_unknown("parameter", name, self.parameters))
        return {name: self.parameters[name].check(value) for name, value in given.items()}

    def effective(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All parameters as the notebook will use them: defaults, then the preset's values, then `given`."""
        values = {name: parameter.default for name, parameter in self.parameters.items()}
        values.update(self.check(given))
        if self.presets:
            filled = preset_values(self.presets, values["preset"])
            values.update({name: filled[name] for name, value in values.items() if value is None and name in filled})
        return values

    def default(self, name: str, preset: str = "laptop") -> str:
        """What `--help-notebook` and a form show as a parameter's default: the preset's value if it sets one."""
        value = self.parameters[name].default
        if value is None and self.presets:
            return f"{preset_values(self.presets, preset)[name]!r} in preset {preset}"
        return repr(value)


def declaration(cells: Sequence[Mapping[str, Any]]) -> Declaration:
    """Read the declaration from a notebook's cells (nbformat 4), without running them.

    Raises:
        ParameterError: a line of the parameters cell cannot be read, a preset names a parameter that does not
            exist or a value that its own range excludes, or a parameter that defaults to None is set by no preset.
    """
    parameters = _parse_parameters(_tagged(cells, "parameters"))
    presets = _parse_presets(_tagged(cells, "presets"))
    if presets:
        if "preset" not in parameters:
            raise ParameterError('a notebook with presets needs the parameter `preset: str = "laptop"`')
        filled = preset_values(presets, ORDER[-1])
        unset = [n for n, p in parameters.items() if p.default is None and n not in filled]
        if unset:
            raise ParameterError(f"no preset sets {', '.join(unset)}, and the default is None")
        for preset in presets:
            for name, value in presets[preset].items():
                if name not in parameters:
                    raise ParameterError(f"preset {preset}: " + _unknown("parameter", name, parameters))
                if parameters[name].default is not None:
                    raise ParameterError(
                        f"preset {preset} sets {name}, which then needs the default None (so that an override can be "
                        f"told from a default), not {parameters[name].default!r}"
                    )
                parameters[name].check(value)
    return Declaration(parameters, presets)


def preset_values(presets: Mapping[str, Mapping[str, Any]], preset: str) -> dict[str, Any]:
    """The values of one preset, each preset taking over what the smaller ones set.

    Raises:
        ParameterError: `preset` is not one of `ORDER`.
    """
    if preset not in ORDER:
        raise ParameterError(_unknown("preset", preset, ORDER))
    values: dict[str, Any] = {}
    for name in ORDER[: ORDER.index(preset) + 1]:
        values.update(presets.get(name, {}))
    return values


def resolve(presets: Mapping[str, Mapping[str, Any]], preset: str, **given: Any) -> Any:
    """Fill the parameters that were not given (`None`) with the preset's values.

    Args:
        presets: per preset, the values that it sets.
        preset: one of `ORDER`.
        given: the notebook's parameters that presets set; `None` means "take the preset's".

    Returns:
        An instance of a frozen dataclass `Settings` with the field `preset` and one field for each value.

    Raises:
        ParameterError: `preset` or a given name is unknown, or a value is set neither by hand nor by the preset.
    """
    values = preset_values(presets, preset)
    for name, value in given.items():
        if name not in values:
            raise ParameterError(_unknown("parameter", name, values))
        if value is not None:
            values[name] = value
    fields = [("preset", str), *((name, type(value)) for name, value in values.items())]
    return make_dataclass("Settings", fields, frozen=True)(preset, **values)


def _tagged(cells: Sequence[Mapping[str, Any]], tag: str) -> str:
    for cell in cells:
        if tag in cell.get("metadata", {}).get("tags", []):
            return cell["source"]
    return ""


def _parse_parameters(source: str) -> dict[str, Parameter]:
    comments = {
        token.start[0]: token.string.lstrip("# ").rstrip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    parameters = {}
    for node in ast.parse(source).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None):
            raise ParameterError(
                f"line {node.lineno} of the parameters cell must read `name: type = value  # help`, got "
                f"{ast.unparse(node)!r}"
            )
        name, type_name = node.target.id, ast.unparse(node.annotation).removesuffix(" | None")
        if type_name not in _SCALARS and type_name not in {f"list[{t}]" for t in _SCALARS}:
            raise ParameterError(f"parameter {name} has type {type_name}; only {', '.join(_SCALARS)} and lists of them")
        parameter = Parameter(name, type_name, ast.literal_eval(node.value), *_parse_help(comments, node))
        parameter.check(parameter.default)
        parameters[name] = parameter
    return parameters


def _parse_help(comments: dict[int, str], node: ast.stmt) -> tuple[str, float, float, tuple[str, ...]]:
    text = comments.get(node.end_lineno or node.lineno, "")
    bracket = re.search(r"\[([^\[\]]+)\]\s*$", text)
    if bracket and ".." in bracket[1]:
        low, high = (float(part) for part in bracket[1].split(".."))
        return text, low, high, ()
    if bracket and "|" in bracket[1]:
        return text, -math.inf, math.inf, tuple(part.strip() for part in bracket[1].split("|"))
    return text, -math.inf, math.inf, ()


def _parse_presets(source: str) -> dict[str, dict[str, Any]]:
    if not source.strip():
        return {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "presets":
            try:
                presets = ast.literal_eval(node.value)
            except ValueError:
                raise ParameterError("`presets` must be a literal dictionary, so that it can be read unrun") from None
            for preset in presets:
                if preset not in ORDER:
                    raise ParameterError(_unknown("preset", preset, ORDER))
            return presets
    raise ParameterError("the cell tagged `presets` must assign `presets = {...}`")


def _unknown(kind: str, name: str, valid: Any) -> str:
    near = difflib.get_close_matches(name, list(valid), n=1)
    guess = f": did you mean {near[0]}?" if near else ""
    return f"unknown {kind} {name}{guess or '.'} Valid: {', '.join(valid)}"
