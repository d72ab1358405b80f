"""The HTTP API of the served book. Jupyter Server checks token, XSRF, host and origin before anything here runs.

    GET    nqf/api/ping                     how many runs go at once
    GET    nqf/api/forms/part/name          the form of a page
    GET    nqf/api/runs?page=part/name      all runs, or those of a page, the latest first
    POST   nqf/api/runs                     {"page": ..., "parameters": {...}}: queue a run
    GET    nqf/api/runs/id                  one run: state, progress, and when it is done figures and differences
    POST   nqf/api/runs/id/cancel           end it
    DELETE nqf/api/runs/id                  remove what it left below _build/runs
    GET    nqf/api/runs/id/files/name       a figure, its numbers, or the executed notebook
    GET    book/...                         the built book
    GET    nqf/pages/my_runs.html           the list of runs

A request is refused with a status and `{"message": ...}`. Nothing of a request is run as code or used as a path: pages
are looked up in the list of notebooks, runs by the digits of their id, files in the list that the run itself left.
"""

from __future__ import annotations

import json
import re
import shlex
from http.client import responses
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from tornado import web

from nqflib import runner
from nqflib.presets import ParameterError, declaration
from nqflib.serve import form, job
from nqflib.serve.runs import QUEUED, Run, RunRefused, Runs

LARGEST_BODY = 64 * 1024
LONGEST_MESSAGE = 1000
TYPES = {".svg": "image/svg+xml", ".png": "image/png", ".csv": "text/csv", ".ipynb": "application/x-ipynb+json"}
PAGES = Path(__file__).with_name("pages")
NEW_ADDRESS = "open the address that `make serve` printed, which holds the token"


class Refused(web.HTTPError):
    """A request that is refused: status and a sentence for the reader."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, reason=responses.get(status))
        self.message = message


@web.stream_request_body
class RerunHandler(APIHandler):
    """Common to the handlers of the API: who may, how long a body may be, and how a refusal is said."""

    auth_resource = "nqf"

    @property
    def runs(self) -> Runs:
        return self.settings["nqf_runs"]

    async def prepare(self) -> None:
        self.body = b""
        await super().prepare()
        # The body is not read before this, so that a long one never takes memory.
        if "Transfer-Encoding" in self.request.headers:
            raise Refused(411, "say the length of the request in Content-Length")
        if int(self.request.headers.get("Content-Length", 0)) > LARGEST_BODY:
            raise Refused(413, f"a request may have {LARGEST_BODY // 1024} kB")

    def data_received(self, chunk: bytes) -> None:
        self.body += chunk

    def get_login_url(self) -> str:
        raise Refused(403, NEW_ADDRESS)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None))[1]
        said = {
            403: f"not allowed: {NEW_ADDRESS}",
            404: "there is nothing here",
            405: "this method is not allowed here",
        }
        message = getattr(error, "message", "") or said.get(status_code, responses.get(status_code, "error"))
        if not self.check_host() or not self.check_origin():
            message = "requests from other sites are refused"
        elif isinstance(error, web.HTTPError) and "xsrf" in (error.log_message or "").lower():
            message = "the request did not come from a page of this book: the X-XSRFToken header is missing or wrong"
        self.finish(json.dumps({"message": message[:LONGEST_MESSAGE]}))

    def run(self, id: str) -> Run:
        try:
            return self.runs.get(id)
        except KeyError:
            raise Refused(404, f"there is no run {id}") from None

    def json_body(self) -> dict[str, Any]:
        """The body as a JSON object without NaN and infinities."""
        if self.request.headers.get("Content-Type", "").split(";")[0].strip() != "application/json":
            raise Refused(415, "send JSON with Content-Type: application/json")
        try:
            body = json.loads(self.body, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON that can be read: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, f"the body must be a JSON object, not {type(body).__name__}")
        return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that a parameter may have")


class PingHandler(RerunHandler):
    @web.authenticated
    @authorized
    def get(self) -> None:
        _ = self.xsrf_token  # sets the cookie that the page sends back
        self.finish(json.dumps({"name": "nqf", "at_once": self.runs.at_once}))


class FormHandler(RerunHandler):
    @web.authenticated
    @authorized
    def get(self, page: str) -> None:
        try:
            declared = declaration(runner.read_notebook(page).cells)
        except ParameterError as error:
            raise Refused(404, str(error)) from None
        executed = runner.EXECUTED / f"{page}.ipynb"
        run = json.loads(executed.read_text("utf-8"))["metadata"]["nqf"].get("run", {}) if executed.exists() else {}
        self.finish(json.dumps(form.form(page, declared, run.get("given", {}))))


class RunsHandler(RerunHandler):
    @web.authenticated
    @authorized
    def get(self) -> None:
        page = self.get_query_argument("page", None)
        found = [run for run in self.runs.all() if page in (None, run.page)]
        self.finish(json.dumps({"runs": [told(self.runs, run) for run in found]}))

    @web.authenticated
    @authorized
    def post(self) -> None:
        body = self.json_body()
        unknown = set(body) - {"page", "parameters"}
        page, parameters = body.get("page"), body.get("parameters", {})
        if unknown or not isinstance(page, str) or not isinstance(parameters, dict):
            raise Refused(400, 'send {"page": "part/name", "parameters": {"name": value}} and nothing else')
        try:
            run = self.runs.start(page, parameters)
        except (ParameterError, OverflowError) as error:
            raise Refused(400, str(error)) from None
        except RunRefused as error:
            raise Refused(429, str(error)) from None
        self.set_status(201)
        self.finish(json.dumps(told(self.runs, run)))


class RunHandler(RerunHandler):
    @web.authenticated
    @authorized
    def get(self, id: str) -> None:
        run = self.run(id)
        self.finish(json.dumps({**told(self.runs, run), "result": self.runs.result(run)}))

    @web.authenticated
    @authorized
    def delete(self, id: str) -> None:
        try:
            self.runs.delete(self.run(id))
        except RunRefused as error:
            raise Refused(409, str(error)) from None
        self.finish(json.dumps({"deleted": id}))


class CancelHandler(RerunHandler):
    @web.authenticated
    @authorized
    def post(self, id: str) -> None:
        run = self.run(id)
        try:
            self.runs.cancel(run)
        except RunRefused as error:
            raise Refused(409, str(error)) from None
        self.finish(json.dumps(told(self.runs, run)))


class FileHandler(RerunHandler):
    """A file of a run. It is a picture or a download, never a page that could run scripts in the book's name."""

    @property
    def content_security_policy(self) -> str:
        return super().content_security_policy + "; style-src 'unsafe-inline'; sandbox"

    @web.authenticated
    @authorized
    def get(self, id: str, name: str) -> None:
        run = self.run(id)
        result = self.runs.result(run) or {"figures": []}
        offered = {"notebook.ipynb"} if result["figures"] or run.state == "done" else set()
        for figure in result["figures"]:
            offered |= {figure["light"], figure["dark"], figure["png"], *figure["csv"]}
        if name not in offered or not (run.folder / name).is_file():
            raise Refused(404, f"run {id} offers {', '.join(sorted(offered)) or 'no files'}")
        suffix = Path(name).suffix
        if suffix in (".csv", ".ipynb"):
            self.set_attachment_header(name)
        self.set_header("Cache-Control", "no-cache")
        self.finish((run.folder / name).read_bytes(), set_content_type=TYPES[suffix])


