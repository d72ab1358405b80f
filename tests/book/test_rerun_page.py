"""The page of Figure 2 in a browser: its form and commands from a disk, and its rerun where the book is served."""

import json
import re
import shutil
import subprocess
from types import SimpleNamespace
from urllib.parse import quote

import psutil
import pytest
import served
from playwright.sync_api import expect
from test_book import BLOCKED, violations

from nqflib import runner

pytestmark = [pytest.mark.book, pytest.mark.browser]
FIGURE_2 = "notebooks/nqf/fig2_tracking.html"


@pytest.fixture(scope="module")
def server(html, source, tmp_path_factory):
    """The whole book at preset `smoke`, served from a checkout of its own."""
    folder = served.checkout(tmp_path_factory.mktemp("rerun"))
    for name, target in {"_build/html": html, "notebooks": runner.NOTEBOOKS, "data": runner.ROOT / "data"}.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).symlink_to(target)
    (folder / "book").mkdir()
    (folder / "book" / "notebooks").symlink_to(source / "notebooks")
    server = served.Server(folder, "--at-once", "2")
    yield server
    server.close()


@pytest.fixture
def open_page(page, server):
    """Open an address of the served book in a page that has no network and is logged in."""

    def open_page(address, tab=page):
        tab.goto(server.address.split("?")[0].replace("index.html", address))
        tab.wait_for_selector("button.nqf-run")
        return tab

    page.context.route(BLOCKED, lambda route: route.abort())
    page.goto(server.address)
    return open_page


def commands(page):
    return [text.strip() for text in page.locator(".nqf-rerun pre").all_text_contents()[:2]]


# Locators are polled, since the served page allows no evaluation of text, which `wait_for_function` would need.
def status(page):
    return page.locator(".nqf-status").inner_text()


def wait_until_done(page):
    expect(page.locator(".nqf-status")).to_have_text(re.compile("^(Done in|The run)"), timeout=120_000)
    assert status(page).startswith("Done in"), status(page)


