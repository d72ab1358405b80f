import math

import nbformat
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from nqflib.quantities import read_quantities, read_run, record


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Record as in a notebook and read the quantities back from the executed file."""

    def run(metadata=None, **quantities):
        outputs = []
        monkeypatch.setattr(
            "IPython.display.display",
            lambda data, raw, metadata: outputs.append(
                nbformat.v4.new_output("display_data", data=data, metadata=metadata)
            ),
        )
        record(**quantities)
        return read_run(notebook(tmp_path / "page.ipynb", outputs, metadata))

    return run


def notebook(path, outputs, metadata=None):
    cell = nbformat.v4.new_code_cell("...", outputs=outputs)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=metadata or {}), path)
    return path


def glued(name, text, **metadata):
    mime = "application/papermill.record/text/plain"
    metadata |= {"scrapbook": {"name": name, "mime_prefix": mime.removesuffix("text/plain")}}
    return nbformat.v4.new_output("display_data", data={mime: text}, metadata=metadata)


def test_every_kind_of_quantity_comes_back_bit_for_bit(recorded):
    given = {
        "third": 1 / 3,
        "tiny": 5e-324,
        "count": 2**70,
        "holds": True,
        "outcome": 'diverged at step 37: it\'s "over"\nindeed',
        "many": [0.1 * k for k in range(3000)],  # IPython's own display cuts lists after 1000 items
    }
    assert recorded(**given).quantities == given


def test_the_display_precision_of_the_notebook_does_not_matter(recorded):
    InteractiveShell.instance().run_line_magic("precision", "2")
    try:
        assert recorded(x=math.pi).quantities["x"] == math.pi
    finally:
        InteractiveShell.instance().run_line_magic("precision", "")


def test_numpy_and_torch_numbers_become_plain_ones(recorded):
    import torch

    read = recorded(
        a=np.float64(0.1), b=np.int64(3), c=np.bool_(True), d=np.array([1.5, 2.5]), e=torch.tensor(0.5), f=np.arange(2)
    )
    assert read.quantities == {"a": 0.1, "b": 3, "c": True, "d": [1.5, 2.5], "e": 0.5, "f": [0, 1]}
    assert isinstance(read.quantities["c"], bool)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (math.nan, ValueError, "x is nan; record text that names the outcome"),
        (-math.inf, ValueError, "x is -inf"),
        ([1.0, math.nan], ValueError, r"x\[1\] is nan"),
        (np.array([[1.0]]), TypeError, r"x\[0\] must be .*got list"),
        ({"a": 1}, TypeError, "got a mapping"),
        (None, TypeError, "got NoneType"),
        ([], ValueError, "x is an empty list"),
        (1 + 2j, TypeError, "got complex"),
    ],
)
def test_what_is_no_plain_finite_quantity_is_refused_and_nothing_is_recorded(recorded, value, error, text):
    with pytest.raises(error, match=text):
        recorded(fine=1.0, x=value)


@pytest.mark.parametrize("name", ["Upper", "_x", "with-hyphen", "2x", "ünï"])
def test_names_that_the_ledger_could_not_quote_are_refused(name):
    with pytest.raises(ValueError, match="quantity names"):
        record(**{name: 1.0})


def test_values_glued_for_the_text_only_are_no_quantities(tmp_path):
    other = glued("picture", "<Figure size 640x480>")
    path = notebook(tmp_path / "page.ipynb", [other, glued("x", "0.25", nqf={"quantity": True})])
    assert read_quantities(path) == {"x": 0.25}


def test_text_is_read_as_a_literal_and_never_run(tmp_path):
    path = notebook(tmp_path / "page.ipynb", [glued("x", "__import__('os').getcwd()", nqf={"quantity": True})])
    with pytest.raises(ValueError, match="the quantity x reads"):
        read_quantities(path)


def test_one_quantity_recorded_twice_is_an_error(tmp_path):
    twice = [glued("x", text, nqf={"quantity": True}) for text in ("1", "2")]
    with pytest.raises(ValueError, match="x is recorded twice"):
        read_quantities(notebook(tmp_path / "page.ipynb", twice))


def test_a_file_that_is_no_notebook_is_named(tmp_path):
    (tmp_path / "page.ipynb").write_text("[]")
    with pytest.raises(ValueError, match=r"page\.ipynb is not a Jupyter notebook"):
        read_quantities(tmp_path / "page.ipynb")


def test_a_run_tells_its_preset_and_what_was_changed_by_hand(recorded):
    run = recorded({"nqf": {"run": {"preset": "smoke", "given": {"preset": "smoke", "eps": 1e-3}}}}, x=1)
    assert (run.preset, run.changed) == ("smoke", {"eps": 1e-3})
    assert recorded(x=1)[1:] == ("", {})
