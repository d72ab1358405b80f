from nqflib.sphinx_api import escape, to_rst


def test_markup_is_escaped_outside_of_code_only():
    assert escape("z* and |x| and r_k and a_ b") == r"z\* and \|x\| and r_k and a\_ b"
    assert escape("see `a*b_` and ``c|d``") == "see ``a*b_`` and ``c|d``"
    assert escape("a stray ` tick") == "a stray  tick"


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
