"""Progress goes to a file here, so that a failing test shows its own output and not bars."""

import pytest

from nqflib.progress import VARIABLE


@pytest.fixture(autouse=True)
def progress_file(tmp_path_factory, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path_factory.getbasetemp() / "progress"))
