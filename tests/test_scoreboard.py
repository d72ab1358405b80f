"""The text of boxes and scoreboard is judged by what Sphinx makes of it, warnings being errors."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from nqflib.ledger import load_claims, load_pages
from nqflib.scoreboard import count_verdicts, render_box, render_scoreboard

ROOT = Path(__file__).parents[1]
CONF = """\
import sys
from pathlib import Path
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from nqflib.scoreboard import render_box, render_scoreboard

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
exclude_patterns = ["**.ipynb", "claims"]
html_theme = "basic"
html_copy_source = False
here = Path(__file__).parent
ledger = here / "claims"


class Box(Directive):
    optional_arguments = 1

    def text(self):
        return render_box(self.arguments[0], here, ledger)

    def run(self):
        holder = nodes.Element()
        self.state.nested_parse(StringList(self.text().splitlines(), source="ledger"), 0, holder)
        return list(holder.children)


class Board(Box):
    def text(self):
        return render_scoreboard(here, ledger)


def setup(app):
    app.add_directive("box", Box)
    app.add_directive("board", Board)
"""

# One claim for every verdict, with text that Markdown could take for markup.
CLAIMS = """\
title: "Figure 3: *steps* & more"
order: 30
claims:
  - {id: good, paper: nqf, place: "theorem 1; eq. 3", claim: "a * b and $t_k^* = \\\\ln(1/\\\\epsilon)$ are small.",
     paper_value: 1.25, quantity: good,
     rule: {kind: within, value: 1.25, relative_tolerance: 0.1, reason: "*x_k* < 3 | y."},
     spread: {laptop: 0.01}, expected: {laptop: {verdict: reproduced, reason: It is.}},
     control: {words: No effect., quantity: null_good, rule: {kind: at_least, bound: 3, reason: So., }, spread: exact},
     history: [{rule: {kind: at_most, bound: 9, reason: r}, reason: Nine was too much.}]}
  - {id: some, paper: nqf, place: table 1, claim: Two things hold., paper_value: both,
     parts: [{words: first, quantity: one, rule: {kind: at_most, bound: 1, reason: r}, spread: exact, paper_value: 0.5},
             {words: second, quantity: two, rule: {kind: at_most, bound: 1, reason: r}, spread: exact}],
     expected: {laptop: {verdict: partly, reason: One does.}}, control: {words: Another., claim: small}}
  - {id: small, paper: quadratic, place: "Figure 12 *", claim: It is large., paper_value: "`large`",
     quantity: outcome, rule: {kind: at_least, bound: 1, reason: r}, spread: exact,
     expected: {laptop: {verdict: not at this scale, reason: It diverges.}}}
  - {id: wrong, paper: nqf, place: section 6, claim: It is zero., paper_value: 0, quantity: list,
     rule: {kind: at_most, bound: 0, reason: r}, spread: exact,
     expected: {laptop: {verdict: contradicted, reason: No.}}}
  - {id: near, paper: ours, place: here, claim: It is near., quantity: near,
     rule: {kind: at_most, bound: 1, reason: r}, spread: {laptop: 0.1},
     expected: {laptop: {verdict: inconclusive, reason: Near.}}}
  - {id: later, paper: ours, place: here, claim: Later., expected: {laptop: {verdict: open, reason: Not yet.}}}
"""
OTHER = """\
title: Another page
order: 10
claims:
  - {id: other, paper: quadratic, place: here, claim: Something else., paper_value: 1, quantity: q,
     rule: {kind: at_most, bound: 1, reason: r}, expected: {laptop: {verdict: open, reason: Not yet.}}}
