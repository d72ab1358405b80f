"""What a page embeds for its form, the commands that repeat a run, and what a run is compared by."""

import json
import subprocess

import pytest
from bs4 import BeautifulSoup

from nqflib import runner
from nqflib.presets import ParameterError
from nqflib.serve import form, handlers, results

CELLS = [
    {
        "metadata": {"tags": ["parameters"]},
        "source": 'preset: str = "laptop"  # size [smoke | laptop]\n'
        "eps: float | None = None  # first </script><!-- abundance [1e-30 .. 1e-2]\n",
    },
    {"metadata": {"tags": ["presets"]}, "source": 'presets = {"smoke": {"eps": 1e-4}, "laptop": {"eps": 1e-5}}'},
]


def test_the_embedded_form_is_the_declaration_whatever_its_help_says():
    html = form.embedded("nqf/page", CELLS, {"eps": 1e-8})
    soup = BeautifulSoup(html, "html.parser")
    (script,) = soup.select("div.nqf-form > script")
    told = json.loads(script.string)
    assert told["parameters"][1] == {
        "name": "eps",
        "type": "float",
        "help": "first </script><!-- abundance",
        "default": None,
        "low": 1e-30,
        "high": 1e-2,
        "bounds": "from 1e-30 to 0.01",
        "choices": [],
    }
    assert told["presets"]["evening"] == {"eps": 1e-5}  # a preset takes over what the smaller ones set
    assert told["published"] == {"eps": 1e-8}
    assert "<!--" not in html


def test_a_page_without_parameters_has_no_form_and_one_that_cannot_be_read_is_refused():
    assert form.embedded("nqf/page", [], {}) == ""
    with pytest.raises(ParameterError, match="must read"):
        form.embedded("nqf/page", [{"metadata": {"tags": ["parameters"]}, "source": "eps = 1"}], {})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"eps": 1e-8, "seed": 3},
        {"rates": [1.0, 0.5], "flag": True, "preset": "smoke"},
        {"layers": ["query-key", "multi-head"]},
        {"name": 'it\'s $(id) `id` "x" \\ \n %s'},
    ],
)
def test_the_shown_command_gives_the_runner_the_same_parameters(given, tmp_path):
    (tmp_path / "Makefile").write_text("figure:\n\t@python -m nqflib.runner figure $(F) $(P)\n")
    (tmp_path / "python").write_text("#!/bin/sh\nshift 3\nfor word; do printf '%s\\0' \"$word\"; done\n")
    (tmp_path / "python").chmod(0o755)
    command = handlers.command("nqf/page", given)
    environment = {"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"}
    out = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    page, *words = out.stdout.split("\0")[:-1]
    assert page == "nqf/page"
    assert runner.parse_assignments(words) == given
    assert command.startswith("make figure F=nqf/page") == ("name" not in given)


def test_differences_cover_numbers_lists_and_what_is_none():
    before = {"a": 1.0, "b": [1.0, 5.0], "c": "never", "d": True, "e": [1.0], "f": 3}
    now = {"a": 1.5, "b": [2.0, 2.0], "c": "diverged at step 37", "d": False, "e": [1.0, 2.0], "g": 4, "f": 3}
    rows = {row["name"]: (row["difference"], row["same"]) for row in results.differences(before, now)}
    assert rows == {
        "a": (0.5, False),
        "b": (-3.0, False),
        "c": (None, False),
        "d": (None, False),
        "e": (None, False),
        "f": (0, True),
        "g": (None, False),
    }


def test_runs_of_long_parameters_have_places_of_their_own():
    one, other = ({"values": [0.1] * 40 + [last]} for last in (0.2, 0.3))
    places = {runner.run_folder("nqf/page", given).name for given in (one, other)}
    assert len(places) == 2
    assert all(len(place) <= 120 for place in places)
    assert runner.run_folder("nqf/page", {"seed": 1, "eps": 1e-8}).name == "eps=1e-08,seed=1"
