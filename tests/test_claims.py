import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest

from nqflib.claims import judge, main, verify
from nqflib.ledger import Check, Claim, Control, Expected, Rule

AT_MOST_1 = Rule("≤ 1", "r", high=1.0)
AT_MOST_2 = Rule("≤ 2", "r", high=2.0)


def check(quantity="x", rule=AT_MOST_1, looser=None, spread: float | None = 0.125, **more):
    return Check(quantity, rule, looser, spread=None if spread is None else {"laptop": spread}, **more)


def claim(*checks, expected="reproduced", control=None, paper_value=None, identity="a-claim"):
    return Claim(
        id=identity,
        page="nqf/page",
        paper="nqf",
        place="theorem 1",
        words="Something is small.",
        paper_value=paper_value,
        checks=checks,
        expected={"laptop": Expected(expected, "because")},
        control=control,
        history=(),
        where="nqf/page.yml:4",
    )


def verdict(measured, *checks, expected="reproduced", **more):
    return judge(claim(*(checks or (check(),)), expected=expected, **more), {"x": measured}, "laptop").verdict


@pytest.mark.parametrize(
    ("measured", "seen"),
    [
        (0.5, "reproduced"),
        (0.75, "reproduced"),  # exactly two spreads inside
        (0.76, "inconclusive"),
        (1.0, "inconclusive"),
        (1.24, "inconclusive"),
        (1.25, "contradicted"),  # exactly two spreads outside
        ("diverged at step 37", "contradicted"),
        ([0.5, 0.9], "inconclusive"),  # the worst item decides
        ([0.5, 0.6], "reproduced"),
    ],
)
def test_a_value_within_two_spreads_of_the_bound_is_inconclusive(measured, seen):
    assert verdict(measured) == seen


def test_an_exact_value_on_the_bound_is_inside():
    assert verdict(1.0, check(spread=0.0)) == "reproduced"
    assert verdict(np.nextafter(1.0, 2.0), check(spread=0.0)) == "contradicted"


def test_a_failed_rule_is_called_as_the_entry_explains_it():
    assert verdict(3.0, expected="not at this scale") == "not at this scale"
    assert verdict(3.0, expected="contradicted") == "contradicted"
    assert verdict(3.0, expected="partly") == "contradicted"


def test_partly_needs_room_on_both_sides():
    loose = check(looser=AT_MOST_2)
    seen = {x: verdict(x, loose) for x in (0.7, 1.1, 1.3, 1.7, 1.9, 2.1, 2.3)}
    assert seen == {
        0.7: "reproduced",
        1.1: "inconclusive",
        1.3: "partly",
        1.7: "partly",
        1.9: "inconclusive",
        2.1: "inconclusive",
        2.3: "contradicted",
    }


@pytest.mark.parametrize(
    ("x", "y", "seen"),
    [
        (0.5, 0.5, "reproduced"),
        (0.5, 1.5, "partly"),
        (1.5, 1.5, "contradicted"),
        (0.5, 1.0, "inconclusive"),
        (1.5, 1.0, "inconclusive"),
        (1.0, 1.0, "inconclusive"),
    ],
)
def test_parts_of_which_some_hold_and_some_fail_make_partly(x, y, seen):
    parts = (check("x", words="x"), check("y", words="y"))
    assert judge(claim(*parts), {"x": x, "y": y}, "laptop").verdict == seen


def test_truth_and_words_are_compared_without_a_spread():
    assert verdict(True, check(rule=Rule("holds", "r", value=True), spread=None)) == "reproduced"
    assert verdict(False, check(rule=Rule("holds", "r", value=True), spread=None)) == "contradicted"
    assert verdict(17, check(rule=Rule("= 17", "r", value=17), spread=None)) == "reproduced"


def test_without_a_value_a_claim_is_open():
    assert judge(claim(check()), None, "laptop").verdict == "open"
    assert judge(claim(check()), None, "laptop").missing == ()
    unrecorded = judge(claim(check()), {}, "laptop")
    assert (unrecorded.verdict, unrecorded.missing, unrecorded.agrees) == ("open", ("x",), False)
    assert judge(claim(expected="open"), {"x": 1.0}, "laptop").verdict == "open"


def test_without_a_spread_nothing_is_decided():
    seen = judge(claim(check(spread=None), expected="open"), {"x": 0.0}, "laptop")
    assert (seen.verdict, seen.message) == ("inconclusive", "no spread over seeds is stored yet")
    assert not seen.agrees  # it was measured, and the ledger does not know


def test_a_preset_without_expectation_gets_no_verdict_and_no_complaint():
    seen = judge(claim(check()), {"x": 5.0}, "smoke")
    assert (seen.verdict, seen.agrees, seen.expected) == ("inconclusive", True, "")


def test_an_outcome_without_a_number_is_told():
    assert judge(claim(check()), {"x": "diverged at step 37"}, "laptop").message == "ended without a number"


