"""The queue of runs and what is kept of them, below `_build/runs/part/name/eps=1e-08,seed=1/`.

At most as many runs as there are cores go at once; further ones wait in order. Each is a process (`nqflib.serve.job`)
with a kernel below it. A run that takes more time or memory than its budget is stopped and says so. A folder holds
`run.json` (page, parameters, state), the executed notebook, its figures and `result.json`; runs of `make figure` lie in
the same place and are listed too.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nqflib import runner
from nqflib.presets import declaration
from nqflib.serve import job, results
from nqflib.serve.family import end, members, memory

QUEUED, RUNNING, DONE, FAILED, CANCELLED, STOPPED = "queued", "running", "done", "failed", "cancelled", "stopped"
ACTIVE = (QUEUED, RUNNING)
LONGEST_QUEUE = 100
SECONDS_BETWEEN_LOOKS = 0.25


class RunRefused(ValueError):
    """What was asked for cannot be done in the state that the run or the queue is in. The text says why."""


@dataclass
class Run:
    """One run of a page with the reader's parameters."""

    page: str
    given: dict[str, Any]
    folder: Path
    state: str = QUEUED
    message: str = ""
    created: float = field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None
    process: asyncio.subprocess.Process | None = None
    verdict: tuple[str, str] | None = None  # state and message of a run that was ended from outside

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits made from the folder's place below `_build/runs`."""
        return hashlib.sha256(self.folder.relative_to(runner.RUNS).as_posix().encode()).hexdigest()[:12]


class Runs:
    """All runs of this book, kept and waiting.

    Args:
        at_once: how many go at a time.
        seconds: the time budget of each.
        bytes: the memory budget of each, summed over its processes.
    """

    def __init__(self, at_once: int, seconds: float, bytes: float) -> None:
        self.at_once, self.seconds, self.bytes = at_once, seconds, bytes
        self._runs: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, page: str, given: Mapping[str, Any]) -> Run:
        """Queue a run; if the same one is waiting or running already, return that.

        Raises:
            ParameterError: there is no such page, or a name, type or value is not what it declares.
            RunRefused: the queue is full.
        """
        checked = declaration(runner.read_notebook(page).cells).check(given)
        checked = {name: value for name, value in checked.items() if value is not None}  # None leaves it to the preset
        run = Run(page, checked, runner.run_folder(page, checked))
        known = self._runs.get(run.id)
        if known and known.state in ACTIVE:
            return known
        if sum(other.state == QUEUED for other in self._runs.values()) >= LONGEST_QUEUE:
            raise RunRefused(f"{LONGEST_QUEUE} runs are waiting already; cancel some or wait")
        self._remove_folder(run)
        run.folder.mkdir(parents=True)
        _save(run)
        self._runs[run.id] = run
        self._fill()
        return run

    def all(self) -> list[Run]:
        """Every run, the latest first, those that another process left below `_build/runs` included."""
        for path in runner.RUNS.glob("*/*/*"):
            run = _load(path)
            if run and run.id not in self._runs:
                self._runs[run.id] = run
        for run in list(self._runs.values()):
            if run.state not in ACTIVE and not run.folder.is_dir():
                del self._runs[run.id]
        return sorted(self._runs.values(), key=lambda run: -run.created)

    def get(self, id: str) -> Run:
        """The run with an id.

        Raises:
            KeyError: there is none.
        """
        if id not in self._runs:
            self.all()
        return self._runs[id]

    def ahead(self, run: Run) -> int:
        """How many runs wait before this one."""
        return sum(other.state == QUEUED and other.created < run.created for other in self._runs.values())

    def result(self, run: Run) -> dict[str, Any] | None:
        """Figures and differences of a run that succeeded."""
        if run.state != DONE:
            return None
        stored = run.folder / results.FILE
        return json.loads(stored.read_text("utf-8")) if stored.exists() else results.collect(run.page, run.folder)

    def cancel(self, run: Run) -> None:
        """Take a run out of the queue, or end all of its processes.

        Raises:
            RunRefused: the run is over.
        """
        if run.state not in ACTIVE:
            raise RunRefused(f"the run is {run.state} and cannot be cancelled")
        self._end(run, CANCELLED, "cancelled by the reader")

    def delete(self, run: Run) -> None:
        """Remove a run with its folder.

        Raises:
            RunRefused: the run waits or goes on, or its folder does not lie below `_build/runs`.
        """
        if run.state in ACTIVE:
            raise RunRefused("the run is not over; cancel it first")
        self._remove_folder(run)
        self._runs.pop(run.id, None)

    async def close(self) -> None:
        """End everything that waits or goes on."""
        self._closed = True
        for run in list(self._runs.values()):
            if run.state in ACTIVE:
                self._end(run, CANCELLED, "the server was stopped")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)

    def _remove_folder(self, run: Run) -> None:
        root, folder = runner.RUNS.resolve(), run.folder.resolve()
        if run.folder.is_symlink() or root not in folder.parents or len(folder.relative_to(root).parts) != 3:
            raise RunRefused(f"{run.folder} does not lie below {runner.RUNS}; nothing was deleted")
        if folder.exists():
            shutil.rmtree(folder)

    def _fill(self) -> None:
        """Start what waits, in order, as long as there is room."""
        going = sum(run.state == RUNNING for run in self._runs.values())
        waiting = sorted((r for r in self._runs.values() if r.state == QUEUED), key=lambda run: run.created)
        for run in waiting[: max(0, self.at_once - going)]:
            run.state, run.started = RUNNING, time.time()
            task = asyncio.get_running_loop().create_task(self._go(run))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _go(self, run: Run) -> None:
        _save(run)
        try:
            with open(run.folder / "log.txt", "wb") as log:
                run.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "nqflib.serve.job", str(run.folder), str(os.getpid())),
                    cwd=runner.ROOT,
                    env=_environment(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C in the terminal ends the server, which then ends its runs
                )
            await self._watch(run)
            run.state, run.message = run.verdict or _outcome(run)
        except Exception as error:
            run.state, run.message = FAILED, f"{type(error).__name__}: {error}"
        run.ended, run.process = time.time(), None
        _save(run)
        if not self._closed:
            self._fill()

    async def _watch(self, run: Run) -> None:
        """Wait for the process, looking at its time and memory; at the end nothing of its family is left."""
        process, family = run.process, set()
        assert process is not None
        if run.verdict:  # cancelled while the process was being started
            end(members(process.pid))
        while process.returncode is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.wait()), SECONDS_BETWEEN_LOOKS)
            family = members(process.pid) or family
            if run.verdict is None and process.returncode is None:
                self._enforce(run, memory(family))
        end(family)

    def _enforce(self, run: Run, used: float) -> None:
        taken = time.time() - (run.started or run.created)
        if taken > self.seconds:
            self._end(run, STOPPED, f"stopped after {taken:.0f} s: a run may take {self.seconds:.0f} s")
        elif used > self.bytes:
            limit = f"a run may take {self.bytes / 1e9:.1f} GB"
            self._end(run, STOPPED, f"stopped at {used / 1e9:.1f} GB of memory: {limit}")

    def _end(self, run: Run, state: str, message: str) -> None:
        if run.state == QUEUED:
            run.state, run.message, run.ended = state, message, time.time()
            _save(run)
            return
        run.verdict = (state, message)
        if run.process is not None:
            end(members(run.process.pid))


