import ast

import nbformat
import pytest

from nqflib import runner
from nqflib.figures import render
from nqflib.presets import ParameterError

HEADER = """\
---
kernelspec:
  name: python3
  display_name: Python 3
  language: python
nqf:
  part: nqf
  order: {order}
---
# A page

```{{code-cell}} python
:tags: [parameters]
preset: str = "laptop"  # size of the run [smoke | laptop]
sigma: float | None = None  # weight scale [1e-6 .. 1]
```

```{{code-cell}} python
:tags: [presets]
presets = {{"smoke": {{"sigma": 0.5}}, "laptop": {{"sigma": 0.25}}}}
```

```{{code-cell}} python
from nqflib.presets import resolve
settings = resolve(presets, preset, sigma=sigma)
{code}
```
"""


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A checkout of its own with two small pages."""
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    for name in ("NOTEBOOKS", "EXECUTED", "RUNS", "FAILED"):
        monkeypatch.setattr(runner, name, tmp_path / name.lower())
    (tmp_path / "requirements.lock").write_text("")
    write_page(tmp_path, "second", 20, "print(settings.sigma)")
    write_page(tmp_path, "first", 10, "from nqflib.presets import ORDER")
    return tmp_path


def write_page(root, name, order, code):
    path = root / "notebooks" / "nqf" / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER.format(order=order, code=code))


def printed(notebook):
    return "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))


def test_pages_come_in_the_order_of_their_front_matter(book):
    assert runner.pages() == ["nqf/first", "nqf/second"]


def test_front_matter_without_an_order_is_refused_by_name(book):
    path = book / "notebooks" / "nqf" / "first.md"
    path.write_text(path.read_text().replace("  order: 10\n", ""))
    with pytest.raises(ValueError, match=r"first\.md: the front matter needs"):
        runner.pages()


def test_a_page_that_does_not_exist_is_refused_with_the_valid_names(book):
    with pytest.raises(ParameterError, match=r"there is no notebook nqf/third\. Valid: nqf/first, nqf/second"):
        runner.read_notebook("nqf/third")


@pytest.mark.book
def test_a_run_takes_the_override_and_carries_what_made_it(book):
    output = book / "executed" / "nqf" / "second.ipynb"
    runner.run_notebook("nqf/second", {"sigma": 0.125}, output)
    notebook = nbformat.read(output, 4)
    assert "0.125" in printed(notebook)
    run = notebook.metadata["nqf"]["run"]
    assert run["parameters"] == {"preset": "laptop", "sigma": 0.125}
    assert run["given"] == {"sigma": 0.125}
    assert run["versions"]["numpy"]
    assert len(run["input_hash"]) == 64


@pytest.mark.book
def test_a_failing_notebook_keeps_the_last_good_page_and_shows_the_traceback(book, capsys):
    output = book / "executed" / "nqf" / "second.ipynb"
    output.parent.mkdir(parents=True)
    output.write_text("the last good page")
    write_page(book, "second", 20, "1 / (settings.sigma - 0.25)")
    assert runner.main(["page", "nqf/second"]) == 1
    assert output.read_text() == "the last good page"
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert (book / "failed" / "nqf" / "second.ipynb").exists()


def test_a_wrong_parameter_stops_the_runner_before_anything_runs(book, capsys):
    assert runner.main(["figure", "nqf/second", "sgima=0.2"]) == 1
    assert "did you mean sigma" in capsys.readouterr().err
    assert not (book / "runs").exists()


def test_parameters_are_read_as_literals_and_never_run():
    words = ["eps=1e-8", "seeds=[0, 1]", "optimizer=adam", "x=__import__('os').system('true')"]
    assert runner.parse_assignments(words) == {
        "eps": 1e-8,
        "seeds": [0, 1],
        "optimizer": "adam",
        "x": "__import__('os').system('true')",
    }
    with pytest.raises(ParameterError, match="write parameters as name=value, got 'eps'"):
        runner.parse_assignments(["eps"])


def names(paths):
    return {path.name for path in paths}


def test_the_closure_follows_imports_of_every_form_and_depth(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    package = tmp_path / "nqflib"
    (package / "model").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "a.py": "from nqflib import b",
        "b.py": "def f():\n    import nqflib.c",
        "c.py": "import numpy",
        "unrelated.py": "",
        "model/__init__.py": "",
        "model/x.py": "from . import y\nfrom ..c import g",
        "model/y.py": "",
    }.items():
        (package / name).write_text(text)
    assert names(runner.import_closure("from nqflib.a import f")) == {"__init__.py", "a.py", "b.py", "c.py"}
    assert names(runner.import_closure("import nqflib.model.x")) >= {"x.py", "y.py", "c.py"}
    assert names(runner.import_closure("import numpy")) == set()


def test_the_input_hash_changes_with_a_module_a_parameter_and_the_notebook(book):
    page = "nqf/first"

    def current(**given):
        return runner.input_hash(runner.inputs(page), given)

    first = current()
    assert current() == first
    assert current(sigma=0.1) != first
    (book / "nqflib").mkdir()
    (book / "nqflib" / "presets.py").write_text("ORDER = ()")
    with_module = current()
    assert with_module != first
    write_page(book, "first", 10, "from nqflib.presets import ORDER  # changed")
    assert current() not in (first, with_module)


def test_figures_of_a_run_are_written_as_files(tmp_path):
    alt = "A straight line that rises from 0 to 1."
    bundle = render(lambda figure: figure.subplots().plot([0, 1]), "rise", alt=alt, data={"x": [0.5]})
    output = nbformat.v4.new_output("display_data", bundle)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])])
    assert {p.name for p in runner.export_figures(notebook, tmp_path)} == {"rise.svg", "rise.png", "rise.csv"}
    assert (tmp_path / "rise.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "rise.csv").read_text() == "x\n0.5\n"


@pytest.mark.parametrize("page", runner.pages())
def test_the_code_found_in_a_text_notebook_is_the_code_of_its_cells(page):
    cells = runner.read_notebook(page).cells
    by_jupytext = [cell.source for cell in cells if cell.cell_type == "code"]
    found = runner._code((runner.NOTEBOOKS / f"{page}.md").read_text("utf-8"))
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse("\n".join(by_jupytext)))
