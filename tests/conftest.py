"""For all tests: one thread a worker, and one Chromium a worker, beside which Playwright allows no second one."""

import contextlib
import os

import chromium
import pytest

from nqflib.runner import THREADS

# Before torch is loaded: workers that share cores spin at each other's barriers, and take ten times as long.
os.environ |= THREADS
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = chromium.find()
    if path is None:
        message = "NO CHROMIUM: browser tests need one; `make test` says how to get it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page that keeps what went wrong on it and what it asked for: `page.errors`, `page.requests`."""
    with contextlib.closing(browser.new_context(viewport={"width": 1280, "height": 900})) as context:
        page = context.new_page()
        page.errors, page.requests = [], []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("request", lambda request: page.requests.append(request.url))
        yield page
