"""The ledger as the reader meets it: the box of claims on a page, and the scoreboard of all of them.

Both functions return MyST Markdown, which `nqflib.sphinx_ext` parses in place. Every claim has the target
`claim-ID` in the box of its page and `score-ID` on the scoreboard, and each links to the other. Verdicts stand in
`<span class="claim-verdict" data-verdict="..." data-paper="...">`, rows of one page in a container `claim-group`:
`book/_static/scoreboard.js` filters by them, and without it the whole list shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from nqflib.claims import Claim, Judgement, Page, judge, load_pages, number
from nqflib.ledger import PAPERS, VERDICTS
from nqflib.quantities import read_run
from nqflib.reference import Reference, reference

#: A sign beside the word, for readers who cannot tell the colours apart.
SIGNS = {
    "reproduced": "✓",
    "partly": "◐",
    "not at this scale": "↓",
    "contradicted": "✗",
    "inconclusive": "?",
    "open": "○",
}

PAPER_NAMES = {"nqf": "Neural Quadratic Forms", "quadratic": "A Defense of the Quadratic Model", "ours": "Our own"}


def render_box(page: str, book_dir: Path, folder: Path | None = None, reference_folder: Path | None = None) -> str:
    """The claims of one page with what its run measured, as MyST Markdown.

    Args:
        page: `part/name`, for example "nqf/fig3_features".
        book_dir: the book's source folder; the executed page is book_dir/notebooks/PAGE.ipynb.
        folder: the ledger, that of this checkout by default.
        reference_folder: of kept larger runs, whose values stand beside those of the page; that of this checkout by
            default.

    Raises:
        LedgerError: the ledger is malformed.
        ValueError: the ledger has no claims of this page, or the executed page or the kept run cannot be read.
    """
    pages = {item.name: item for item in load_pages(folder)}
    if page not in pages:
        raise ValueError(f"the ledger has no claims of page {page!r}. Pages: {', '.join(pages)}")
    larger = reference(page, reference_folder)
    blocks = [_claim_block(item, larger) for item in _judgements(pages[page], book_dir)]
    if larger:
        blocks.append(f"Values at preset {larger.run['preset']} come from one kept run: {larger.origin}.")
    return _container("claim-box", "\n\n".join(blocks), fence=5)


def render_scoreboard(book_dir: Path, folder: Path | None = None) -> str:
    """All claims by paper and page, the paper's value beside ours, with counts per verdict, as MyST Markdown.

    Arguments and errors as for `render_box`.
    """
    pages = load_pages(folder)
    judged = {page.name: _judgements(page, book_dir) for page in pages}
    everything = [item for items in judged.values() for item in items]
    parts = [_counts(everything)]
    for paper in PAPERS:
        # Raw HTML: text that a directive parses in place cannot hold Markdown headings.
        parts.append(f'<h2 class="claim-paper">{PAPER_NAMES[paper]}</h2>')
        for page in pages:
            rows = [item for item in judged[page.name] if item.claim.paper == paper]
            if rows:
                parts.append(_group(page, rows, book_dir))
    return _container("claim-scoreboard", "\n\n".join(parts), fence=6)


def count_verdicts(page: str, book_dir: Path, folder: Path | None = None) -> dict[str, int]:
    """How many claims of a page have each verdict, in the order of `VERDICTS`; empty if the ledger has none of it.

    Arguments as for `render_box`.

    Raises:
        LedgerError: the ledger is malformed.
        ValueError: the executed page cannot be read.
    """
    found = [judgement for item in load_pages(folder) if item.name == page for judgement in _judgements(item, book_dir)]
    counts = Counter(judgement.verdict for judgement in found)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def _judgements(page: Page, book_dir: Path) -> list[Judgement]:
    notebook = _executed(page.name, book_dir)
    if not notebook.exists():
        return [judge(claim, None, "laptop") for claim in page.claims]
    run = read_run(notebook)
    # A reader's own parameters are no preset, so they get numbers and no verdict.
    changes = "".join(f", {name}={value}" for name, value in run.changed.items())
    return [judge(claim, run.quantities, run.preset + changes) for claim in page.claims]


def _executed(page: str, book_dir: Path) -> Path:
    return Path(book_dir) / "notebooks" / f"{page}.ipynb"


def _container(name: str, content: str, fence: int) -> str:
    return f"{'`' * fence}{{container}} {name}\n\n{content}\n\n{'`' * fence}"


def badge(judgement: Judgement) -> str:
    """The verdict as a span that styles and scripts can find, readable without either."""
    verdict = judgement.verdict
    return (
        f'<span class="claim-verdict" data-verdict="{verdict}" data-paper="{judgement.claim.paper}">'
        f"{SIGNS[verdict]} {verdict}</span>"
    )


def _claim_block(item: Judgement, larger: Reference | None) -> str:
    """Three lines that everybody reads, and the reasons folded behind them."""
    claim = item.claim
    link = f"{{ref}}`scoreboard <score-{claim.id}>`"
    facts = " · ".join(text for text in [*_facts(item), *_larger(item.claim, larger)] if text)
    lines = [f"(claim-{claim.id})=", f"{badge(item)} {claim.words} *{claim.place}*", "", f"{facts} · {link}", ""]
    why = "\n".join(f"- {text}" for text in _reasons(item))
    # Raw HTML, since folding is an extension's directive in every other notation; blank lines end the raw blocks.
    lines += ["<details><summary>Why this rule and this verdict</summary>", "", why, "", "</details>"]
    return _container("claim", "\n".join(lines), fence=4)


def _facts(item: Judgement) -> Iterable[str]:
    claim = item.claim
    if claim.paper_value is not None:
        yield f"The paper: {number(claim.paper_value)}"
    columns = (claim.checks, item.measured, item.spreads, item.differences)
    for check, value, spread, difference in zip(*columns, strict=True):
        paper = f" (the paper: {number(check.paper_value)})" if check.paper_value is not None else ""
        around = f" ± {number(spread)} over seeds" if spread else ""
        shown = "not yet measured" if value is None else _text(value) + around + _signed(difference)
        yield f"{check.words or 'here'}{paper}: {shown}, asked {check.rule.text}"
    control = claim.control
    if control is None:
        yield "no control"
    elif control.check is None:
        yield f"control: {{ref}}`{control.claim} <score-{control.claim}>`"
    elif item.control_measured is None:
        yield f"control: not yet measured, asked {control.check.rule.text}"
    else:
        holds = {True: "holds", False: "fails", None: "not judged"}[item.control_holds]
        yield f"control: {_text(item.control_measured)}, asked {control.check.rule.text}, {holds}"
    yield item.message


def _larger(claim: Claim, larger: Reference | None) -> Iterable[str]:
    """What the kept larger run measured, in the order of the claim's checks."""
    values = [larger.quantities.get(check.quantity) for check in claim.checks] if larger else []
    texts = [_text(value) for value in values if value is not None]
    if larger and texts:
        yield f"at preset {larger.run['preset']}: {', '.join(texts)}"


