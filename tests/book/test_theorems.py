"""The index of theorems leads to code and tests that exist."""

import importlib
import re

from nqflib.runner import ROOT

TABLE = (ROOT / "book" / "theorems.md").read_text("utf-8")


def test_every_function_of_the_index_exists():
    names = re.findall(r"\{py:obj\}`([\w.]+)`", TABLE)
    assert len(names) > 15
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = importlib.import_module(module if module != "nqflib" else name)
        assert module == "nqflib" or hasattr(found, attribute), name


def test_every_test_of_the_index_exists():
    files = set(re.findall(r"`(test_\w+\.py)`", TABLE))
    assert len(files) > 8
    assert [name for name in files if not (ROOT / "tests" / name).exists()] == []