class BookHandler(JupyterHandler, web.StaticFileHandler):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The built book, and the few pages of this package."""

    auth_resource = "nqf"

    @property
    def content_security_policy(self) -> str:
        own = "default-src 'self' 'unsafe-inline' data:; base-uri 'self'; form-action 'self'"
        return f"{super().content_security_policy}; {own}"

    @web.authenticated
    @authorized
    async def get(self, path: str, include_body: bool = True) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if "token" in self.request.arguments:
            # The login cookie is set; the address of a page that a reader passes on must not hold the token.
            rest = [
                (k, v.decode(errors="replace"))
                for k, vs in self.request.query_arguments.items()
                if k != "token"
                for v in vs
            ]
            self.redirect(self.request.path + (f"?{urlencode(rest)}" if rest else ""))
            return
        _ = self.xsrf_token
        await web.StaticFileHandler.get(self, path, include_body)

    @web.authenticated
    @authorized
    async def head(self, path: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await web.StaticFileHandler.head(self, path)


def told(runs: Runs, run: Run) -> dict[str, Any]:
    """A run as the API tells it."""
    words = [f"{name}={form.literal(value)}" for name, value in run.given.items()]
    return {
        "id": run.id,
        "page": run.page,
        "given": run.given,
        "name": ", ".join(words) or "as published",
        "command": command(run.page, run.given),
        "state": run.state,
        "message": run.message[-LONGEST_MESSAGE:],
        "ahead": runs.ahead(run) if run.state == QUEUED else 0,
        "cells": _line(run.folder / job.CELLS),
        "progress": _line(run.folder / job.BAR),
        "created": run.created,
        "started": run.started,
        "ended": run.ended,
    }


def command(page: str, given: dict[str, Any]) -> str:
    """The shell command that makes the same run; `book/_static/rerun.js` writes the same for what its form holds."""
    words = [f"{name}={form.literal(value)}" for name, value in given.items()]
    if not all(
        re.fullmatch(r"[\w.,=+\-\[\]']*", word, re.ASCII) for word in words
    ):  # make would not pass it on unchanged
        return shlex.join(["python", "-m", "nqflib.runner", "figure", page, *words])
    quoted = " ".join(f'\\"{word}\\"' if "'" in word else word for word in words)
    return f"make figure F={page}" + (f' P="{quoted}"' if words else "")


def _line(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")[:200]
    except OSError:
        return ""


def handlers(book: Path) -> list[tuple[Any, ...]]:
    """Patterns and handlers of the extension."""
    id = r"(?P<id>[0-9a-f]{12})"
    return [
        (r"/nqf/api/ping", PingHandler),
        (r"/nqf/api/forms/(?P<page>.+)", FormHandler),
        (r"/nqf/api/runs", RunsHandler),
        (rf"/nqf/api/runs/{id}", RunHandler),
        (rf"/nqf/api/runs/{id}/cancel", CancelHandler),
        (rf"/nqf/api/runs/{id}/files/(?P<name>[\w.-]+)", FileHandler),
        (r"/nqf/pages/(.*)", BookHandler, {"path": str(PAGES)}),
        (r"/book/(.*)", BookHandler, {"path": str(book), "default_filename": "index.html"}),
    ]
