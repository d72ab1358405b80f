"""What a page says below its title of the time that it takes."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell
from small_site import figure_cell, small_book, soup, text

from nqflib.sphinx_times import times


def test_minutes_are_rounded_up_and_an_unknown_run_is_left_out():
    run = {"seconds": 27.84, "preset": "laptop"}
    assert times(200, run) == "1 min to read · 28 s to run at preset laptop"
    assert times(201, {"seconds": 125}) == "2 min to read · 2 min 5 s to run"
    assert times(0, {}) == "1 min to read"


@pytest.mark.book
def test_words_of_prose_and_captions_count_and_code_formulas_numbers_and_folded_reasons_do_not(tmp_path):
    reasons = "\n".join(f"- {'folded ' * 50}" for _ in range(3))
    claims = f"````{{container}} claim\nword word\n\n<details>\n\n{reasons}\n\n</details>\n````"
    skipped = f"${'x ' * 300}$ {'12 ' * 300}\n\n```python\n{'code ' * 300}\n```\n\n```{{rerun}} {'eps=1e-8'}\n```"
    # 3 + 393 + 2 + 2 words: one more makes a third minute.
    cells = [
        new_markdown_cell(f"# A long page\n\n{'word ' * 393}\n\n{skipped}\n\n{claims}"),
        new_code_cell("pass  # " + "code " * 300),
        figure_cell("Caption *here*."),
    ]
    output, warnings = small_book(tmp_path, *cells)
    assert warnings == ""
    page = soup(output / "notebooks/nqf/first.html")
    assert text(page.select_one("h1 + .nqf-times")) == "2 min to read · 75 s to run at preset laptop"
    assert not soup(output / "index.html").select(".nqf-times")
    cells[0]["source"] = cells[0]["source"].replace("word word", "word word word")
    source = tmp_path / "more"
    source.mkdir()
    output, _ = small_book(source, *cells)
    assert text(soup(output / "notebooks/nqf/first.html").select_one(".nqf-times")).startswith("3 min to read")
