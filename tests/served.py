"""A small checkout of its own and a real server over it, for the tests of `nqflib.serve`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import psutil

from nqflib import runner

NOTEBOOK = """---
kernelspec:
  display_name: Python 3
  language: python
  name: python3
nqf:
  part: nqf
  order: 10
---

# Tiny

```{code-cell} python
:tags: [parameters]
preset: str = "laptop"  # size of the run [smoke | laptop]
sigma: float | None = None  # weight scale [1e-6 .. 1]
seconds: float = 0.0  # how long to sleep [0 .. 1000]
megabytes: int = 0  # how much to hold [0 .. 10000]
name: str = "a"  # any text
kinds: list[str] = ["a"]  # some [a | b | c]
counts: list[int] = [1, 2]  # whole numbers [1 .. 10]
flag: bool = False  # whether
```

```{code-cell} python
:tags: [presets]
presets = {"smoke": {"sigma": 0.5}, "laptop": {"sigma": 0.25}}
```

```{code-cell} python
import subprocess
import time
from nqflib.presets import resolve
from nqflib.progress import progress
settings = resolve(presets, preset, sigma=sigma)
1 / (10 - counts[0])
held = b"x" * (1_000_000 * megabytes)
child = subprocess.Popen(["sleep", "1000"]) if seconds > 50 else None
for _ in progress(range(100), "sleeping"):
    time.sleep(seconds / 100)
```

```{code-cell} python
from nqflib.figures import show
from nqflib.quantities import record
record(sigma=settings.sigma, pair=[settings.sigma, 1.0], name=name)
alt = "The word one in the middle."
show(lambda figure: figure.text(0.5, 0.5, "one"), "one-word", alt=alt, data={"x": [settings.sigma]})
```
"""


def checkout(folder):
    """A folder with the library, one small notebook and a book of one page."""
    shutil.copytree(runner.ROOT / "nqflib", folder / "nqflib")
    shutil.copy(runner.ROOT / "requirements.lock", folder)
    (folder / "notebooks" / "nqf").mkdir(parents=True)
    (folder / "notebooks" / "nqf" / "tiny.md").write_text(NOTEBOOK)
    (folder / "_build" / "html").mkdir(parents=True)
    (folder / "_build" / "html" / "index.html").write_text("<!doctype html><title>book</title>The book.")
    return folder


def alive(pids):
    """Those of the processes that still run; what waits to be reaped by its parent does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def environment(folder):
    return {**os.environ, "PYTHONPATH": str(folder), "JUPYTER_TOKEN": "0123456789abcdef"}


class Server:
    """A server as `make serve` starts it, over a checkout."""

    def __init__(self, folder, *options):
        self.folder = folder
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "nqflib.serve", "--port", str(self.port), *options]
        self.log = folder / "server.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=log, stderr=log)
        self.wait(lambda: self.process.poll() is not None or b"token=" in self.log.read_bytes())
        found = re.search(r"http://\S+\?token=(\w+)", self.log.read_text())
        assert found, self.log.read_text()
        self.address, self.token = found[0], found[1]
        self.wait(lambda: self.ask("GET", "nqf/api/ping")[0] == 200)

    def send(self, method, path, body=None, **headers):
        """Status, headers and body of the answer to a raw request; `_` in the name of a header stands for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.putrequest(method, f"/{path}", skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            if body is not None and "Transfer_Encoding" not in headers:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a body that is too long is not read
                connection.send(body or b"")
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def ask(self, method, path, value=None):
        """Status and JSON of the answer to somebody who has the token."""
        body = None if value is None else json.dumps(value).encode()
        headers = {"Authorization": f"token {self.token}", "Content_Type": "application/json"}
        try:
            status, _, text = self.send(method, path, body, **headers)
        except ConnectionRefusedError:
            return 0, {}
        return status, json.loads(text)

    def run(self, **parameters):
        """Start a run of the small page; its id."""
        status, told = self.ask("POST", "nqf/api/runs", {"page": "nqf/tiny", "parameters": parameters})
        assert status == 201, told
        return told["id"]

    def look(self, id):
        return self.ask("GET", f"nqf/api/runs/{id}")[1]

    def wait_for(self, id, *states):
        self.wait(lambda: self.look(id)["state"] in states)
        return self.look(id)

    def wait(self, happened, seconds=60):
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def close(self):
        self.process.terminate()
        self.process.wait(20)