def test_the_difference_from_the_paper_is_shown_where_both_are_numbers():
    def difference(paper_value, measured):
        return judge(claim(check(), paper_value=paper_value), {"x": measured}, "laptop").differences

    assert difference(1.25, 1.5) == (0.25,)
    assert difference("no number", 1.5) == (None,)
    assert difference(1.25, "diverged") == (None,)
    parts = (check("x", paper_value=1.0), check("y", paper_value=2.0), check("z"))
    assert judge(claim(*parts), {"x": 1.5, "y": 1.5, "z": 9.0}, "laptop").differences == (0.5, -0.5, None)


def controlled(spread=0.0):
    return Control("What no effect would score.", check("null", Rule("≥ 5", "r", low=5.0), spread=spread))


def test_a_claim_whose_control_passes_as_well_is_inconclusive():
    item = claim(check(), control=controlled())
    good = judge(item, {"x": 0.5, "null": 6.0}, "laptop")
    assert (good.verdict, good.control_holds, good.control_measured) == ("reproduced", True, 6.0)
    empty = judge(item, {"x": 0.5, "null": 0.5}, "laptop")
    assert (empty.verdict, empty.control_holds, empty.agrees) == ("inconclusive", False, False)
    assert "control" in empty.message
    failed = judge(item, {"x": 3.0, "null": 0.5}, "laptop")
    assert failed.verdict == "contradicted"  # a control cannot save a claim


def test_a_control_is_held_to_two_spreads_too():
    item = claim(check(), control=controlled(spread=1.0))
    assert judge(item, {"x": 0.5, "null": 7.0}, "laptop").verdict == "reproduced"
    near = judge(item, {"x": 0.5, "null": 6.9}, "laptop")
    assert (near.verdict, near.agrees) == ("inconclusive", True)


def test_a_control_without_a_spread_decides_nothing():
    seen = judge(claim(check(), control=controlled(spread=None)), {"x": 0.5, "null": 6.0}, "laptop")
    assert (seen.verdict, seen.message) == ("inconclusive", "no spread is stored yet for its control")


def test_a_control_that_was_not_recorded_is_missing():
    seen = judge(claim(check(), control=controlled()), {"x": 0.5}, "laptop")
    assert (seen.verdict, seen.control_holds, seen.missing) == ("reproduced", None, ("null",))


def agrees(measured, expected, *checks):
    return judge(claim(*(checks or (check(),)), expected=expected), {"x": measured}, "laptop").agrees


@pytest.mark.parametrize(
    ("expected", "inside", "outside"),
    [
        ("reproduced", 0.87, 0.88),  # the verdict turns at 0.75; one spread further is news
        ("contradicted", 1.13, 1.12),
        ("not at this scale", 1.13, 1.12),
        ("inconclusive", 0.63, 0.62),
        ("inconclusive", 1.37, 1.38),
    ],
)
def test_a_verdict_is_news_when_it_is_more_than_one_spread_away(expected, inside, outside):
    assert agrees(inside, expected)
    assert not agrees(outside, expected)


def test_a_claim_that_starts_to_reproduce_is_news():
    assert not agrees(0.5, "contradicted")
    assert not agrees(0.5, "not at this scale")
    assert not agrees(0.5, "open")


def test_agreement_is_brute_force_over_values_within_one_spread():
    loose = check(looser=Rule("≤ 1.45", "r", high=1.45), spread=0.1)
    edges = (0.7, 0.9, 1.1, 1.15, 1.35, 1.55, 1.75)  # where agreement may turn; rounding decides on them
    for expected in ("reproduced", "inconclusive", "partly", "contradicted"):
        item = claim(loose, expected=expected)
        for measured in [x for x in np.linspace(0.5, 2.0, 21) if min(abs(x - edge) for edge in edges) > 0.02]:
            around = measured + 0.1 * np.linspace(-1, 1, 41)
            nearby = {judge(item, {"x": float(x)}, "laptop").verdict for x in around}
            assert judge(item, {"x": float(measured)}, "laptop").agrees == (expected in nearby), (measured, expected)


# --- verify, on a tree of its own -----------------------------------------------------------------

ENTRY = """\
  - id: {id}
    paper: nqf
    place: theorem 1
    claim: The {id} is small.
    paper_value: 0
    quantity: {quantity}
    rule: {{kind: at_most, bound: 1, reason: r}}
    spread: {{laptop: 0.1}}
    expected:
      laptop: {{verdict: {verdict}, reason: r}}
"""
CONTROL = "    control: {words: w, quantity: null_x, spread: exact, rule: {kind: at_least, bound: 5, reason: r}}\n"
RUN = {"preset": "laptop", "given": {}}