def differences(page):
    rows = page.locator(".nqf-differences tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


@pytest.fixture(scope="module")
def kept(browser, server):
    """What two tabs show that run Figure 2 at once, each with another parameter."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    requests, errors = [], []
    context.route(BLOCKED, lambda route: route.abort())
    context.on("request", lambda request: requests.append(request.url))
    first, second = context.new_page(), context.new_page()
    first.goto(server.address)
    book = server.address.split("?")[0].replace("index.html", FIGURE_2)
    for tab, name, value in ((first, "large", "0.1"), (second, "small", "0.02")):
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda said: errors.append(said.text) if "Content Security" in said.text else None)
        tab.goto(book)
        field = tab.get_by_label(name, exact=True)
        field.fill(value)
        field.press("Tab")
        tab.get_by_role("button", name="Run again").press("Enter")
        expect(tab.locator(".nqf-status")).not_to_be_empty()
    for tab in (first, second):
        wait_until_done(tab)
    yield SimpleNamespace(first=first, second=second, requests=requests, errors=errors)
    context.close()


def test_the_new_figure_stands_beside_the_published_one_with_all_differences(kept, server):
    for tab, name, before, now in ((kept.first, "large", "0.2", "0.1"), (kept.second, "small", "0.01", "0.02")):
        rows = differences(tab)
        assert rows[f"fig2_{name}"][:2] == [before, now]
        other = {"large": "small", "small": "large"}[name]
        assert rows[f"fig2_{other}"][2] == "none"
        published = json.loads((server.folder / "book/notebooks/nqf/fig2_tracking.ipynb").read_text("utf-8"))
        text = json.dumps(published)
        assert len(rows) == len(set(re.findall(r'"name": "(fig2_\w+)"', text)))
        moved = sum(row[2] != "none" for row in rows.values())
        assert f"{moved} of {len(rows)} recorded numbers differ" in status(tab)
        figure = tab.locator("figure.nqf-compared").first
        boxes = [figure.locator(box).bounding_box() for box in (".nqf-themes", ".nqf-yours img.only-light")]
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
        assert abs(boxes[0]["y"] - boxes[1]["y"]) < 60
        assert figure.locator(".nqf-yours-label").inner_text() == f"Your run: preset=smoke, {name}={now}"
        drawn = figure.locator(".nqf-yours img.only-light")
        assert drawn.evaluate("image => image.complete && image.naturalWidth") > 0
        assert tab.locator("figure.nqf-compared").count() == tab.locator("figure.nqf-figure").count()


def test_the_run_asks_for_nothing_outside_and_breaks_no_rule_of_the_page(kept, server):
    assert [url for url in kept.requests if not re.match(rf"http://127\.0\.0\.1:{server.port}/|data:", url)] == []
    assert kept.errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_form_and_outcome_can_be_read_by_everybody_on_a_phone_too(kept, theme):
    tab = kept.first
    tab.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    assert violations(tab) == []
    tab.set_viewport_size({"width": 375, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 375
    tab.set_viewport_size({"width": 1280, "height": 900})


def test_a_link_reopens_the_form_and_the_kept_run(kept, open_page):
    tab = open_page(f"{FIGURE_2}?large=0.1")
    wait_until_done(tab)
    assert differences(tab)["fig2_large"][1] == "0.1"
    assert commands(tab) == [
        'make figure F=nqf/fig2_tracking P="preset=smoke large=0.1"',
        "papermill notebooks/nqf/fig2_tracking.md out.ipynb -p preset smoke -p large 0.1",
    ]


def test_my_runs_lists_reopens_and_deletes(kept, open_page, page, server):
    page.goto(server.address.split("/book/")[0] + "/nqf/pages/my_runs.html")
    row = page.locator("tbody tr", has_text="small=0.02")
    assert row.locator("code").inner_text() == 'make figure F=nqf/fig2_tracking P="preset=smoke small=0.02"'
    assert violations_of_page(page) == []
    row.get_by_role("link").click()
    wait_until_done(page)
    assert page.get_by_label("small", exact=True).input_value() == "0.02"
    page.go_back()
    page.locator("tbody tr", has_text="small=0.02").get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    assert not (server.folder / "_build/runs/nqf/fig2_tracking/preset=smoke,small=0.02").exists()
    assert (server.folder / "_build/runs/nqf/fig2_tracking/large=0.1,preset=smoke").exists()


def violations_of_page(page):
    from axe_playwright_python.sync_playwright import Axe

    return [found["id"] for found in Axe().run(page).response["violations"]]


def test_back_and_forward_keep_the_parameters(kept, open_page):
    tab = open_page(FIGURE_2)
    large = tab.get_by_label("large", exact=True)
    for value in ("0.15", "0.1"):
        large.fill(value)
        large.press("Tab")
    assert tab.url.endswith("?large=0.1")
    tab.go_back()
    assert large.input_value() == "0.15"
    assert "large=0.15" in commands(tab)[0]
    assert tab.locator(".nqf-yours").count() == 0
    tab.go_forward()
    assert large.input_value() == "0.1"
    wait_until_done(tab)  # the run of these parameters is kept and shown
    tab.goto(tab.url.replace(FIGURE_2, "index.html"))
    tab.go_back()
    tab.wait_for_selector("button.nqf-run")
    assert large.input_value() == "0.1"


def test_cancelling_leaves_no_process(open_page, server):
    tab = open_page(f"{FIGURE_2}?preset=laptop")
    tab.get_by_role("button", name="Run again").click()
    expect(tab.locator(".nqf-status")).to_contain_text("cell ", timeout=60_000)
    family = [process.pid for process in psutil.Process(server.process.pid).children(recursive=True)]
    assert len(family) >= 2
    tab.get_by_role("button", name="Cancel").click()
    expect(tab.locator(".nqf-status")).to_have_text("The run was cancelled.")
    server.wait(lambda: not served.alive(family))
    assert not tab.get_by_role("button", name="Cancel").is_visible()


# From a disk --------------------------------------------------------------------------------------------------


@pytest.fixture
def from_disk(page, html):
    def open_page(query=""):
        page.goto((html / FIGURE_2).as_uri() + query)
        page.wait_for_selector(".nqf-fields")
        return page

    return open_page


def test_a_static_page_shows_the_command_for_the_values_in_the_form(from_disk):
    page = from_disk()
    assert page.locator("button.nqf-run").count() == 0
    page.get_by_label("preset", exact=True).select_option("laptop")
    assert page.get_by_label("duration", exact=True).input_value() == "1"  # follows the preset
    page.get_by_label("architectures", exact=True).fill("multi-head, perceptron")
    page.get_by_label("between", exact=True).fill("[1e-3, 0.05]")
    page.get_by_label("seed", exact=True).fill("7")
    make, papermill = commands(page)
    given = "\\\"architectures=['multi-head','perceptron']\\\" between=[0.001,0.05] seed=7"
    assert make == f'make figure F=nqf/fig2_tracking P="{given}"'
    # What a shell, make and again a shell leave of it is what the form holds.
    rule = "figure:\n\t@printf '%s\\n' $(F) $(P)\n"
    quiet = make.replace("make", "make --no-print-directory -f -")  # this test itself may run under make
    out = subprocess.run(["sh", "-c", quiet], input=rule, capture_output=True, text=True)
    words = out.stdout.splitlines()
    assert words[0] == "nqf/fig2_tracking"
    told = {"architectures": ["multi-head", "perceptron"], "between": [0.001, 0.05], "seed": 7}
    assert runner.parse_assignments(words[1:]) == told
    assert papermill.endswith(
        "out.ipynb -y \"architectures: ['multi-head','perceptron']\" -y \"between: [0.001,0.05]\" -p seed 7"
    )
    page.get_by_role("button", name="As published").click()
    assert commands(page)[0] == 'make figure F=nqf/fig2_tracking P="preset=smoke"'
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("large", "0.6", "must be from 0.001 to 0.5"),
        ("large", "$(touch x)", "write a number"),
        ("large", '0.1" ; touch x #', "write a number"),
        ("seed", "1.5", "write a whole number"),
        ("seed", "`id`", "write a whole number"),
        ("architectures", "perceptron', __import__('os')", "must be one of perceptron"),
        ("between", "", "give at least one value"),
        ("between", "0.01\nrm -rf x", "write a number"),
    ],
)
def test_a_link_with_a_wrong_or_wicked_value_shows_what_is_wrong_and_no_command(from_disk, name, value, message):
    page = from_disk(f"?{name}={quote(value)}")
    field = page.get_by_label(name, exact=True)
    assert field.get_attribute("aria-invalid") == "true"
    assert message in page.locator(f"#nqf-form-nqf-fig2_tracking-{name}-error").inner_text()
    assert commands(page) == ["# correct the marked parameter first"] * 2
    field.fill({"large": "0.1", "seed": "3", "architectures": "convolution", "between": "0.01"}[name])
    assert commands(page)[0].startswith("make figure F=nqf/fig2_tracking P=")
    assert field.get_attribute("aria-invalid") is None


def test_the_command_is_copied_by_its_button(from_disk):
    page = from_disk("?large=0.1")
    page.locator(".nqf-rerun button.copybtn").first.click()
    page.get_by_label("seed", exact=True).fill("")
    page.get_by_label("seed", exact=True).press("Control+v")
    pasted = page.get_by_label("seed", exact=True).input_value()
    assert pasted == 'make figure F=nqf/fig2_tracking P="preset=smoke large=0.1"'
