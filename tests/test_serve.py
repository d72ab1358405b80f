"""A real server over a small checkout: what it runs, what it keeps, and what it refuses."""

import json
import shutil
import signal
import subprocess
import sys

import nbformat
import psutil
import pytest
import served

pytestmark = pytest.mark.book


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two runs at a time, each with 0.8 GB."""
    server = served.Server(served.checkout(tmp_path_factory.mktemp("served")), "--at-once", "2", "--gigabytes", "0.8")
    yield server
    server.close()


@pytest.fixture(scope="module")
def done(server):
    """A finished run, beside a published page that recorded other numbers."""
    prefix = "application/papermill.record/"
    outputs = [
        nbformat.v4.new_output(
            "display_data",
            data={f"{prefix}text/plain": text},
            metadata={"scrapbook": {"name": name, "mime_prefix": prefix}, "nqf": {"quantity": True}},
        )
        for name, text in {"sigma": "0.25", "pair": "[0.25, 1.0]", "gone": "7"}.items()
    ]
    cells = [nbformat.v4.new_code_cell("", outputs=outputs)]
    path = server.folder / "book" / "notebooks" / "nqf" / "tiny.ipynb"
    path.parent.mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"nqf": {"run": {"given": {"flag": True}}}}), path)
    # Text that would end the string, the line and the cell, were it not a literal.
    name = "\"); import os; os._exit(3) #\n'''\\\n${HOME} `id`"
    return server.wait_for(server.run(sigma=0.375, name=name), "done", "failed"), name


def test_a_run_gives_figures_and_the_differences_of_all_recorded_numbers(server, done):
    run, name = done
    assert run["state"] == "done", run["message"]
    rows = {row.pop("name"): row for row in run["result"]["differences"]}
    assert rows == {
        "sigma": {"before": 0.25, "now": 0.375, "difference": 0.125, "same": False},
        "pair": {"before": [0.25, 1.0], "now": [0.375, 1.0], "difference": 0.125, "same": False},
        "name": {"before": None, "now": name, "difference": None, "same": False},
        "gone": {"before": 7, "now": None, "difference": None, "same": False},
    }
    (figure,) = run["result"]["figures"]
    assert figure["alt"] == "The word one in the middle."
    files = {file: server.send("GET", f"nqf/api/runs/{run['id']}/files/{file}?token={server.token}")
             for file in ("one-word.svg", "one-word-dark.svg", "one-word.csv", "notebook.ipynb")}  # fmt: skip
    assert files["one-word.csv"][2] == b"x\n0.375\n"
    assert files["one-word.svg"][2].startswith(b"<?xml")
    assert files["one-word.svg"][2] != files["one-word-dark.svg"][2]
    assert "sandbox" in files["one-word.svg"][1]["Content-Security-Policy"]
    assert nbformat.reads(files["notebook.ipynb"][2].decode(), 4).metadata.nqf.run.given.sigma == 0.375


def test_a_run_is_listed_by_its_parameters_with_the_command_that_repeats_it(server, done):
    (listed,) = [
        run for run in server.ask("GET", "nqf/api/runs?page=nqf/tiny")[1]["runs"] if run["id"] == done[0]["id"]
    ]
    assert listed["name"].startswith("sigma=0.375, name=")
    # make would change this text, so the command is the runner's own, quoted for a shell.
    words = subprocess.run(["sh", "-c", f"printf '%s|' {listed['command']}"], capture_output=True, text=True).stdout
    assert words.split("|")[:6] == ["python", "-m", "nqflib.runner", "figure", "nqf/tiny", "sigma=0.375"]
    assert words.split("|")[6] == f"name={done[1]}"


def test_the_form_is_the_declaration_of_the_page_and_what_was_published(server, done):
    form = server.ask("GET", "nqf/api/forms/nqf/tiny")[1]
    assert [parameter["name"] for parameter in form["parameters"]][:2] == ["preset", "sigma"]
    sigma = form["parameters"][1]
    assert (sigma["help"], sigma["low"], sigma["high"], sigma["default"]) == ("weight scale", 1e-6, 1.0, None)
    assert form["presets"]["smoke"] == {"sigma": 0.5}
    assert form["published"] == {"flag": True}


def test_a_run_of_make_figure_is_listed_too(server, done):
    kept = next(server.folder.glob("_build/runs/nqf/tiny/name*"))
    other = kept.with_name("sigma=0.5")
    other.mkdir()
    notebook = nbformat.read(kept / "notebook.ipynb", 4)
    notebook.metadata.nqf.run.given = {"sigma": 0.5}
    nbformat.write(notebook, other / "notebook.ipynb")
    (run,) = [run for run in server.ask("GET", "nqf/api/runs")[1]["runs"] if run["given"] == {"sigma": 0.5}]
    assert [figure["name"] for figure in server.look(run["id"])["result"]["figures"]] == ["one-word"]
    assert server.ask("DELETE", f"nqf/api/runs/{run['id']}") == (200, {"deleted": run["id"]})
    assert not other.exists()
    assert kept.exists()


def test_nothing_outside_of_the_runs_is_deleted(server, done, tmp_path):
    kept = next(server.folder.glob("_build/runs/nqf/tiny/name*"))
    (tmp_path / "precious").write_text("precious")
    shutil.copy(kept / "notebook.ipynb", tmp_path)
    link = kept.with_name("sigma=0.625")
    link.symlink_to(tmp_path)
    (run,) = [run for run in server.ask("GET", "nqf/api/runs")[1]["runs"] if run["id"] != done[0]["id"]]
    status, told = server.ask("DELETE", f"nqf/api/runs/{run['id']}")
    assert (status, "nothing was deleted" in told["message"]) == (409, True)
    assert (tmp_path / "precious").read_text() == "precious"
    link.unlink()


def test_a_cell_that_fails_says_why(server):
    run = server.wait_for(server.run(counts=[10]), "done", "failed")
    assert run["state"] == "failed"
    assert "ZeroDivisionError" in run["message"]
    assert run["result"] is None


def family(server):
    return {process.pid: process.name() for process in psutil.Process(server.process.pid).children(recursive=True)}


def test_runs_beyond_the_cores_wait_and_cancelling_leaves_no_process(server):
    first, second, third = (server.run(seconds=900 + i) for i in range(3))
    assert server.run(seconds=900) == first  # another tab that asks for the same follows the same run
    assert server.look(third)["state"] == "queued"
    server.wait(lambda: list(family(server).values()).count("sleep") == 2)
    pids = set(family(server))
    assert len(pids) >= 6  # of each: the run, its kernel, the kernel's own child
    told = server.look(first)
    assert told["cells"] == "5 6"
    assert told["progress"].startswith("sleeping ")
    assert server.ask("DELETE", f"nqf/api/runs/{first}")[0] == 409
    for id in (third, first, second):
        assert server.ask("POST", f"nqf/api/runs/{id}/cancel")[0] == 200
    for id in (first, second, third):
        assert server.wait_for(id, "cancelled", "done", "failed")["state"] == "cancelled"
    server.wait(lambda: not served.alive(pids))
    assert family(server) == {}
    assert server.look(third)["started"] is None
    assert server.ask("POST", f"nqf/api/runs/{first}/cancel")[0] == 409


def test_a_run_that_holds_too_much_memory_is_stopped_and_says_so(server):
    run = server.wait_for(server.run(megabytes=1500, seconds=900), "stopped", "done", "failed")
    assert run["state"] == "stopped", run
    assert "of memory: a run may take 0.8 GB" in run["message"]
    server.wait(lambda: family(server) == {})


def test_a_run_that_takes_too_long_is_stopped_and_a_killed_server_leaves_nothing(tmp_path):
    server = served.Server(served.checkout(tmp_path), "--at-once", "1", "--hours", "0.001")
    first, second = server.run(seconds=900), server.run(seconds=901)
    run = server.wait_for(first, "stopped", "done", "failed")
    assert run["state"] == "stopped"
    assert "a run may take 4 s" in run["message"]
    server.wait(lambda: server.look(second)["state"] == "running" and family(server))
    pids = list(family(server))
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    server.wait(lambda: not served.alive(pids))


def test_a_server_that_ends_takes_its_runs_along_and_the_next_one_says_so(tmp_path):
    server = served.Server(served.checkout(tmp_path), "--at-once", "1")
    running, waiting = server.run(seconds=900), server.run(seconds=901)
    server.wait(lambda: family(server))
    pids = list(family(server))
    server.close()
    server.wait(lambda: not served.alive(pids))
    server = served.Server(tmp_path)
    for id in (running, waiting):
        assert (server.look(id)["state"], server.look(id)["message"]) == ("cancelled", "the server was stopped")
    server.close()


def test_without_a_book_there_is_nothing_to_serve(tmp_path):
    served.checkout(tmp_path)
    shutil.rmtree(tmp_path / "_build")
    command = [sys.executable, "-m", "nqflib.serve"]
    result = subprocess.run(command, cwd=tmp_path, env=served.environment(tmp_path), capture_output=True, text=True)
    assert result.returncode == 1
    assert "run `make book` first" in result.stderr


def test_the_server_listens_on_the_loopback_interface_and_has_no_other_service(server):
    connections = psutil.Process(server.process.pid).net_connections()
    assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    for path in ("api/kernels", "api/contents", "api/terminals", "api/sessions", "api/shutdown", "terminals/1", "tree"):
        assert server.send("GET", f"{path}?token={server.token}")[0] == 404, path


# What is refused --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    server = served.Server(served.checkout(tmp_path_factory.mktemp("guarded")))
    (server.folder / "notebooks" / "secret.md").write_text("precious")
    yield server
    server.close()


def asks(parameters, page="nqf/tiny"):
    return json.dumps({"page": page, "parameters": parameters}).encode()


def raw(parameters):
    return b'{"page": "nqf/tiny", "parameters": %s}' % parameters


CODE = "__import__('os').system('touch ran')"
BODIES = {
    "text for a float": (asks({"sigma": "0.5"}), "sigma needs a value of type float, got '0.5'"),
    "code for a float": (asks({"sigma": CODE}), "sigma needs a value of type float"),
    "true for a float": (asks({"sigma": True}), "sigma needs a value of type float, got True"),
    "list for a float": (asks({"sigma": [0.5]}), "sigma needs a value of type float"),
    "object for a float": (asks({"sigma": {"a": 1}}), "sigma needs a value of type float"),
    "fraction for an int": (asks({"megabytes": 1.5}), "megabytes needs a value of type int"),
    "text for an int": (asks({"megabytes": "1"}), "megabytes needs a value of type int"),
    "null where there is a default": (asks({"megabytes": None}), "megabytes needs a value of type int"),
    "number for a bool": (asks({"flag": 1}), "flag needs a value of type bool"),
    "text for a bool": (asks({"flag": "True"}), "flag needs a value of type bool"),
    "number for a text": (asks({"name": 5}), "name needs a value of type str"),
    "list for a text": (asks({"name": ["a"]}), "name needs a value of type str"),
    "number for a list": (asks({"counts": 1}), "counts needs a non-empty list[int]"),
    "text for a list": (asks({"counts": "[1]"}), "counts needs a non-empty list[int]"),
    "no item": (asks({"counts": []}), "counts needs a non-empty list[int]"),
    "wrong item": (asks({"counts": [1, "2"]}), "counts needs a value of type int"),
    "nested list": (asks({"counts": [[1]]}), "counts needs a value of type int"),
    "too large": (asks({"sigma": 1.5}), "sigma must be from 1e-06 to 1, got 1.5"),
    "too small": (asks({"sigma": 0}), "sigma must be from 1e-06 to 1"),
    "negative": (asks({"sigma": -0.5}), "sigma must be from 1e-06 to 1"),
    "item out of range": (asks({"counts": [1, 11]}), "counts must be from 1 to 10, got 11"),
    "huge float": (raw(b'{"sigma": 1e400}'), "sigma must be from 1e-06 to 1"),
    "huge int": (raw(b'{"megabytes": 1%s}' % (b"0" * 400)), "too large"),
    "endless int": (raw(b'{"megabytes": 1%s}' % (b"0" * 5000)), "not JSON that can be read"),
    "not a number": (raw(b'{"sigma": NaN}'), "NaN is not a number that a parameter may have"),
    "infinity": (raw(b'{"sigma": Infinity}'), "Infinity is not a number"),
    "minus infinity": (raw(b'{"sigma": -Infinity}'), "-Infinity is not a number"),
    "no such preset": (asks({"preset": "huge"}), "preset must be one of smoke, laptop"),
    "code after a preset": (asks({"preset": "laptop\nimport os"}), "preset must be one of smoke, laptop"),
    "no such choice": (asks({"kinds": ["a", "d"]}), "kinds must be one of a, b, c"),
    "code for a choice": (asks({"kinds": ['a"]; ' + CODE]}), "kinds must be one of a, b, c"),
    "misspelt name": (asks({"sgima": 0.5}), "did you mean sigma?"),
    "code for a name": (asks({CODE: 1}), "unknown parameter __import__"),
    "dunder name": (asks({"__class__": 1}), "unknown parameter __class__"),
    "assignment for a name": (asks({"sigma = 1; x": 1}), "unknown parameter sigma = 1; x"),
    "parameters as a list": (asks(["sigma"]), 'send {"page": "part/name"'),
    "parameters as text": (asks("sigma=1"), 'send {"page": "part/name"'),
    "something else beside": (b'{"page": "nqf/tiny", "cwd": "/"}', 'send {"page": "part/name"'),
    "no page": (b"{}", 'send {"page": "part/name"'),
    "number for a page": (asks({}, 5), 'send {"page": "part/name"'),
    "no such page": (asks({}, "nqf/none"), "there is no notebook nqf/none. Valid: nqf/tiny"),
    "path for a page": (asks({}, "../../../../etc/passwd"), "there is no notebook ../../../../etc/passwd"),
    "detour to a page": (asks({}, "nqf/../nqf/tiny"), "there is no notebook nqf/../nqf/tiny"),
    "absolute page": (asks({}, "/etc/passwd"), "there is no notebook /etc/passwd"),
    "file of a page": (asks({}, "nqf/tiny.md"), "there is no notebook nqf/tiny.md"),
    "page with a null byte": (asks({}, "nqf/tiny\0"), "there is no notebook nqf/tiny"),
    "a list": (b"[]", "the body must be a JSON object, not list"),
    "a number": (b"5", "the body must be a JSON object, not int"),
    "not JSON": (b"page=nqf/tiny", "not JSON that can be read"),
    "nothing": (b"", "not JSON that can be read"),
    "not UTF-8": (b'{"page": "\xff"}', "not JSON that can be read"),
    "half of it": (asks({"sigma": 0.5})[:-1], "not JSON that can be read"),
    "nested without end": (b"[" * 60_000, "not JSON that can be read"),
    "65 kB": (asks({"name": "a" * 66_000}), "a request may have 64 kB"),
    "10 MB": (asks({"name": "a" * 10_000_000}), "a request may have 64 kB"),
}


def assert_nothing_ran(server):
    assert server.ask("GET", "nqf/api/runs") == (200, {"runs": []})
    assert not (server.folder / "_build" / "runs").exists()
    assert not list(server.folder.rglob("ran"))
    assert family(server) == {}


@pytest.mark.parametrize(("body", "message"), BODIES.values(), ids=BODIES)
def test_a_malformed_request_is_refused_with_a_clear_message(guarded, body, message):
    headers = {"Authorization": f"token {guarded.token}", "Content_Type": "application/json"}
    status, _, text = guarded.send("POST", "nqf/api/runs", body, **headers)
    assert status in (400, 413)
    assert message in json.loads(text)["message"]
    assert_nothing_ran(guarded)


@pytest.fixture
def session(guarded):
    """The headers of a browser that opened the address."""
    _, headers, _ = guarded.send("GET", f"book/index.html?token={guarded.token}")
    login = headers["Set-Cookie"].split(";")[0]
    _, headers, _ = guarded.send("GET", "nqf/api/ping", Cookie=login)
    xsrf = headers["Set-Cookie"].split(";")[0]
    return {"Content_Type": "application/json", "Cookie": f"{login}; {xsrf}", "X_XSRFToken": xsrf.split("=", 1)[1]}


def without(name, **changed):
    return lambda session, server: {k: v for k, v in session.items() if k != name} | changed


STRANGERS = {
    "no cookie": (without("Cookie"), 403),
    "no cookie and a wrong token": (without("Cookie", Authorization="token 0"), 403),
    "a made-up cookie": (without("Cookie", Cookie="username-127-0-0-1=2|1:0|10:1|8:username|4:aaaa|0"), 403),
    "no XSRF header": (without("X_XSRFToken"), 403),
    "a wrong XSRF header": (without("X_XSRFToken", X_XSRFToken="2|aaaa|bbbb|1"), 403),
    "a foreign origin": (without("", Origin="https://example.org"), 404),
    "an origin of another port": (without("", Origin="http://127.0.0.1:1"), 404),
    "the origin of a file": (without("", Origin="null"), 404),
    "a foreign host": (without("", Host="example.org"), 403),
    "a form": (without("Content_Type", Content_Type="application/x-www-form-urlencoded"), 415),
    "plain text": (without("Content_Type", Content_Type="text/plain"), 415),
    "no type": (without("Content_Type"), 415),
    "no length": (without("", Transfer_Encoding="chunked"), 411),
}


@pytest.mark.parametrize(("headers", "status"), STRANGERS.values(), ids=STRANGERS)
def test_a_request_that_does_not_come_from_the_book_is_refused(guarded, session, headers, status):
    answer = guarded.send("POST", "nqf/api/runs", asks({}), **headers(session, guarded))
    assert answer[0] == status
    assert len(json.loads(answer[2])["message"]) > 20
    assert_nothing_ran(guarded)


def test_the_same_session_with_everything_in_place_may_ask(guarded, session):
    status, _, text = guarded.send("POST", "nqf/api/runs", asks({"sigma": 5}), **session)
    assert (status, "sigma must be" in json.loads(text)["message"]) == (400, True)


@pytest.mark.parametrize(
    "path",
    [
        "book/../../notebooks/secret.md",
        "book/%2e%2e/%2e%2e/notebooks/secret.md",
        "book/..%2f..%2fnotebooks/secret.md",
        "book//etc/passwd",
        "nqf/pages/../handlers.py",
        "nqf/pages/%2e%2e/handlers.py",
        "nqf/api/forms/../secret",
        "nqf/api/forms/nqf%2F..%2F..%2Fsecret",
        "nqf/api/runs/..%2f..%2f",
        "nqf/api/runs/000000000000",
        "nqf/api/runs/000000000000/files/..%2frun.json",
        "files/index.html/../../../notebooks/secret.md",
    ],
)
def test_no_path_leads_out_of_the_book(guarded, path):
    status, _, text = guarded.send("GET", path, Authorization=f"token {guarded.token}")
    assert status in (403, 404)
    for content in (b"precious", b"root:", b"JupyterHandler"):
        assert content not in text


@pytest.mark.parametrize(
    "path", ["book/index.html", "nqf/pages/my_runs.html", "nqf/api/runs", "nqf/api/forms/nqf/tiny"]
)
def test_nothing_is_shown_without_the_token(guarded, path):
    status, headers, text = guarded.send("GET", path)
    assert status == 403 or (status == 302 and headers["Location"].startswith("/login"))
    assert b"The book" not in text
    assert b"tiny" not in text


def test_the_address_loses_its_token_and_keeps_its_parameters(guarded):
    status, headers, _ = guarded.send("GET", f"book/index.html?eps=1e-8&token={guarded.token}")
    assert (status, headers["Location"]) == (302, "/book/index.html?eps=1e-8")


def test_a_run_does_not_know_the_token(guarded):
    id = guarded.run(seconds=900)
    guarded.wait(lambda: len(family(guarded)) > 1)
    variables = [psutil.Process(pid).environ() for pid in family(guarded)]
    assert not [name for names in variables for name, value in names.items() if value == guarded.token]
    guarded.ask("POST", f"nqf/api/runs/{id}/cancel")
    guarded.wait_for(id, "cancelled")
