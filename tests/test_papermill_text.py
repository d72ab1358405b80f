import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from test_runner import HEADER

PAPERMILL = Path(sys.executable).with_name("papermill")


@pytest.fixture
def notebook(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(HEADER.format(order=1, code="print(settings.sigma)"))
    return path


def papermill(*words, cwd):
    return subprocess.run([PAPERMILL, *words], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.book
def test_papermill_runs_a_text_notebook_from_any_directory(notebook, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    result = papermill("../page.md", "out.ipynb", "-p", "sigma", "1e-3", "--no-progress-bar", cwd=elsewhere)
    assert result.returncode == 0, result.stderr
    executed = nbformat.read(elsewhere / "out.ipynb", 4)
    assert executed.cells[-1].outputs[0].text == "0.001\n"
    assert "does not end in" not in result.stderr
    assert "unknown parameter" not in result.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sgima", "0.2", "unknown parameter sgima: did you mean sigma?"),
        ("sigma", "7", "sigma must be from 1e-06 to 1, got 7.0"),
        ("sigma", "wide", "sigma needs a value of type float, got 'wide'"),
        ("preset", "huge", "preset must be one of smoke, laptop, got 'huge'"),
    ],
)
def test_plain_papermill_refuses_what_the_notebook_does_not_declare(notebook, tmp_path, name, value, message):
    result = papermill("page.md", "out.ipynb", "-p", name, value, cwd=tmp_path)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out.ipynb").exists()


def test_the_python_interface_of_papermill_raises_the_same_error(notebook, tmp_path):
    import papermill

    from nqflib.presets import ParameterError

    with pytest.raises(ParameterError, match="did you mean sigma"):
        papermill.execute_notebook(str(notebook), str(tmp_path / "out.ipynb"), parameters={"sgima": 1.0})


def test_help_shows_types_presets_and_ranges(notebook, tmp_path):
    result = papermill("--help-notebook", "page.md", cwd=tmp_path)
    assert "sigma: float (default 0.25 in preset laptop)" in result.stdout
    assert "weight scale [1e-6 .. 1]" in result.stdout


def test_importing_the_handler_before_papermill_works():
    code = "import nqflib.papermill_text, papermill.iorw as i; print(type(i.papermill_io.get_handler('x.md', ['.md'])))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "TextNotebookHandler" in result.stdout, result.stderr
    assert "torch" not in result.stderr


def test_starting_papermill_does_not_import_torch():
    code = "import papermill.iorw, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