@pytest.fixture
def tree(tmp_path):
    """A ledger, notebooks as written and notebooks as executed, and the verdict of the command line on them."""

    class Tree:
        def page(self, name="nqf/page", control="", **verdicts):
            path = tmp_path / "claims" / f"{name}.yml"
            path.parent.mkdir(parents=True, exist_ok=True)
            entries = [ENTRY.format(id=key, quantity=key, verdict=value) for key, value in verdicts.items()]
            path.write_text(f"title: A page\norder: 1\nclaims:\n{(control or '').join(entries)}{control}", "utf-8")

        def written(self, name="nqf/page"):
            path = tmp_path / "notebooks" / f"{name}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("# A page")

        def executed(self, name="nqf/page", run=RUN, **quantities):
            self.written(name)
            path = tmp_path / "book" / f"{name}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            prefix = "application/papermill.record/"
            outputs = [
                nbformat.v4.new_output(
                    "display_data",
                    data={prefix + "text/plain": repr(value)},
                    metadata={"scrapbook": {"name": key, "mime_prefix": prefix}, "nqf": {"quantity": True}},
                )
                for key, value in quantities.items()
            ]
            cells = [nbformat.v4.new_code_cell("...", outputs=outputs)]
            nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"nqf": {"run": run}}), path)

        def verify(self):
            return verify(tmp_path / "book", tmp_path / "notebooks", folder=tmp_path / "claims")

        def main(self, *more):
            where = {"--notebooks": "book", "--sources": "notebooks", "--claims": "claims"}
            return main(["verify", *(str(w) for k, v in where.items() for w in (k, tmp_path / v)), *more])

    return Tree()


def test_a_true_ledger_exits_0_and_names_what_has_no_control(tree, capsys):
    tree.page(x="reproduced", y="contradicted")
    tree.executed(x=0.5, y=2.0)
    assert tree.main() == 0
    printed = capsys.readouterr().out
    assert "1 reproduced, 1 contradicted" in printed
    assert "1 reproduced without a control: x" in printed
    assert "nqf/page x" in printed
    assert "0.5" in printed


def test_a_page_that_is_not_written_yet_is_open_and_no_problem(tree):
    tree.page(x="open")
    assert tree.main() == 0
    (judgement,) = tree.verify().judgements
    assert judgement.verdict == "open"


@pytest.mark.parametrize(("x", "y"), [(1.5, 2.0), (0.5, 0.5)], ids=["stops reproducing", "starts to reproduce"])
def test_a_crossed_verdict_exits_1_whichever_way(tree, capsys, x, y):
    tree.page(x="reproduced", y="contradicted")
    tree.executed(x=x, y=y)
    assert tree.main() == 1
    assert "PROBLEM nqf/page.yml" in capsys.readouterr().out
    assert len(tree.verify().problems) == 1


def test_a_change_within_the_spread_exits_0(tree):
    tree.page(x="reproduced", y="contradicted")
    tree.executed(x=0.85, y=1.15)
    assert [item.verdict for item in tree.verify().judgements] == ["inconclusive", "inconclusive"]
    assert tree.main() == 0


def test_an_executed_page_that_lacks_a_quantity_is_a_problem(tree):
    tree.page(x="reproduced", y="open")
    tree.executed(z=0.5)
    assert tree.verify().problems == ("nqf/page.yml:4 x: the run did not record x",)
    assert tree.main() == 1


def test_an_executed_page_that_lacks_a_control_is_a_problem(tree):
    tree.page(x="reproduced", control=CONTROL)
    tree.executed(x=0.5)
    assert tree.verify().problems == ("nqf/page.yml:4 x: the run did not record null_x",)
    tree.executed(x=0.5, null_x=6.0)
    assert tree.verify().problems == ()
    assert tree.verify().uncontrolled == ()
    tree.executed(x=0.5, null_x=0.5)
    assert "its control separates nothing" in tree.verify().problems[0]


def test_a_written_page_that_was_not_run_is_a_problem(tree):
    tree.page(x="open")
    tree.written()
    assert tree.verify().problems == ("nqf/page is written but was not run: python -m nqflib.runner page nqf/page",)
    assert tree.main() == 1


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ({"preset": "smoke", "given": {"preset": "smoke"}}, "was run at preset smoke, not laptop"),
        ({}, "was run at preset unknown, not laptop"),
        ({"preset": "laptop", "given": {"eps": 0.1}}, "was run with {'eps': 0.1}"),
    ],
)
def test_a_run_that_is_not_the_published_one_is_a_problem(tree, run, text):
    tree.page(x="reproduced")
    tree.executed(run=run, x=0.5)
    assert text in tree.verify().problems[0]
    assert tree.main() == 1


def test_a_broken_notebook_is_a_problem_and_a_broken_ledger_exits_2(tree, tmp_path, capsys):
    tree.page(x="reproduced")
    tree.executed(x=0.5)
    (tmp_path / "book" / "nqf" / "page.ipynb").write_text("half a notebo")
    assert tree.main() == 1
    assert "is not a Jupyter notebook" in tree.verify().problems[0]
    tree.page(x="reproduced yesterday")
    assert tree.main() == 2
    assert "nqf/page.yml:4: claim x: expected at laptop: unknown verdict" in capsys.readouterr().err


def test_the_ledger_is_read_without_torch_and_numpy():
    code = "import sys; from nqflib import scoreboard; print({'torch', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert run.stdout.strip() == "set()", run.stderr
