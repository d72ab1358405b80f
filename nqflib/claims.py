"""The ledger of claims: what the papers say, what was measured here, and whether the two agree.

    record(fig3_half_time_error=0.00205)                      # in a notebook: leave what was measured
    judge(claim, quantities, "laptop").verdict                # "reproduced"
    python -m nqflib.claims verify                            # every claim against every executed notebook

A claim is `reproduced` when its rule holds with room to spare: the measured value lies at least two spreads inside
the bound, the spread being the range over three seeds. Less than two spreads on either side is `inconclusive`.
Outside by two spreads it has failed: `contradicted`, or `not at this scale` where the entry expects that. `partly`
means that a looser rule holds, or some of several parts do. A claim whose control fails its own rule is
`inconclusive` at best, since "no effect" would pass as well. Without a measured value a claim is `open`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nqflib.ledger import (
    VERDICTS,
    Check,
    Claim,
    Control,
    Expected,
    LedgerError,
    Page,
    Rule,
    claims_folder,
    load_claims,
    load_pages,
)
from nqflib.quantities import Quantity, Run, read_quantities, read_run, record

__all__ = [
    "VERDICTS", "Check", "Claim", "Control", "Expected", "Judgement", "LedgerError", "Page", "Rule", "claims_folder",
    "judge", "load_claims", "load_pages", "main", "read_quantities", "read_run", "record", "verify",
]  # fmt: skip

#: Verdicts of a claim whose rule fails. Which of the two is a matter of the reason, so the entry says it.
FAILED = ("not at this scale", "contradicted")


@dataclass(frozen=True)
class Judgement:
    """What one run says about one claim."""

    claim: Claim
    verdict: str
    expected: str  # empty if the ledger expects nothing at this preset
    reason: str  # why that is expected
    agrees: bool  # the expected verdict lies within one spread of the measured value
    measured: tuple[Quantity | None, ...]  # one for each check of the claim
    differences: tuple[float | None, ...]  # measured - the paper's value, where both are numbers
    spreads: tuple[float | None, ...]
    missing: tuple[str, ...]  # quantities that the run did not record, the control's included
    control_measured: Quantity | None
    control_holds: bool | None  # None if the control is no quantity of this page, or was not recorded
    message: str


def judge(claim: Claim, quantities: Mapping[str, Quantity] | None, preset: str) -> Judgement:
    """Hold a claim against what a run recorded.

    Args:
        claim: an entry of the ledger.
        quantities: what the claim's page recorded, by name; None if the page has not been run.
        preset: the preset of that run.
    """
    known = quantities or {}
    expected = claim.expected.get(preset)
    control = _control_check(claim)
    wanted = [*claim.checks, *([control] if control else [])]
    verdict, reachable, messages = _verdict(claim, known, preset)
    measured = tuple(known.get(check.quantity) for check in claim.checks)
    return Judgement(
        claim=claim,
        verdict=verdict,
        expected=expected.verdict if expected else "",
        reason=expected.reason if expected else "",
        agrees=expected is None or expected.verdict in reachable,
        measured=measured,
        differences=tuple(
            _difference(value, check.paper_value if len(measured) > 1 else claim.paper_value)
            for check, value in zip(claim.checks, measured, strict=True)
        ),
        spreads=tuple(check.spread_at(preset) for check in claim.checks),
        missing=tuple(check.quantity for check in wanted if quantities is not None and check.quantity not in known),
        control_measured=known.get(control.quantity) if control else None,
        control_holds=_check_verdict(control, known[control.quantity], preset, "contradicted") == "reproduced"
        if control and control.quantity in known
        else None,
        message="; ".join(messages),
    )


def _control_check(claim: Claim) -> Check | None:
    return claim.control.check if claim.control else None


def _verdict(claim: Claim, known: Mapping[str, Quantity], preset: str) -> tuple[str, set[str], list[str]]:
    """The verdict, every verdict within one spread of the measured values, and what there is to say about it."""
    checks, control = claim.checks, _control_check(claim)
    if not checks:
        return "open", {"open"}, ["nothing to measure yet"]
    if any(check.quantity not in known for check in checks):
        return "open", {"open"}, []
    if preset not in claim.expected:
        return "inconclusive", set(), [f"the ledger expects nothing at preset {preset!r}"]
    expected = claim.expected[preset].verdict
    failed = expected if expected in FAILED else "contradicted"
    verdict = _combine([_check_verdict(check, known[check.quantity], preset, failed) for check in checks], failed)
    each = [_reachable(check, known[check.quantity], preset, failed) for check in checks]
    reachable = {_combine(choice, failed) for choice in itertools.product(*each)}
    ended = any(isinstance(known[check.quantity], str) and check.rule.value is None for check in checks)
    messages = ["ended without a number"] if ended else []
    if any(check.spread_at(preset) is None for check in checks):
        messages.append("no spread over seeds is stored yet")
    if control and control.quantity in known:
        value = known[control.quantity]
        controls = _reachable(control, value, preset, "contradicted")
        reachable = {_with_control(item, outcome) for item in reachable for outcome in controls}
        seen = _with_control(verdict, _check_verdict(control, value, preset, "contradicted"))
        if seen != verdict:
            unknown = control.spread_at(preset) is None
            verdict = seen
            messages += ["no spread is stored yet for its control" if unknown else "its control separates nothing"]
    return verdict, reachable, messages


def _with_control(verdict: str, control: str) -> str:
    """A rule that "no effect" would satisfy too proves nothing."""
    return "inconclusive" if verdict in ("reproduced", "partly") and control != "reproduced" else verdict


def _combine(verdicts: Sequence[str], failed: str) -> str:
    kinds = set(verdicts)
    if len(kinds) == 1:
        return kinds.pop()
    return "partly" if {"reproduced", failed} <= kinds or "partly" in kinds else "inconclusive"


def _check_verdict(check: Check, measured: Quantity, preset: str, failed: str, shift: float = 0.0) -> str:
    spread = check.spread_at(preset)
    if spread is None:
        return "inconclusive"
    margin = check.rule.margin(measured) + shift
    if margin >= 2 * spread:
        return "reproduced"
    if margin > -2 * spread:
        return "inconclusive"
    if check.looser is None:
        return failed
    margin = check.looser.margin(measured) + shift
    if margin >= 2 * spread:
        return "partly"
    return "inconclusive" if margin > -2 * spread else failed


def _reachable(check: Check, measured: Quantity, preset: str, failed: str) -> set[str]:
    """The verdicts that a value within one spread of the measured one would get: another machine's, say."""
    spread = check.spread_at(preset) or 0.0
    # `partly` may hold only on a narrow strip between two bounds, hence more points than the two ends.
    shifts = [spread * step / 8 for step in range(-8, 9)]
    return {_check_verdict(check, measured, preset, failed, shift) for shift in shifts}


