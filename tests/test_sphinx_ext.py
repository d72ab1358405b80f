"""What the extension writes of a run, and the configuration that loads it. Its pages: `tests/book/test_site_ext.py`."""

from pathlib import Path

import pytest
import yaml

from nqflib import sphinx_ext, sphinx_figures


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (125, "2 min 5 s"),
        (3599.6, "1 h 0 min"),
        (4800, "1 h 20 min"),
    ],
)
def test_durations_as_a_reader_says_them(seconds, said):
    assert sphinx_figures.duration(seconds) == said


def test_a_stamp_leaves_out_what_is_not_known():
    assert sphinx_figures.run_stamp({}) == ""
    run = {"preset": "smoke", "given": {"preset": "smoke", "eps": 1e-4}, "versions": {"scipy": "1.18"}}
    assert sphinx_figures.run_stamp(run) == "preset smoke · with eps=0.0001"


def test_numbers_are_typeset_without_touching_words():
    plain = lambda nodes: "".join(node.astext() for node in nodes)  # noqa: E731
    assert plain(sphinx_ext.typeset("-1.50e-05, 2e+10")) == "−1.50\u00a0×\u00a010−5, 2\u00a0×\u00a01010"
    assert plain(sphinx_ext.typeset("diverged at step-37, never")) == "diverged at step-37, never"


def test_the_configuration_drops_two_extensions_of_jupyter_book_and_no_more():
    from jupyter_book.config import get_default_sphinx_config

    config = yaml.safe_load((Path(__file__).parents[1] / "_config.yml").read_text("utf-8"))
    ours = config["sphinx"]["config"]["extensions"]
    dropped = set(get_default_sphinx_config()["extensions"]) - set(ours)
    assert dropped == {"sphinx_thebe", "sphinx.ext.intersphinx"}
    assert config["sphinx"]["config"]["html_theme_options"]["repository_url"] == config["repository"]["url"]
