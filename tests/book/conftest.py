"""The book at preset `smoke`, built once for all tests of a run: every notebook executed, warnings being errors."""

import contextlib
import functools
import http.server
import os
import shutil
import threading

import pytest
from filelock import FileLock, Timeout

from nqflib import runner, site


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all workers of this run of the tests share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def source(shared):
    """A copy of book/ with every notebook executed at preset `smoke`."""
    source = shared / "book"
    with FileLock(shared / "source.lock"):
        if not (source / "_toc.yml").exists():
            site.write_table_of_contents()
            shutil.copytree(site.BOOK, source, ignore=shutil.ignore_patterns("notebooks"))
    # Workers share the notebooks between them: first those that nobody has in hand, then wait for the others.
    for timeout in (0, -1):
        for page in runner.pages():
            executed = source / "notebooks" / f"{page}.ipynb"
            executed.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(Timeout), FileLock(f"{executed}.lock", timeout=timeout):
                if not executed.exists():
                    runner.run_notebook(page, {"preset": "smoke"}, executed)
    return source


@pytest.fixture(scope="session")
def html(shared, source):
    """The folder of the built site."""
    with FileLock(shared / "site.lock"):
        if not (shared / "_build" / "html" / "index.html").exists():
            site.build(source, shared)
    return shared / "_build" / "html"


@pytest.fixture(scope="session")
def served(html):
    """The address of the site, served from this process on the loopback interface."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(html))
    handler.log_message = lambda *arguments: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
