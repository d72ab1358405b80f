"""The ledger's files: one YAML file a page under `data/claims`, read strictly.

Each entry is one claim of the papers, or one of our own, with the recorded quantity that decides it, the rule, and
what is expected at each preset. `data/claims/README.md` shows how to write one. Every mistake in a file ends in a
`LedgerError` that names the file, the line, the entry and what would be valid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nqflib.presets import ORDER as PRESETS
from nqflib.strict_yaml import Block, LedgerError, read

PARTS = ("nqf", "quadratic", "beyond")  # of the book
PAPERS = ("nqf", "quadratic", "ours")
VERDICTS = ("reproduced", "partly", "not at this scale", "contradicted", "inconclusive", "open")

#: The keys that each kind of rule needs beside `kind` and `reason`.
RULES: dict[str, tuple[str, ...]] = {
    "at_most": ("bound",),
    "at_least": ("bound",),
    "within": ("value", "tolerance or relative_tolerance"),
    "between": ("low", "high"),
    "equals": ("value",),
    "is_true": (),
}


@dataclass(frozen=True)
class Rule:
    """When a measured number agrees with a claim: low <= x <= high, or x == value where `value` is not None."""

    text: str  # as the reader sees it: "≤ 0.02"
    reason: str
    low: float = -math.inf
    high: float = math.inf
    value: bool | int | str | None = None

    def margin(self, measured: Any) -> float:
        """How far inside the rule a measured value lies, in its own unit.

        min(x - low, high - x), the smallest over a list; negative outside. Infinite, with a sign, for a rule that
        compares, and -inf for text where a number is due (a measurement that diverged has failed).
        """
        if isinstance(measured, list):
            return min(self.margin(item) for item in measured)
        if self.value is not None:
            same = measured == self.value and isinstance(measured, bool) == isinstance(self.value, bool)
            return math.inf if same else -math.inf
        if isinstance(measured, bool | str):
            return -math.inf
        return min(measured - self.low, self.high - measured)


@dataclass(frozen=True)
class Check:
    """One recorded quantity held against one rule, and against a looser one where that makes a `partly`."""

    quantity: str
    rule: Rule
    looser: Rule | None = None
    words: str = ""
    paper_value: Any = None
    spread: Mapping[str, float] | None = None  # by preset: the range over three seeds; None if not measured

    def spread_at(self, preset: str) -> float | None:
        """The spread at a preset: 0 for rules that compare, None if it was not measured."""
        if self.rule.value is not None:
            return 0.0
        return None if self.spread is None else self.spread.get(preset)


@dataclass(frozen=True)
class Expected:
    """The verdict that the ledger expects at one preset, and why."""

    verdict: str
    reason: str


@dataclass(frozen=True)
class Control:
    """What "no effect" would score: a check that must hold too, or the entry that plays this part."""

    words: str
    check: Check | None = None
    claim: str = ""


@dataclass(frozen=True)
class Claim:
    """One entry of the ledger."""

    id: str
    page: str  # "nqf/fig3_features"
    paper: str  # one of PAPERS
    place: str
    words: str
    paper_value: Any
    checks: tuple[Check, ...]  # none: nothing to measure yet; several: `partly` if only some hold
    expected: Mapping[str, Expected]  # by preset
    control: Control | None
    history: tuple[Mapping[str, Any], ...]  # earlier rules, each with the reason for the change
    where: str  # "nqf/fig3_features.yml:12"


@dataclass(frozen=True)
class Page:
    """The claims whose home is one page of the book."""

    name: str
    title: str
    order: int
    claims: tuple[Claim, ...]


def claims_folder() -> Path:
    """The ledger of this checkout, or the copy that an installed wheel carries."""
    here = Path(__file__).resolve().parent
    checkout = here.parent / "data" / "claims"
    return checkout if checkout.is_dir() else here / "_data" / "claims"


def load_pages(folder: Path | None = None) -> tuple[Page, ...]:
    """The whole ledger by page, in the order of the parts of the book and of `order` within each.

    Raises:
        LedgerError: a file is malformed, an id or a claim stands twice, or a control names no entry.
    """
    folder = folder or claims_folder()
    paths = sorted(folder.glob("*/*.yml"))
    pages = [_read_page(path.read_text("utf-8"), path.relative_to(folder).as_posix()) for path in paths]
    if not pages:
        raise LedgerError(f"no claims under {folder}; files lie at PART/PAGE.yml")
    seen: dict[str, Claim] = {}
    for claim in (claim for page in pages for claim in page.claims):
        for key, what in ((claim.id, f"the id {claim.id}"), (" ".join(claim.words.lower().split()), "this claim")):
            if key in seen:
                raise LedgerError(f"{claim.where}: claim {claim.id}: {what} already stands at {seen[key].where}")
            seen[key] = claim
    ids = {claim.id for page in pages for claim in page.claims}
    for claim in (claim for page in pages for claim in page.claims):
        if claim.control and claim.control.claim and claim.control.claim not in ids:
            raise LedgerError(
                f"{claim.where}: claim {claim.id}: its control {claim.control.claim} is no entry of the ledger"
            )
    return tuple(sorted(pages, key=lambda page: (PARTS.index(page.name.split("/")[0]), page.order, page.name)))


def load_claims(folder: Path | None = None) -> dict[str, Claim]:
    """Every entry of the ledger by id. Raises as `load_pages` does."""
    return {claim.id: claim for page in load_pages(folder) for claim in page.claims}


@lru_cache(maxsize=256)  # a book asks for the whole ledger on every page; the same text is the same page
def _read_page(text: str, where: str) -> Page:
    name = where.removesuffix(".yml")
    if name.split("/")[0] not in PARTS:
        raise LedgerError(f"{where}: files lie in {', '.join(PARTS)}, like the notebooks")
    block, lines = read(text, where)
    block.keys({"title", "order", "claims"})
    entries = block.get("claims", list)
    claims = tuple(
        _read_claim(Block(entry, f"{where}:{line}"), name) for entry, line in zip(entries, lines, strict=True)
    )
    return Page(name, block.text("title"), block.get("order", int), claims)


def _read_claim(entry: Block, page: str) -> Claim:
    identity = entry.get("id", str)
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", identity):
        raise entry.error(f"ids are small letters, digits and single hyphens, got {identity!r}")
    entry = entry.named(f"claim {identity}")
    entry.keys(
        {"id", "paper", "place", "claim", "expected"},
        {"paper_value", "quantity", "rule", "looser_rule", "spread", "parts", "control", "history"},
    )
    paper = entry.one_of("paper", PAPERS)
    if paper != "ours" and "paper_value" not in entry.content and "parts" not in entry.content:
        raise entry.error("paper_value is missing; write what the paper gives, or 'no number'")
    expected = _read_expected(entry)
    measured_at = {preset for preset, item in expected.items() if item.verdict != "open"}
    checks = _read_checks(entry, measured_at)
    if measured_at and not checks:
        raise entry.error("without quantity and rule, or parts, the only verdict is open")
    if {item.verdict for item in expected.values()} & {"partly"} and len(checks) == 1 and not checks[0].looser:
        raise entry.error("the verdict partly needs a looser_rule or parts")
    return Claim(
        id=identity,
        page=page,
        paper=paper,
        place=entry.text("place"),
        words=entry.text("claim"),
        paper_value=entry.content.get("paper_value"),
        checks=checks,
        expected=expected,
        control=_read_control(entry, measured_at),
        history=_read_history(entry),
        where=entry.where,
    )


def _read_expected(entry: Block) -> dict[str, Expected]:
    expected = {}
    for preset in entry.get("expected", dict):
        entry.check_choice("preset", preset, PRESETS)
        block = entry.inner(entry.content["expected"][preset], f"expected at {preset}")
        block.keys({"verdict", "reason"})
        expected[preset] = Expected(block.one_of("verdict", VERDICTS), block.text("reason"))
    if not expected:
        raise entry.error("expected names no preset")
    return expected


def _read_checks(entry: Block, measured_at: Collection[str]) -> tuple[Check, ...]:
    if "parts" not in entry.content:
        return (_read_check(entry, measured_at),) if {"quantity", "rule"} & entry.content.keys() else ()
    if {"quantity", "rule", "looser_rule", "spread"} & entry.content.keys():
        raise entry.error("with parts, quantity, rule and spread belong into the parts")
    parts = [entry.inner(part, f"part {i + 1}") for i, part in enumerate(entry.get("parts", list))]
    if len(parts) < 2:
        raise entry.error("parts needs two or more parts")
    for part in parts:
        part.keys({"words", "quantity", "rule"}, {"paper_value", "spread"})
    return tuple(_read_check(part, measured_at) for part in parts)


def _read_check(block: Block, measured_at: Collection[str]) -> Check:
    quantity, rule = block.get("quantity", str), _read_rule(block, "rule")
    looser = _read_rule(block, "looser_rule") if "looser_rule" in block.content else None
    if looser and (rule.value is not None or looser.value is not None):
        raise block.error("looser_rule goes with rules that have a bound")
    if looser and not (looser.low <= rule.low and rule.high <= looser.high and looser.text != rule.text):
        raise block.error(f"looser_rule ({looser.text}) must hold wherever rule ({rule.text}) does")
    check = Check(
        quantity,
        rule,
        looser,
        block.text("words") if "words" in block.content else "",
        block.content.get("paper_value") if "words" in block.content else None,
        _read_spread(block),
    )
    for preset in PRESETS:
        if preset in measured_at and check.spread_at(preset) is None:
            raise block.error(f"spread at {preset} is missing; write the range over three seeds, or `spread: exact`")
    return check


def _read_spread(block: Block) -> Mapping[str, float] | None:
    spread = block.content.get("spread")
    if spread is None:
        return None
    if spread == "exact":
        return dict.fromkeys(PRESETS, 0.0)
    if not isinstance(spread, dict):
        raise block.error(f"spread is `exact` or a number for each preset, got {spread!r}")
    inner = block.inner(spread, "spread")
    for preset in spread:
        block.check_choice("preset", preset, PRESETS)
        if inner.number(preset) < 0:
            raise inner.error(f"{preset} must not be negative")
    return {preset: inner.number(preset) for preset in spread}


def _read_rule(block: Block, key: str) -> Rule:
    rule = block.inner(block.get(key, dict), key)
    if "kind" not in rule.content:
        raise rule.error("kind is missing")
    kind = rule.one_of("kind", tuple(RULES))
    tolerance = "relative_tolerance" if "relative_tolerance" in rule.content else "tolerance"
    needed = [tolerance if " or " in name else name for name in RULES[kind]]
    rule.keys({"kind", "reason", *needed})
    reason = rule.text("reason")
    if kind in ("equals", "is_true"):
        value = True if kind == "is_true" else rule.content["value"]
        if not isinstance(value, bool | int | str):
            raise rule.error(f"equals compares a whole number, text or true/false, got {value!r}; use within")
        return Rule("holds" if kind == "is_true" else f"= {value}", reason, value=value)
    numbers = {name: rule.number(name) for name in needed}
    if kind == "at_most":
        return Rule(f"≤ {numbers['bound']:g}", reason, high=numbers["bound"])
    if kind == "at_least":
        return Rule(f"≥ {numbers['bound']:g}", reason, low=numbers["bound"])
    if kind == "between":
        if not numbers["low"] < numbers["high"]:
            raise rule.error("low must be below high")
        return Rule(f"{numbers['low']:g} to {numbers['high']:g}", reason, numbers["low"], numbers["high"])
    value, width = numbers["value"], numbers[tolerance]
    if width <= 0:
        raise rule.error(f"{tolerance} must be positive")
    relative = tolerance == "relative_tolerance"
    text = f"{value:g} ± {100 * width:g} %" if relative else f"{value:g} ± {width:g}"
    width *= abs(value) if relative else 1
    return Rule(text, reason, value - width, value + width)


def _read_control(entry: Block, measured_at: Collection[str]) -> Control | None:
    if "control" not in entry.content:
        return None
    block = entry.inner(entry.get("control", dict), "control")
    if "claim" in block.content:
        block.keys({"words", "claim"})
        return Control(block.text("words"), claim=block.get("claim", str))
    block.keys({"words", "quantity", "rule"}, {"spread"})
    return Control(block.text("words"), check=_read_check(block, measured_at))


def _read_history(entry: Block) -> tuple[Mapping[str, Any], ...]:
    blocks = [entry.inner(item, "history") for item in entry.content.get("history", [])]
    for block in blocks:
        block.keys({"rule", "reason"}, {"quantity"})
        block.text("reason")
        _read_rule(block, "rule")
    return tuple(block.content for block in blocks)
