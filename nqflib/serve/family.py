"""The processes of one run: it starts a kernel, which gets a session of its own and may start more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def members(pid: int) -> set[psutil.Process]:
    """A process and everything below it; empty if it is gone."""
    try:
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def memory(family: Iterable[psutil.Process]) -> float:
    """The resident memory of all of them in bytes."""
    total = 0
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_info().rss
    return float(total)


def end(family: Iterable[psutil.Process]) -> None:
    """Kill all of them and what they start meanwhile: each is halted before its children are looked for."""
    halted: set[psutil.Process] = set()
    found = set(family)
    while found:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        halted |= found
        found = {child for process in found for child in _children(process)} - halted
    for process in halted:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