def _reasons(item: Judgement) -> Iterable[str]:
    claim = item.claim
    for check in claim.checks:
        yield f"The rule{' for ' + check.words if check.words else ''}, {check.rule.text}: {check.rule.reason}"
        if check.looser:
            yield f"Partly, {check.looser.text}: {check.looser.reason}"
    if claim.control:
        asked = f" {claim.control.check.rule.reason}" if claim.control.check else ""
        yield f"The control: {claim.control.words}{asked}"
    if item.reason:
        yield f"Expected {item.expected}: {item.reason}"
    for old in claim.history:
        yield f"An earlier rule ({old['rule']['kind']}) was replaced: {old['reason']}"


def _signed(difference: float | None) -> str:
    return "" if difference is None else f" ({difference:+.3g})"


def _text(value: object) -> str:
    """Named outcomes go in code, since they are not ours to parse."""
    return "`" + value.replace("`", "'") + "`" if isinstance(value, str) else number(value)


def _counts(judgements: list[Judgement]) -> str:
    counts = Counter((item.claim.paper, item.verdict) for item in judgements)
    rows = [["Verdict", *PAPER_NAMES.values(), "All"]]
    for verdict in VERDICTS:
        numbers = [counts[paper, verdict] for paper in PAPERS]
        rows.append([f"{SIGNS[verdict]} {verdict}", *map(str, numbers), str(sum(numbers))])
    return _list_table(rows, "claim-counts", "28 22 22 14 14")


def _group(page: Page, rows: list[Judgement], book_dir: Path) -> str:
    executed = _executed(page.name, book_dir).exists()
    title = f"{{doc}}`{page.title} </notebooks/{page.name}>`" if executed else f"{page.title} (not yet written)"
    table = [["Claim", "The paper", "Here (difference)", "Asked", "Verdict"]]
    table += [_row(item, executed) for item in rows]
    return _container("claim-group", f"{title}\n\n{_list_table(table, 'claim-table', '42 20 14 12 12')}", fence=5)


def _row(item: Judgement, executed: bool) -> list[str]:
    claim = item.claim
    link = f"{{ref}}`{claim.id} <claim-{claim.id}>`" if executed else f"`{claim.id}`"
    return [
        f"(score-{claim.id})=\n{link}: {claim.words} *{claim.place}*",
        _paper_values(claim),
        _lines(_text(v) + _signed(d) for v, d in zip(item.measured, item.differences, strict=True) if v is not None),
        _lines(check.rule.text for check in claim.checks),
        f"{badge(item)}" + (f"\n\n{item.message}" if item.message and item.measured else ""),
    ]


def _paper_values(claim: Claim) -> str:
    if claim.paper_value is not None:
        return number(claim.paper_value)
    return _lines(number(check.paper_value) for check in claim.checks if check.paper_value is not None)


def _lines(texts: Iterable[str]) -> str:
    return " <br>".join(texts) or "–"


def _list_table(rows: list[list[str]], name: str, widths: str) -> str:
    """A table whose first row is the header; cells may hold several blocks."""
    lines = ["````{list-table}", ":header-rows: 1", f":class: {name}", f":widths: {widths}", ""]
    for row in rows:
        for i, cell in enumerate(row):
            first, *rest = cell.split("\n")
            lines.append(f"{'* - ' if i == 0 else '  - '}{first}")
            lines += [f"    {line}" if line else "" for line in rest]
    return "\n".join([*lines, "````"])
