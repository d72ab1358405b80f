"""The extension in real Sphinx builds of two small pages: what a reader sees, clicks and downloads."""

import json
import re

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_code_cell, new_markdown_cell
from small_site import (
    ALT,
    RUN,
    build,
    figure_cell,
    recorded,
    small_book,
    soup,
    table_cell,
    text,
    two_words,
    write_notebook,
)

from nqflib import scoreboard, sphinx_links
from nqflib.figures import FIGURE_MIME, render

pytestmark = pytest.mark.book
REPOSITORY = "https://github.com/nqf-companion/nqf-companion"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Two notebooks and two prose pages under the theme of the book."""
    source = tmp_path_factory.mktemp("site") / "book"
    source.mkdir()
    caption = "Both differ by {num}`gap:.1e`, see {numref}`tab-a` and $x^2$.\n\nMore on {cite:t}`ziyin2026nqf`."
    numbers = """# First page with $\\sigma$

A {num}`error:.2%`, {num}`gap`, {num}`steps`, {num}`times:.1f`, {num}`times[1]:.2f`, {num}`outcome:.2f`,
{num}`large:,.0f`, {num}`negative:.1f`, {num}`flag`.

```{claims-box}
```

```{rerun}
```
"""
    cells = [
        new_markdown_cell(numbers),
        recorded(error=0.012345, gap=1.234e-7, steps=12, times=[1.0, 2.25], outcome="diverged at step 37",
                 large=1234567.0, negative=-2.0, flag=True),
        figure_cell(caption, data={"curves": {"t": [0.1, 0.2]}, "fit": {"slope": [1.5]}}),
        table_cell(),
    ]  # fmt: skip
    write_notebook(source, "nqf/first", cells)
    second = [
        new_markdown_cell('# Second\n\n{num}`nqf/first#error:.1%` and\n\n```{rerun} eps=1e-4 rates="[1.0, 0.9]"\n```')
    ]
    changed = {**RUN, "given": {"preset": "laptop", "eps": 1e-8}, "seconds": 0.42, "commit": ""}
    write_notebook(source, "nqf/second", second, run=changed, order=0)
    (source / "index.md").write_text(
        "# Book\n\n{numref}`two-words` and {numref}`tab-a`, {num}`nqf/first#times[0]`.\n\n"
        "```{toctree}\nnotebooks/nqf/first\nnotebooks/nqf/second\nruns\n```\n\n```{bibliography}\n```\n"
    )
    (source / "runs.md").write_text("# Runs\n\n```{run-table}\n```\n\n```{scoreboard}\n```\n")
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            scoreboard, "render_box", lambda page, folder: calls.append((page, folder)) or "*box of the page*"
        )
        patch.setattr(scoreboard, "render_scoreboard", lambda folder: calls.append(folder) or "*the whole board*")
        output, warnings = build(
            source,
            theme="sphinx_book_theme",
            options={
                "repository_url": REPOSITORY,
                "repository_branch": "main",
                "path_to_docs": "book",
                "use_issues_button": True,
                "use_edit_page_button": True,
                "use_source_button": True,
                "launch_buttons": {"binderhub_url": "https://hub", "colab_url": "https://colab.research.google.com"},
            },
        )
    return output, warnings, calls


@pytest.fixture(scope="module")
def first(site):
    return soup(site[0] / "notebooks/nqf/first.html")


def test_nothing_is_complained_about(site):
    assert site[1] == ""


# Figures --------------------------------------------------------------------------------------------------


def test_the_figure_is_numbered_and_shows_both_themes_with_alternative_text(site, first):
    (figure,) = first.select("figure#two-words")
    images = figure.select(".nqf-themes > img")
    assert [image["class"] for image in images] == [["only-light"], ["only-dark"]]
    assert [image["alt"] for image in images] == [ALT, ALT]
    shown = [(site[0] / "notebooks/nqf" / image["src"]).resolve().read_text("utf-8") for image in images]
    made = render(two_words, "two-words", alt=ALT)[FIGURE_MIME]
    assert shown == [made["svg_light"], made["svg_dark"]]
    # The theme hides a caption that is a sibling of an image for one theme only.
    assert not figure.select(".only-dark ~ figcaption")
    # The fallback for notebook editors is not written a second time.
    assert {path.name for path in (site[0].parent / "jupyter_execute").rglob("*.png")} == {"two-words.png"}


def test_the_caption_holds_numbers_references_citations_and_math(first):
    (figure,) = first.select("figure#two-words")
    caption = figure.select_one("figcaption > p")
    assert text(caption).startswith("Fig. 1 Both differ by 1.2 × 10−7, see Table 1 and \\(x^2\\).")
    assert caption.select_one("sup").get_text() == "−7"
    assert text(figure.select_one(".legend > p")).startswith("More on Ziyin")


def test_the_downloads_are_the_numbers_that_were_drawn(site, first):
    (figure,) = first.select("figure#two-words")
    links = {link.get_text(): link["href"] for link in figure.select("a.download")}
    assert list(links) == ["PNG", "SVG", "CSV curves", "CSV fit"]
    files = {kind: (site[0] / "notebooks/nqf" / link).resolve() for kind, link in links.items()}
    assert files["CSV curves"].name == "two-words-curves.csv"
    assert files["CSV curves"].read_text() == "t\n0.1\n0.2\n"
    assert files["CSV fit"].read_text() == "slope\n1.5\n"
    assert files["PNG"].read_bytes().startswith(b"\x89PNG")
    assert files["SVG"].read_text() == render(two_words, "two-words", alt=ALT)[FIGURE_MIME]["svg_light"]


def test_the_stamp_says_what_made_the_figure_and_leads_to_the_table_of_runs(first):
    stamp = first.select_one("figure#two-words .nqf-stamp")
    assert text(stamp) == "commit 0123456789+ · preset laptop · 75 s · torch 2.13 · numpy 2.4"
    assert stamp.select_one("a")["href"] == "../../runs.html#run-table"


def test_other_pages_find_figure_and_table_by_label(site):
    index = soup(site[0] / "index.html")
    links = {text(link): link["href"] for link in index.select("a.reference")}
    assert links["Fig. 1"] == "notebooks/nqf/first.html#two-words"
    assert links["Table 1"] == "notebooks/nqf/first.html#tab-a"


def test_the_table_is_numbered_and_downloads_whole(site, first):
    (table,) = first.select(".nqf-table table#tab-a")
    assert re.match(r"Table 1 Halves, as Ziyin \[\w+\] says; see Fig\. 1\.", text(table.select_one("caption")))
    assert [text(cell) for cell in table.select("td")] == ["1", "a | b"]
    link = first.select_one(".nqf-table a.download")
    assert (site[0] / "notebooks/nqf" / link["href"]).resolve().read_text() == "k,t\n1,a | b\n"


def test_a_figure_without_caption_and_a_book_without_table_of_runs(tmp_path):
    named = {"two-words": "The caption of its own name.", "other-words": "Another."}
    output, warnings = small_book(
        tmp_path,
        new_markdown_cell("# Page"),
        figure_cell(None, name="no-caption"),
        figure_cell(named),
        figure_cell("- a list\n", name="a-list"),
    )
    assert "figure 'no-caption' has no caption" in warnings
    assert "caption of figure 'a-list' must begin with a paragraph" in warnings
    page = soup(output / "notebooks/nqf/first.html")
    assert len(page.select("figure#no-caption img")) == 2
    assert "The caption of its own name." in text(page.select_one("figure#two-words figcaption"))
    assert page.select_one("figure#two-words .nqf-stamp").select_one("a") is None
    assert "run-table" not in warnings


# Numbers ----------------------------------------------------------------------------------------------------


def test_numbers_of_the_run_stand_in_the_text(first):
    paragraph = text(first.select_one("section > p"))
    assert paragraph == ("A 1.23%, 1.23 × 10−7, 12, 1.0, 2.2, 2.25, diverged at step 37, 1,234,567, −2.0, yes.")


def test_numbers_of_another_page_stand_in_the_text(site):
    assert "1.2% and" in text(soup(site[0] / "notebooks/nqf/second.html").select_one("section > p"))
    assert text(soup(site[0] / "index.html").select_one("section > p")).endswith("Table 1, 1.")


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("missing", "first did not record it. Recorded: error, times"),
        ("nqf/absent#error", "there is no executed notebook notebooks/nqf/absent.ipynb"),
        ("error:q", "Unknown format code 'q'"),
        ("error[0]", "error is one value, not a list"),
        ("times[2]", "list index out of range"),
        ("Not a name", "write name, name:.3g"),
    ],
)
def test_a_number_that_is_not_there_is_a_warning(tmp_path, role, message):
    text_cell = new_markdown_cell(f"# Page\n\n{{num}}`{role}`")
    output, warnings = small_book(tmp_path, text_cell, recorded(error=1.0, times=[1, 2]))
    assert message in warnings
    assert "first.ipynb" in warnings
    assert f"{role}?" in text(soup(output / "notebooks/nqf/first.html").select_one(".nqf-missing"))


def test_a_prose_page_must_name_the_page_of_a_number(tmp_path):
    assert "this page is not a notebook; name one" in small_book(tmp_path, prose="{num}`error`")[1]


# Boxes ------------------------------------------------------------------------------------------------------


def test_the_boxes_of_the_ledger_are_parsed_where_they_stand(site, first):
    output, _, calls = site
    source = output.parents[1] / "book"
    assert ("nqf/first", source) in calls
    assert source in calls
    assert "box of the page" in [em.get_text() for em in first.select("em")]
    assert "the whole board" in [em.get_text() for em in soup(output / "runs.html").select("em")]


def test_a_page_without_claims_is_a_warning(tmp_path, monkeypatch):
    def refuse(page, folder):
        raise ValueError(f"the ledger has no claims of page {page!r}")

    monkeypatch.setattr(scoreboard, "render_box", refuse)
    warnings = small_book(tmp_path, prose="```{claims-box} nqf/none\n```")[1]
    assert "{claims-box}: the ledger has no claims of page 'nqf/none'" in warnings


def test_the_rerun_box_shows_the_exact_commands(site, first):
    assert [pre.get_text().strip() for pre in first.select(".nqf-rerun pre")] == [
        'make figure F=nqf/first P="eps=1e-08"',
        "papermill notebooks/nqf/first.md out.ipynb -p eps 1e-08",
    ]
    assert "This run took 75 s at preset laptop." in text(first.select_one(".nqf-rerun"))
    second = soup(site[0] / "notebooks/nqf/second.html")
    assert [pre.get_text().strip() for pre in second.select(".nqf-rerun pre")] == [
        'make figure F=nqf/second P="eps=1e-4 rates=[1.0,0.9]"',
        'papermill notebooks/nqf/second.md out.ipynb -p eps 1e-4 -y "rates: [1.0,0.9]"',
    ]


def test_the_rerun_box_holds_the_declaration_of_a_page_that_has_one(site, first, tmp_path):
    assert not first.select(".nqf-form")  # it declares nothing
    declared = new_code_cell("eps: float = 0.1  # abundance [0 .. 1]", metadata={"tags": ["parameters"]})
    output, warnings = small_book(tmp_path, new_markdown_cell("# Page\n\n```{rerun}\n```"), declared)
    assert warnings == ""
    (script,) = soup(output / "notebooks/nqf/first.html").select(".nqf-rerun .nqf-form > script")
    told = json.loads(script.string)
    assert (told["page"], told["published"]) == ("nqf/first", {"preset": "laptop"})
    assert [parameter["bounds"] for parameter in told["parameters"]] == ["from 0 to 1"]


def test_the_rerun_box_refuses_a_parameter_that_the_page_has_not(tmp_path):
    warnings = small_book(tmp_path, new_markdown_cell("# Page\n\n```{rerun} epz=1\n```"))[1]
    assert "{rerun}: nqf/first has no parameter epz" in warnings


def test_the_table_of_runs_lists_every_notebook_in_the_order_of_the_book(site):
    table = soup(site[0] / "runs.html").select_one("table#run-table")
    assert text(table.select_one("caption")).startswith("Table 2 The 2 notebooks of this book took 75 s to run")
    rows = [[text(cell) for cell in row.select("td")] for row in table.select("tbody tr")]
    assert rows == [
        ["Second", "laptop, eps=1e-08", "0.4 s", "2026-08-01", "–", "numpy 2.4, torch 2.13"],
        ["First page with \\sigma", "laptop", "75 s", "2026-08-01", "0123456789+", "numpy 2.4, torch 2.13"],
    ]
    assert table.select_one("a[href*=commit]")["href"] == f"{REPOSITORY}/commit/0123456789"


# Links ------------------------------------------------------------------------------------------------------


def test_buttons_lead_to_the_file_that_git_holds(first):
    links = [link["href"] for link in first.select("a[href]")]
    assert "https://hub/v2/gh/nqf-companion/nqf-companion/main?urlpath=tree/notebooks/nqf/first.md" in links
    assert f"{REPOSITORY}/edit/main/notebooks/nqf/first.md" in links
    assert f"{REPOSITORY}/blob/main/notebooks/nqf/first.md?plain=1" in links
    published = f"blob/{sphinx_links.PUBLISHED_BRANCH}/_sources/notebooks/nqf/first.ipynb"
    assert f"https://colab.research.google.com/github/nqf-companion/nqf-companion/{published}" in links
    assert not [link for link in links if "book/notebooks" in link]


def test_the_copy_for_colab_is_in_the_site(site):
    published = nbformat.read(site[0] / "_sources/notebooks/nqf/first.ipynb", as_version=4)
    assert published.metadata["nqf"]["run"]["commit"] == RUN["commit"]


def test_the_copy_for_colab_installs_the_library_where_it_is_missing(site, monkeypatch):
    copies = list((site[0] / "_sources" / "notebooks").rglob("*.ipynb"))
    assert copies
    for path in copies:
        published = nbformat.read(path, as_version=4)
        nbformat.validate(published)
        assert [cell.get("id") for cell in published.cells].index(sphinx_links.INSTALL_ID) == 0
        assert published.cells[1].cell_type == "markdown"  # its title, once
    asked, shell = [], InteractiveShell.instance()
    monkeypatch.setattr(shell, "run_line_magic", lambda name, line, **_: asked.append((name, line)))
    code = shell.transform_cell(published.cells[0].source)
    exec(code, {"get_ipython": lambda: shell})
    assert asked == []  # it is there
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    exec(code, {"get_ipython": lambda: shell})
    assert asked == [("pip", f'install --quiet "nqflib[lm] @ git+{REPOSITORY}@main"')]


def test_every_page_offers_to_report_a_mistake_with_its_title(site, first):
    anchors = {text(link): link["href"] for link in first.select(".nqf-page-links a")}
    assert anchors["Source of this page"] == f"{REPOSITORY}/blob/main/notebooks/nqf/first.md"
    assert anchors["Found a mistake?"].startswith(f"{REPOSITORY}/issues/new?title=Mistake%20on%20%E2%80%9CFirst%20page")
    prose = {text(a): a["href"] for a in soup(site[0] / "runs.html").select(".nqf-page-links a")}
    assert prose["Source of this page"] == f"{REPOSITORY}/blob/main/book/runs.md"
    assert not [a for a in first.select("a[href*='issues/new']") if "Issue%20on%20page" in a["href"]]


def test_pages_load_nothing_from_outside(site):
    outside = re.compile(r"^(https?:)?//")
    for path in site[0].rglob("*.html"):
        tree = soup(path)
        loaded = [tag.get("src") or "" for tag in tree.select("script, img, iframe, source")]
        loaded += [tag["href"] for tag in tree.select("link[rel=stylesheet], link[rel=preload], link[rel=icon]")]
        assert not [url for url in loaded if outside.match(url)], path
    for path in site[0].rglob("*.css"):
        assert not re.search(r"(@import\s*(url\()?|url\()\s*['\"]?(https?:)?//", path.read_text("utf-8")), path
    (mathjax,) = soup(site[0] / "notebooks/nqf/first.html").select("script[src*=mathjax]")
    file = (site[0] / "notebooks/nqf" / mathjax["src"].split("?")[0]).resolve()
    assert file.stat().st_size > 2_000_000
