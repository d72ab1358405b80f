import math
from pathlib import Path

import pytest

from nqflib.ledger import LedgerError, Rule, load_claims, load_pages

ENTRY = """\
  - id: a-claim
    paper: nqf
    place: theorem 1
    claim: Something is small.
    paper_value: 0
    quantity: error
    rule: {kind: at_most, bound: 0.02, reason: Ten times the step size.}
    spread: {laptop: 0.001}
    expected:
      laptop: {verdict: reproduced, reason: It is.}
"""


def write(folder, entries=ENTRY, page="nqf/fig3", title="Figure 3"):
    path = folder / f"{page}.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"title: {title}\norder: 30\nclaims:\n{entries}", "utf-8")
    return folder


def rule_of(tmp_path, rule):
    text = ENTRY.replace("{kind: at_most, bound: 0.02, reason: Ten times the step size.}", rule)
    return load_claims(write(tmp_path, text))["a-claim"].checks[0].rule


def test_an_entry_is_read_as_written(tmp_path):
    claim = load_claims(write(tmp_path))["a-claim"]
    assert (claim.page, claim.paper, claim.words, claim.paper_value) == ("nqf/fig3", "nqf", "Something is small.", 0)
    assert claim.where == "nqf/fig3.yml:4"
    (check,) = claim.checks
    assert (check.quantity, check.rule.high, check.spread_at("laptop")) == ("error", 0.02, 0.001)
    assert check.spread_at("paper") is None
    assert claim.expected["laptop"].verdict == "reproduced"


@pytest.mark.parametrize(
    ("rule", "inside", "margin", "outside"),
    [
        ("{kind: at_most, bound: 2, reason: r}", 1.5, 0.5, 2.5),
        ("{kind: at_least, bound: 2, reason: r}", 2.5, 0.5, 1.5),
        ("{kind: between, low: 1, high: 4, reason: r}", 3.5, 0.5, 4.5),
        ("{kind: within, value: 3, tolerance: 1, reason: r}", 2.5, 0.5, 4.5),
        ("{kind: within, value: -4, relative_tolerance: 0.25, reason: r}", -4.5, 0.5, -2.5),
        ("{kind: equals, value: 17, reason: r}", 17, math.inf, 16),
        ("{kind: equals, value: adam, reason: r}", "adam", math.inf, "sgd"),
        ("{kind: is_true, reason: r}", True, math.inf, False),
    ],
)
def test_the_margin_is_the_distance_to_the_nearest_bound(tmp_path, rule, inside, margin, outside):
    found = rule_of(tmp_path, rule)
    assert found.margin(inside) == margin
    assert found.margin(outside) < 0
    assert found.margin([inside, inside]) == margin
    assert found.margin([inside, outside]) == found.margin(outside)


def test_a_bound_itself_is_inside():
    assert Rule("≤ 2", "r", high=2.0).margin(2) == 0


def test_an_outcome_without_a_number_fails_every_rule_that_asks_for_one():
    assert Rule("≤ 2", "r", high=2.0).margin("diverged at step 37") == -math.inf
    assert Rule("≤ 2", "r", high=2.0).margin(True) == -math.inf
    assert Rule("= 1", "r", value=1).margin(True) == -math.inf


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    quantity: error", "    quantty: error", r"unknown key 'quantty'; did you mean quantity\?"),
        (", reason: Ten times the step size.", "", "rule: reason is missing"),
        ("reason: Ten times the step size.", "reason: ' '", "rule: reason is empty"),
        (", reason: It is.", "", "expected at laptop: reason is missing"),
        ("verdict: reproduced", "verdict: reproduces", r"unknown verdict 'reproduces'; did you mean reproduced\?"),
        ("laptop: {verdict", "lap: {verdict", r"unknown preset 'lap'; did you mean laptop\?"),
        ("bound: 0.02", "bound: 1e-3", r"bound must be a number, got '1e-3'; YAML wants a dot"),
        ("bound: 0.02", "bound: .nan", "bound must be a number, got nan"),
        ("bound: 0.02", "bound: true", "bound must be a number, got True"),
        ("kind: at_most", "kind: atmost", r"unknown kind 'atmost'; did you mean at_most\?"),
        ("kind: at_most, bound: 0.02", "kind: within, value: 1", "rule: tolerance is missing"),
        ("kind: at_most, bound: 0.02", "kind: within, value: 1, tolerance: 0", "tolerance must be positive"),
        ("kind: at_most, bound: 0.02", "kind: between, low: 2, high: 1", "low must be below high"),
        ("kind: at_most, bound: 0.02", "kind: equals, value: 0.5", "use within"),
        ("    paper: nqf", "    paper: third", "unknown paper 'third'"),
        ("    paper_value: 0\n", "", "paper_value is missing"),
        ("    spread: {laptop: 0.001}\n", "", "spread at laptop is missing; write the range over three seeds"),
        ("spread: {laptop: 0.001}", "spread: {laptop: -1}", "laptop must not be negative"),
        ("spread: {laptop: 0.001}", "spread: 0.001", "spread is `exact` or a number for each preset"),
        ("id: a-claim", "id: A claim", "ids are small letters, digits and single hyphens, got 'A claim'"),
        ("verdict: reproduced", "verdict: partly", "partly needs a looser_rule or parts"),
        ("    quantity: error", "    quantity: error\n    quantity: other", "'quantity' stands twice"),
        ("    claim: Something is small.", "    claim: [", "not YAML"),
        ("    claim: Something is small.", "    claim: 3", "claim must be text, got 3"),
        ("    spread", "    looser_rule: {kind: at_most, bound: 0.01, reason: r}\n    spread", "must hold wherever"),
        ("    spread", "    control: {words: w}\n    spread", "control: quantity is missing"),
        ("    spread", "    control: {words: w, claim: nothing}\n    spread", "its control nothing is no entry"),
        ("    spread", "    history: [{reason: r}]\n    spread", "history: rule is missing"),
        ("    quantity: error\n", "    parts: []\n    quantity: error\n", "belong into the parts"),
    ],
)
def test_a_mistake_is_refused_with_file_entry_and_what_would_be_valid(tmp_path, old, new, message):
    assert old in ENTRY
    with pytest.raises(LedgerError, match=message) as caught:
        load_pages(write(tmp_path, ENTRY.replace(old, new)))
    assert str(caught.value).startswith("nqf/fig3.yml")
    if "YAML" not in message and "twice" not in message and "ids are" not in message:
        assert "nqf/fig3.yml:4: claim a-claim" in str(caught.value)


