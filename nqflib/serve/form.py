"""What a page lets the reader change, as plain data: the same declaration that `papermill --help-notebook` shows.

    {"page": "nqf/fig3_features", "published": {"preset": "smoke"},
     "parameters": [{"name": "eps", "type": "float", "help": "abundance of every mode at t = 0", "default": None,
                     "low": 1e-30, "high": 1e-2, "bounds": "from 1e-30 to 0.01", "choices": []}, ...],
     "presets": {"smoke": {"eps": 1e-5}, ...}}

`presets` gives the values of the parameters whose default is None. The book embeds a form into its page, so that a
static page shows it too; the server sends the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nqflib.presets import ORDER, Declaration, declaration, preset_values


def form(page: str, declared: Declaration, published: Mapping[str, Any]) -> dict[str, Any]:
    """The form of a page.

    Args:
        page: `part/name`.
        declared: the page's parameters and presets.
        published: the parameters that the published run was given.
    """
    parameters = [
        {
            "name": parameter.name,
            "type": parameter.type,
            "help": re.sub(r"\s*\[[^\[\]]+\]\s*$", "", parameter.help),
            "default": parameter.default,
            "low": parameter.low if math.isfinite(parameter.low) else None,
            "high": parameter.high if math.isfinite(parameter.high) else None,
            "bounds": parameter.bounds,
            "choices": list(parameter.choices),
        }
        for parameter in declared.parameters.values()
    ]
    presets = {preset: preset_values(declared.presets, preset) for preset in ORDER} if declared.presets else {}
    return {"page": page, "published": dict(published), "parameters": parameters, "presets": presets}


def literal(value: Any) -> str:
    """A parameter's value as `make figure` takes it: a literal without blanks, or plain text."""
    return value if isinstance(value, str) else repr(value).replace(", ", ",")


def embedded(page: str, cells: Sequence[Mapping[str, Any]], published: Mapping[str, Any]) -> str:
    """The form of a page as HTML that `book/_static/rerun.js` fills; empty if the page declares no parameters.

    Raises:
        ParameterError: the page's parameters cell cannot be read.
    """
    declared = declaration(cells)
    if not declared.parameters:
        return ""
    text = json.dumps(form(page, declared, published), ensure_ascii=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # no tag and no comment begins inside the script
    return f'<div class="nqf-form"><script type="application/json">{text}</script></div>'
