import pkgutil
import re
from inspect import signature
from pathlib import Path

from sphinx.util.inspect import stringify_signature

import nqflib
from nqflib import lotka_volterra
from nqflib.sphinx_api import escape, name_types, to_rst


def test_markup_is_escaped_outside_of_code_only():
    assert escape("z* and |x| and r_k and a_ b") == r"z\* and \|x\| and r_k and a\_ b"
    assert escape("see `a*b_` and ``c|d``") == "see ``a*b_`` and ``c|d``"
    assert escape("a stray ` tick") == "a stray  tick"
    assert escape("N(0, `scale`^2), `x`.") == r"N(0, ``scale``\ ^2), ``x``."


def test_an_indented_formula_becomes_a_literal_block_and_sections_stay():
    lines = ["Compute r.", "", "    r = (8/m) * y", "    C = |A|", "", "Args:", "    y: (m,), the *targets*.", ""]
    assert to_rst(lines) == [
        "Compute r.",
        "",
        "::",
        "",
        "    r = (8/m) * y",
        "    C = |A|",
        "",
        "Args:",
        r"    y: (m,), the \*targets\*.",
        "",
    ]


def test_types_of_numpy_stand_by_their_names_in_signatures():
    given = str(
        stringify_signature(signature(lotka_volterra.half_saturation_times, eval_str=True), unqualified_typehints=True)
    )
    assert "_NestedSequence" in given
    named = name_types(given)
    assert named.startswith("(rates: ArrayLike, competition: ArrayLike, abundance: ArrayLike, *, exact: bool = False")
    assert named.endswith(" -> Array")


def test_every_public_module_stands_on_exactly_one_page_and_in_the_index():
    root = Path(__file__).parents[1]
    modules = {m.name for m in pkgutil.walk_packages(nqflib.__path__, "nqflib.") if "__main__" not in m.name}
    documented = [
        name
        for page in (root / "book").glob("api_*.md")
        for name in re.findall(r"automodule:: (\S+)", page.read_text("utf-8"))
    ]
    listed = re.findall(r"^   (nqflib\.\S+)$", (root / "book" / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(documented) == sorted(modules)
    assert sorted(listed) == sorted(modules)
