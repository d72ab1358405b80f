"""YAML files that people write by hand, read strictly.

PyYAML lets a key stand twice, reads 1e-3 as text and forgets where anything stood. `read` refuses the first, and a
`Block` is a mapping that knows its place, so that every complaint names the file, the line, the entry, what was
given and what is valid.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection
from typing import Any

import yaml

#: What `yaml.safe_load` uses, in C where PyYAML was built with it: ten times as fast, and a book loads all files often.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class LedgerError(ValueError):
    """A file cannot be taken as it is. The text names the file, the line and the entry."""


def read(text: str, where: str) -> tuple[Block, list[int]]:
    """The mapping that a file holds, and the line at which each item of its list `claims` starts.

    Args:
        text: the file's content.
        where: the file's name for messages.

    Raises:
        LedgerError: the text is not YAML, not a mapping, or a key stands twice in one mapping.
    """
    loader = _LOADER(text)
    try:
        root = loader.get_single_node()
        lines = _lines_of_entries(root, where)
        return Block(loader.construct_document(root) if root else None, where), lines
    except yaml.YAMLError as error:
        raise LedgerError(f"{where}: not YAML: {error}") from None
    finally:
        loader.dispose()


def _lines_of_entries(root: Any, where: str) -> list[int]:
    waiting, lines = [root], []
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            for key, value in node.value:
                if keys.count(key.value) > 1:
                    raise LedgerError(f"{where}:{key.start_mark.line + 1}: the key {key.value!r} stands twice")
                if node is root and key.value == "claims" and isinstance(value, yaml.SequenceNode):
                    lines = [item.start_mark.line + 1 for item in value.value]
                waiting.append(value)
        elif isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
    return lines


class Block:
    """A mapping of a file with its place, so that every complaint says where."""

    def __init__(self, content: Any, where: str, label: str = "") -> None:
        self.content, self.where, self.label = content, where, label
        if not isinstance(content, dict):
            raise self.error(f"must be a mapping of keys to values, got {content!r}")

    def named(self, label: str) -> Block:
        """The same mapping under the name that complaints should use."""
        return Block(self.content, self.where, label)

    def inner(self, content: Any, label: str) -> Block:
        """A mapping that stands inside this one."""
        return Block(content, self.where, f"{self.label}: {label}" if self.label else label)

    def error(self, message: str) -> LedgerError:
        """The error to raise, with the place in front of the message."""
        return LedgerError(": ".join(part for part in (self.where, self.label, message) if part))

    def keys(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        """Refuse unknown and missing keys."""
        for key in self.content:
            self.check_choice("key", key, [*sorted(required), *sorted(optional)])
        for key in sorted(required):
            if key not in self.content:
                raise self.error(f"{key} is missing")

    def check_choice(self, what: str, value: Any, valid: Collection[str]) -> None:
        """Refuse a value that is not among the valid ones, and suggest the nearest."""
        if value not in valid:
            near = difflib.get_close_matches(str(value), list(valid), n=1)
            guess = f"; did you mean {near[0]}?" if near else "."
            raise self.error(f"unknown {what} {value!r}{guess} Valid: {', '.join(valid)}")

    def get(self, key: str, kind: type) -> Any:
        """The value of a key, which must be of a type: str, int, list or dict."""
        value = self.content.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            names = {str: "text", int: "a whole number", list: "a list", dict: "a mapping"}
            raise self.error(f"{key} must be {names[kind]}, got {value!r}")
        return value

    def text(self, key: str) -> str:
        """Text on one line, not empty."""
        value = " ".join(self.get(key, str).split())
        if not value:
            raise self.error(f"{key} is empty")
        return value

    def one_of(self, key: str, valid: tuple[str, ...]) -> str:
        """Text that is one of a few."""
        self.check_choice(key, self.content.get(key), valid)
        return self.content[key]

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.content[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            # YAML 1.1 reads 1e-3 as text: a number with an exponent needs a dot and a sign.
            hint = ""
            if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value):
                hint = "; YAML wants a dot and a sign in it, as in 1.0e-3"
            raise self.error(f"{key} must be a number, got {value!r}{hint}")
        return float(value)