def _difference(measured: Any, paper_value: Any) -> float | None:
    both = (measured, paper_value)
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in both):
        return None
    return measured - paper_value


@dataclass(frozen=True)
class Verification:
    """Every claim judged, and what must be put right before the ledger is true again."""

    judgements: tuple[Judgement, ...]
    problems: tuple[str, ...]
    uncontrolled: tuple[str, ...]  # ids of reproduced claims that have no control


def verify(executed: Path, sources: Path, preset: str = "laptop", folder: Path | None = None) -> Verification:
    """Hold the whole ledger against the executed notebooks.

    Args:
        executed: the folder of executed notebooks, PART/NAME.ipynb.
        sources: the folder of notebooks as written, PART/NAME.md. A page that is not there yet is no problem.
        preset: the preset whose expectations count.
        folder: the ledger, that of this checkout by default.

    Raises:
        LedgerError: a file of the ledger is malformed.
    """
    judgements, problems = [], []
    for page in load_pages(folder):
        run, problem = _run_of(page, executed, sources, preset)
        problems.extend([problem] if problem else [])
        for claim in page.claims:
            judgement = judge(claim, run.quantities if run else None, preset)
            judgements.append(judgement)
            if run:
                problems.extend(f"{claim.where} {claim.id}: {text}" for text in _problems(judgement))
    reproduced = [item.claim for item in judgements if item.verdict == "reproduced"]
    return Verification(tuple(judgements), tuple(problems), tuple(c.id for c in reproduced if not c.control))