"""
QUANTITIES = {
    "good": 1.3,
    "null_good": 4.0,
    "one": 0.75,
    "two": 2.0,
    "outcome": "diverged *at* `step` 37",
    "list": [0.5, 0.25],
    "near": 1.05,
}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def execute(path, quantities, **given):
    prefix = "application/papermill.record/"
    outputs = [
        nbformat.v4.new_output(
            "display_data",
            data={prefix + "text/plain": repr(value)},
            metadata={"scrapbook": {"name": key, "mime_prefix": prefix}, "nqf": {"quantity": True}},
        )
        for key, value in quantities.items()
    ]
    run = {"nqf": {"run": {"preset": "laptop", "given": given}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("...", outputs=outputs)], metadata=run), path
    )


def build(book, pages):
    """Build a small book with a box on each page and the scoreboard; every warning fails."""
    write(book / "conf.py", CONF)
    names = "\n".join(["scoreboard", *(f"notebooks/{page}" for page in pages)])
    write(book / "index.md", f"# Home\n\n```{{toctree}}\n{names}\n```\n")
    write(book / "scoreboard.md", "# Scoreboard\n\n```{board}\n```\n")
    for page in pages:
        write(book / "notebooks" / f"{page}.md", f"# A page\n\n```{{box}} {page}\n```\n")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", book, book / "_html"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return book / "_html"


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    book = tmp_path_factory.mktemp("book")
    write(book / "claims" / "nqf" / "fig3.yml", CLAIMS)
    write(book / "claims" / "quadratic" / "other.yml", OTHER)
    execute(book / "notebooks" / "nqf" / "fig3.ipynb", QUANTITIES)
    return build(book, ["nqf/fig3"])


class Elements(HTMLParser):
    """Ids, links and verdict badges of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.badges = set(), set(), []
        self.text = path.read_text("utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids |= {attributes["id"]} if "id" in attributes else set()
        self.links |= {attributes["href"]} if tag == "a" and "href" in attributes else set()
        if attributes.get("class") == "claim-verdict":
            self.badges.append((attributes["data-paper"], attributes["data-verdict"]))

    def words(self):
        return " ".join(re.sub(r"<[^>]+>", " ", self.text).split())


VERDICTS = [
    ("nqf", "reproduced"),
    ("nqf", "partly"),
    ("quadratic", "not at this scale"),
    ("nqf", "contradicted"),
    ("ours", "inconclusive"),
    ("ours", "open"),
]


def test_the_box_gives_every_claim_a_target_a_verdict_and_a_way_to_the_scoreboard(html):
    box = Elements(html / "notebooks" / "nqf" / "fig3.html")
    assert box.badges == VERDICTS
    for name in ("good", "some", "small", "wrong", "near", "later"):
        assert f"claim-{name}" in box.ids
        assert f"../../scoreboard.html#score-{name}" in box.links


def test_the_box_shows_both_values_the_difference_the_rule_and_the_control(html):
    words = Elements(html / "notebooks" / "nqf" / "fig3.html").words()
    assert "The paper: 1.25 · here: 1.3 ± 0.01 over seeds (+0.05), asked 1.25 ± 10 %" in words
    assert "control: 4, asked ≥ 3, holds" in words
    assert "first (the paper: 0.5): 0.75 (+0.25), asked ≤ 1" in words
    assert "diverged *at* &#39;step&#39; 37" in words or "diverged *at* 'step' 37" in words
    assert "An earlier rule (at_most) was replaced: Nine was too much." in words
    assert "nothing to measure yet" in words


def test_the_scoreboard_links_to_executed_pages_only(html):
    board = Elements(html / "scoreboard.html")
    assert {f"score-{name}" for name in ("good", "some", "small", "wrong", "near", "later", "other")} <= board.ids
    assert "notebooks/nqf/fig3.html#claim-good" in board.links
    assert "notebooks/nqf/fig3.html" in board.links
    assert not any("other" in link for link in board.links)
    assert "Another page (not yet written)" in board.words()


def test_the_scoreboard_groups_by_paper_and_counts_verdicts(html):
    board = Elements(html / "scoreboard.html")
    assert sorted(board.badges) == sorted([*VERDICTS, ("quadratic", "open")])
    assert [paper for paper, _ in board.badges] == ["nqf"] * 3 + ["quadratic"] * 2 + ["ours"] * 2
    words = board.words()
    assert "○ open 0 1 1 2" in words
    assert "✓ reproduced 1 0 0 1" in words
    assert "1.3 (+0.05)" in words


def test_every_box_of_the_shipped_ledger_parses_without_a_warning(tmp_path):
    shutil.copytree(ROOT / "data" / "claims", tmp_path / "claims", ignore=shutil.ignore_patterns("README.md"))
    for page in load_pages():
        execute(tmp_path / "notebooks" / f"{page.name}.ipynb", {})
    output = build(tmp_path, [page.name for page in load_pages()])
    board = Elements(output / "scoreboard.html")
    assert {f"score-{name}" for name in load_claims()} <= board.ids
    assert len(board.badges) == len(load_claims())


def test_a_page_without_claims_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no claims of page 'nqf/none'"):
        render_box("nqf/none", tmp_path)


def test_a_run_with_changed_parameters_gets_numbers_and_no_verdict(tmp_path):
    write(tmp_path / "claims" / "nqf" / "fig3.yml", CLAIMS)
    execute(tmp_path / "notebooks" / "nqf" / "fig3.ipynb", QUANTITIES, eps=0.1)
    box = render_box("nqf/fig3", tmp_path, tmp_path / "claims")
    assert "here: 1.3" in box
    assert "reproduced</span>" not in box
    assert "the ledger expects nothing at preset 'laptop, eps=0.1'" in box


def test_a_kept_larger_run_stands_beside_each_claim_that_it_measured(tmp_path):
    write(tmp_path / "claims" / "nqf" / "fig3.yml", CLAIMS)
    execute(tmp_path / "notebooks" / "nqf" / "fig3.ipynb", QUANTITIES)
    run = {"preset": "evening", "given": {"preset": "evening", "seed": 3}}
    run |= {"date": "2026-01-02T03:04:05+00:00", "commit": "abc", "versions": {"torch": "9.9"}}
    kept = {"run": run, "quantities": {"good": 1.21, "two": 0.5}, "tables": {}}
    write(tmp_path / "reference" / "nqf" / "fig3.json", json.dumps(kept))
    box = render_box("nqf/fig3", tmp_path, tmp_path / "claims", tmp_path / "reference")
    assert box.count("at preset evening: ") == 2
    assert "at preset evening: 1.21" in box
    assert "preset evening · seed=3 · 2026-01-02 · torch 9.9 · commit abc" in box
    assert "evening" not in render_box("nqf/fig3", tmp_path, tmp_path / "claims", tmp_path / "nowhere")
    write(tmp_path / "reference" / "nqf" / "fig3.json", "{}")
    with pytest.raises(ValueError, match=r"fig3\.json is damaged"):
        render_box("nqf/fig3", tmp_path, tmp_path / "claims", tmp_path / "reference")


def test_verdicts_of_a_page_are_counted_in_the_order_of_the_ledger(tmp_path):
    write(tmp_path / "claims" / "nqf" / "fig3.yml", CLAIMS)
    assert count_verdicts("nqf/fig3", tmp_path, tmp_path / "claims") == {"open": 6}
    execute(tmp_path / "notebooks" / "nqf" / "fig3.ipynb", QUANTITIES)
    counts = count_verdicts("nqf/fig3", tmp_path, tmp_path / "claims")
    assert list(counts.items()) == [(verdict, 1) for _, verdict in VERDICTS]
    assert count_verdicts("nqf/other", tmp_path, tmp_path / "claims") == {}


def test_nothing_measured_needs_no_book(tmp_path):
    assert render_scoreboard(tmp_path).count("claim-verdict") == len(load_claims())


@pytest.mark.browser
def test_the_filter_hides_rows_works_by_keyboard_and_never_hides_a_linked_claim(html, page):
    script = (ROOT / "book" / "_static" / "scoreboard.js").read_text("utf-8")
    page_path = html / "scoreboard.html"
    page_path.write_text(page_path.read_text("utf-8").replace("</head>", f"<script>{script}</script></head>"), "utf-8")
    page.goto(page_path.as_uri())
    visible = "tr:visible .claim-verdict"
    assert page.locator(visible).count() == 7
    assert page.locator("output").inner_text() == "7 of 7 claims"
    page.get_by_label("Verdict").focus()
    page.keyboard.press("o")  # choosing by the first letter is the browser's own
    assert page.get_by_label("Verdict").input_value() == "open"
    assert page.locator(visible).count() == 2
    page.get_by_label("Paper").select_option("quadratic")
    assert page.locator(visible).all_inner_texts() == ["○ open"]
    assert page.locator("h2.claim-paper:visible").all_inner_texts() == ["A Defense of the Quadratic Model"]
    assert page.locator(".claim-group:visible").count() == 1
    page.evaluate("location.hash = 'score-good'")
    page.wait_for_function("document.querySelector('output').textContent === '7 of 7 claims'")
    page.goto(page_path.as_uri() + "?verdict=contradicted")
    assert page.locator(visible).count() == 1
    assert page.errors == []
