"""What is rerun when: doit compares the content of everything a page depends on with the last good run.

`make book` calls `doit -n <cores> book`. A page depends on its notebook, its preset, the modules of nqflib that it
imports, the manifest of the data if it reads data, and the pinned versions; the site on the executed pages and on
everything below book/.
"""

import os
import shutil
import sys
import threading
import time

from doit.action import CmdAction
from doit.exceptions import TaskFailed
from doit.reporter import ConsoleReporter
from doit.tools import config_changed

from nqflib import runner, site
from nqflib.progress import VARIABLE

ROOT = runner.ROOT
BUILD = ROOT / "_build"
PROGRESS = BUILD / "progress"
PRESET = os.environ.get("PRESET") or "laptop"
PAGES = runner.pages()


class BookReporter(ConsoleReporter):
    """One line a page when it is done; on a terminal also what the running pages say of their progress."""

    desc = "pages with seconds and progress"

    def initialize(self, tasks, selected_tasks):
        super().initialize(tasks, selected_tasks)
        self.pages = sum(task.name.startswith("page:") for task in tasks.values())
        self.done, self.started = 0, {}
        shutil.rmtree(PROGRESS, ignore_errors=True)
        if sys.stderr.isatty():
            threading.Thread(target=self.repaint, daemon=True).start()

    def repaint(self):
        while True:
            time.sleep(0.3)
            now = time.monotonic()
            parts = []
            for name, start in list(self.started.items()):
                file = PROGRESS / name.replace("/", "-")
                line = file.read_text() if file.exists() else "starting"
                parts.append(f"{name} {now - start:.0f} s ({line})")
            if parts:
                sys.stderr.write("\r\033[K" + " | ".join(parts)[: shutil.get_terminal_size().columns - 1])
                sys.stderr.flush()

    def say(self, text):
        self.outstream.write(("\r\033[K" if sys.stderr.isatty() else "") + text + "\n")
        self.outstream.flush()

    def execute_task(self, task):
        if task.name.startswith("page:"):
            self.started[task.name.removeprefix("page:")] = time.monotonic()
        elif task.name == "site":
            self.say("Building the site")

    def add_success(self, task):
        page = task.name.removeprefix("page:")
        if page in self.started:
            self.done += 1
            self.say(f"[{self.done}/{self.pages}] {page} {time.monotonic() - self.started.pop(page):.0f} s")

    def skip_uptodate(self, task):
        if task.name.startswith("page:"):
            self.done += 1

    def add_failure(self, task, fail):
        self.started.pop(task.name.removeprefix("page:"), None)
        super().add_failure(task, fail)


DOIT_CONFIG = {
    "backend": "json",
    "dep_file": str(BUILD / "doit.json"),
    "default_tasks": ["book"],
    "reporter": BookReporter,
    "verbosity": 0,
}
BUILD.mkdir(exist_ok=True)


def executed(page):
    return runner.EXECUTED / f"{page}.ipynb"


def task_page():
    """Run a notebook through papermill."""
    for page in PAGES:
        given = {} if PRESET == "laptop" else {"preset": PRESET}
        words = " ".join(f"{name}={value}" for name, value in given.items())
        command = f"{sys.executable} -m nqflib.runner page {page} {words}"
        yield {
            "name": page,
            "actions": [CmdAction(command, env={**os.environ, VARIABLE: str(PROGRESS / page.replace("/", "-"))})],
            "file_dep": [str(path) for path in runner.inputs(page)],
            "uptodate": [config_changed({"given": given, "torch": runner._version("torch")})],
            "targets": [str(executed(page))],
        }


def task_toc():
    """Write the table of contents from the front matter of the notebooks."""
    return {
        "actions": [(site.write_table_of_contents, [])],
        "file_dep": [str(site.BOOK / "parts.yml"), *(str(executed(page)) for page in PAGES)],
        "uptodate": [config_changed(" ".join(PAGES))],
        "targets": [str(site.TOC)],
    }


def task_site():
    """Build the book from the executed notebooks."""
    prose = [p for p in site.BOOK.rglob("*") if p.is_file() and runner.EXECUTED not in p.parents]
    claims = (ROOT / "data" / "claims").rglob("*.yml")
    larger = (ROOT / "data" / "reference").rglob("*.json")
    code = runner.import_closure("from nqflib import sphinx_ext")
    files = {site.TOC, site.CONFIG, *prose, *claims, *larger, *code, *map(executed, PAGES)}
    return {
        "actions": [build_site],
        "file_dep": sorted(map(str, files)),
        "targets": [str(BUILD / "html" / "index.html")],
    }


def build_site():
    for stale in set(runner.EXECUTED.rglob("*.ipynb")) - set(map(executed, PAGES)):
        stale.unlink()
    try:
        site.build(site.BOOK, ROOT)
    except site.BuildFailed as error:
        return TaskFailed(str(error))


def task_book():
    """Every page and the site."""
    return {"actions": None, "task_dep": ["site"]}