def _run_of(page: Page, executed: Path, sources: Path, preset: str) -> tuple[Run | None, str]:
    notebook = executed / f"{page.name}.ipynb"
    if not notebook.exists():
        if not (sources / f"{page.name}.md").exists():
            return None, ""
        return None, f"{page.name} is written but was not run: python -m nqflib.runner page {page.name}"
    try:
        run = read_run(notebook)
    except ValueError as error:
        return None, str(error)
    if run.preset != preset:
        return None, f"{page.name} was run at preset {run.preset or 'unknown'}, not {preset}"
    if run.changed:
        return None, f"{page.name} was run with {run.changed}, so it says nothing about preset {preset}"
    return run, ""


def _problems(judgement: Judgement) -> list[str]:
    if judgement.missing and judgement.expected not in ("", "open"):
        return [f"the run did not record {', '.join(judgement.missing)}"]
    if judgement.agrees:
        return []
    shown = ", ".join(number(value) for value in judgement.measured)
    rules = ", ".join(check.rule.text for check in judgement.claim.checks)
    note = f"; {judgement.message}" if judgement.message else ""
    return [f"expected {judgement.expected}, is {judgement.verdict} (measured {shown}; rule {rules}{note})"]


def number(value: Any) -> str:
    """A measured or printed value as text: four digits, lists joined, texts as they are."""
    if isinstance(value, list | tuple):
        return ", ".join(number(item) for item in value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def report(verification: Verification) -> str:
    """The table, the counts and the list of problems that `verify` prints."""
    header = ("claim", "verdict", "expected", "measured", "rule")
    rows: list[tuple[str, ...]] = [header]
    for item in verification.judgements:
        checks = item.claim.checks
        measured = ", ".join(number(value) for value in item.measured)
        rules = ", ".join(check.rule.text for check in checks)
        rows.append((f"{item.claim.page} {item.claim.id}", item.verdict, item.expected, measured, rules))
    widths = [min(max(len(row[i]) for row in rows), 60) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", summary(verification)])


def summary(verification: Verification) -> str:
    """The counts and the list of problems, which `make book` shows."""
    counts = Counter(item.verdict for item in verification.judgements)
    lines = ["claims: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])]
    alone = verification.uncontrolled
    lines.append(f"{len(alone)} reproduced without a control" + (f": {', '.join(alone)}" if alone else ""))
    lines += [f"PROBLEM {problem}" for problem in verification.problems]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line: `verify` exits 0 if the ledger is true, 1 if not, 2 if unreadable; `summary` only tells."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(prog="python -m nqflib.claims", description="The ledger of claims.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text in (("verify", "hold every claim against the executed notebooks"), ("summary", "counts only")):
        sub = commands.add_parser(command, help=text)
        sub.add_argument("--notebooks", type=Path, default=root / "book" / "notebooks", help="executed notebooks")
        sub.add_argument("--sources", type=Path, default=root / "notebooks", help="notebooks as written")
        sub.add_argument("--claims", type=Path, default=None, help="the ledger's folder")
        sub.add_argument("--preset", default="laptop", help="the preset whose expectations count")
    options = parser.parse_args(arguments)
    try:
        verification = verify(options.notebooks, options.sources, options.preset, options.claims)
    except LedgerError as error:
        print(error, file=sys.stderr)
        return 2
    if options.command == "summary":
        print(summary(verification))
        return 0
    print(report(verification))
    return 1 if verification.problems else 0


if __name__ == "__main__":
    sys.exit(main())