def test_an_unmeasured_claim_may_only_be_open(tmp_path):
    bare = ENTRY.split("    quantity")[0] + "    expected:\n      laptop: {verdict: open, reason: Not yet.}\n"
    assert load_claims(write(tmp_path, bare))["a-claim"].checks == ()
    with pytest.raises(LedgerError, match="the only verdict is open"):
        load_claims(write(tmp_path, bare.replace("verdict: open", "verdict: reproduced")))


def test_a_claim_has_one_home(tmp_path):
    write(tmp_path)
    with pytest.raises(LedgerError, match=r"nqf/fig4\.yml:4: claim a-claim: the id .* stands at nqf/fig3\.yml:4"):
        load_pages(write(tmp_path, page="nqf/fig4"))
    with pytest.raises(LedgerError, match=r"claim b-claim: this claim already stands at nqf/fig3\.yml:4"):
        load_pages(write(tmp_path, ENTRY.replace("a-claim", "b-claim"), page="nqf/fig4"))


def test_pages_come_in_the_order_of_the_book(tmp_path):
    for page, order in (("quadratic/a", 1), ("nqf/z", 1), ("nqf/b", 2), ("beyond/c", 0)):
        name = page.replace("/", "-")
        text = ENTRY.replace("a-claim", name).replace("Something", name)
        write(tmp_path, text, page)
        path = tmp_path / f"{page}.yml"
        path.write_text(path.read_text("utf-8").replace("order: 30", f"order: {order}"), "utf-8")
    assert [page.name for page in load_pages(tmp_path)] == ["nqf/z", "nqf/b", "quadratic/a", "beyond/c"]


def test_a_file_outside_the_parts_of_the_book_is_refused(tmp_path):
    with pytest.raises(LedgerError, match=r"other/fig3\.yml: files lie in nqf"):
        load_pages(write(tmp_path, page="other/fig3"))


def test_yaml_that_would_build_objects_is_refused(tmp_path):
    with pytest.raises(LedgerError, match="not YAML"):
        load_pages(write(tmp_path, ENTRY.replace("Something is small.", "!!python/object/apply:os.getcwd []")))


def test_the_shipped_ledger_covers_both_papers():
    pages = load_pages()
    claims = load_claims()
    assert len(claims) >= 60
    assert len(claims) == sum(len(page.claims) for page in pages)
    papers = [claim.paper for claim in claims.values()]
    assert papers.count("nqf") >= 40
    assert papers.count("quadratic") >= 30
    for claim in claims.values():
        assert "laptop" in claim.expected, claim.where
        assert len(claim.page.split("/")) == 2


def test_every_notebook_about_a_paper_has_its_claims_at_the_same_place():
    root = Path(__file__).parents[1]
    paths = [*root.glob("notebooks/nqf/*.md"), *root.glob("notebooks/quadratic/*.md")]
    written = {path.relative_to(root / "notebooks").with_suffix("").as_posix() for path in paths}
    assert written <= {page.name for page in load_pages()}


def test_rules_that_the_shipped_ledger_expects_to_hold_are_wide_enough_to_be_seen_to_hold():
    """No value lies two spreads inside a rule narrower than four; two spreads outside of it one can lie."""
    for claim in load_claims().values():
        if claim.expected["laptop"].verdict not in ("reproduced", "partly"):
            continue
        for check in claim.checks:
            width = check.rule.high - check.rule.low
            assert width >= 4 * max((check.spread or {}).values(), default=0.0), claim.where
