"""Keeping the numbers and curves of a run, and reading them back."""

import json

import numpy as np
import pytest

from nqflib import reference as module
from nqflib import runner
from nqflib.reference import keep, load, main, record, reference, reference_file

PAGE = """\
---
kernelspec:
  display_name: Python 3
  language: python
  name: python3
nqf:
  part: nqf
  order: 10
---
# A page

```{code-cell} python
:tags: [parameters]
preset: str = "laptop"  # size of the run [smoke | laptop | evening]
points: int | None = None  # of the curve [1 .. 1000]
```

```{code-cell} python
:tags: [presets]
presets = {"smoke": {"points": 2}, "laptop": {"points": 3}, "evening": {"points": 5}}
```

```{code-cell} python
import numpy as np
from nqflib.figures import show
from nqflib.presets import resolve
from nqflib.quantities import record
from nqflib.reference import reference
settings = resolve(presets, preset, points=points)
x = np.arange(settings.points)
show(lambda figure: figure.subplots().plot(x), "curve", alt="A curve that rises slowly from left to right.",
     data={"line": {"x": x, "root": np.sqrt(x), "word": ["a"] * len(x)}, "short": {"y": [1.5, None]}})
record(page_points=settings.points, page_kept=(reference("nqf/page") or (0, {"page_points": 0}))[1]["page_points"])
```
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    for name in ("NOTEBOOKS", "EXECUTED", "RUNS", "FAILED"):
        monkeypatch.setattr(runner, name, tmp_path / name.lower())
    monkeypatch.setattr(module, "FOLDER", tmp_path / "data" / "reference")
    (tmp_path / "requirements.lock").write_text("")
    page = tmp_path / "notebooks" / "nqf" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE)
    return tmp_path


def test_a_larger_run_is_kept_with_numbers_curves_and_origin(checkout, capsys):
    assert reference("nqf/page") is None
    assert main(["nqf/page", "preset=evening"]) == 0
    assert "Kept in data/reference/nqf/page.json" in capsys.readouterr().out
    kept = reference("nqf/page")
    assert kept.quantities == {"page_points": 5, "page_kept": 0}
    line = kept.tables["curve-line"]
    assert line["x"] == [0, 1, 2, 3, 4]
    assert line["word"] == ["a"] * 5
    np.testing.assert_allclose(line["root"], np.sqrt(np.arange(5)), rtol=5e-7)
    assert kept.tables["curve-short"] == {"y": [1.5]}
    assert kept.run["parameters"] == {"preset": "evening", "points": 5}
    assert kept.origin.startswith(f"preset evening · {kept.run['date'][:10]}")
    # Kept again from the same notebook, the file has the same bytes.
    file = reference_file("nqf/page")
    before = file.read_bytes()
    keep("nqf/page", checkout / "runs" / "nqf" / "page" / "preset=evening" / "notebook.ipynb")
    assert file.read_bytes() == before


def test_a_wrong_parameter_keeps_nothing(checkout, capsys):
    assert main(["nqf/page", "preset=tiny"]) == 1
    assert "preset must be one of" in capsys.readouterr().err
    assert reference("nqf/page") is None


def test_a_kept_run_is_an_input_of_a_page_that_reads_it(checkout, monkeypatch):
    kept = {reference_file(name) for name in ("nqf/page", "some_result")}
    other = reference_file("nqf/another")
    monkeypatch.setattr(runner, "import_closure", lambda _: [checkout / "nqflib" / "reference.py"])
    assert not kept & set(runner.inputs("nqf/page"))
    for file in (*kept, other):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    assert kept <= set(runner.inputs("nqf/page"))
    assert other not in runner.inputs("nqf/page")
    monkeypatch.setattr(runner, "import_closure", lambda _: [])
    assert not kept & set(runner.inputs("nqf/page"))


def test_a_result_is_read_back_beside_what_made_it(tmp_path):
    record("first", {"values": [0.1, None]}, command="make first", folder=tmp_path)
    record("first", {"values": [0.2, None]}, command="make first", folder=tmp_path)
    found = load("first", tmp_path)
    assert found["values"] == [0.2, None]
    assert found["made_by"]["command"] == "make first"
    assert set(found["made_by"]["versions"]) == {"python", "torch", "numpy"}
    with pytest.raises(ValueError, match="JSON compliant"):
        record("third", {"values": [float("inf")]}, command="make third", folder=tmp_path)
    with pytest.raises(ValueError, match="no kept result 'third'; there are first"):
        load("third", tmp_path)


def test_every_kept_file_is_described_and_names_no_path():
    readme = (module.FOLDER.parent / "README.md").read_text("utf-8")
    files = list(module.FOLDER.rglob("*.json"))
    assert files
    for file in files:
        text = file.read_text("utf-8")
        assert not any(path in text for path in ("/home/", "/tmp/", "/root/", "/Users/", "/work/")), file
        assert file.parent != module.FOLDER or f"`{file.name}`" in readme


def test_every_kept_run_fits_a_page_and_its_present_presets():
    for file in module.FOLDER.glob("*/*.json"):
        page = file.relative_to(module.FOLDER).with_suffix("").as_posix()
        kept = reference(page)
        declared = runner.declaration(runner.read_notebook(page).cells)
        assert declared.effective(kept.run["given"]) == kept.run["parameters"], page
        assert json.loads(file.read_text())["run"]["commit"].rstrip("+"), page


def test_values_keep_seven_digits_and_texts_stay():
    assert [module._value(cell) for cell in ("12345678901", "0.123456789", "nan", "-3", "x", "True")] == [
        12345678901, 0.1234568, "nan", -3, "x", "True",
    ]  # fmt: skip