def _environment() -> dict[str, str]:
    """The run's environment: the library of this checkout, and nothing of what the server alone needs."""
    own = ("JUPYTER_TOKEN", "JUPYTER_NO_CONFIG")
    environment = {key: value for key, value in os.environ.items() if key not in own}
    paths = [str(runner.ROOT), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _outcome(run: Run) -> tuple[str, str]:
    assert run.process is not None
    if run.process.returncode == 0:
        return DONE, ""
    said = (run.folder / "log.txt").read_text("utf-8", errors="replace").strip()[-4000:]
    return FAILED, said or f"the process ended with status {run.process.returncode} and said nothing"


def _save(run: Run) -> None:
    told = {name: getattr(run, name) for name in ("page", "given", "state", "message", "created", "started", "ended")}
    aside = run.folder / f"{job.REQUEST}.new"
    aside.write_text(json.dumps(told, indent=1), "utf-8")
    os.replace(aside, run.folder / job.REQUEST)


def _load(folder: Path) -> Run | None:
    """A run that lies in a folder; None if there is nothing of the kind. One that its server left goes on no more."""
    page = folder.parent.relative_to(runner.RUNS).as_posix()
    request, notebook = folder / job.REQUEST, folder / "notebook.ipynb"
    try:
        if request.exists():
            told = json.loads(request.read_text("utf-8"))
            run = Run(**{**told, "page": page, "folder": folder})
            if run.state in ACTIVE:
                run.state, run.message = CANCELLED, "the server was stopped"
            return run
        if notebook.exists():
            given = json.loads(notebook.read_text("utf-8"))["metadata"]["nqf"]["run"]["given"]
            when = notebook.stat().st_mtime
            return Run(page, given, folder, state=DONE, created=when, ended=when)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None
