"""The extension of Jupyter Server, and a server of its own for `make serve`.

The server has no kernels, no terminals and no files: it shows the built book and runs the pages' own notebooks. Its
handlers are those of `nqflib.serve.handlers` and of the login.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from typing import Any

import psutil
from jupyter_server.extension.application import ExtensionApp
from jupyter_server.serverapp import ServerApp
from traitlets import Float, Integer, default

from nqflib import runner
from nqflib.serve.handlers import handlers
from nqflib.serve.runs import Runs

BOOK = runner.ROOT / "_build" / "html"


class BookServer(ServerApp):
    """Jupyter Server without the services that nothing here needs."""

    name = "nqf"
    default_services = ("auth", "security")


class RerunExtension(ExtensionApp):
    """Serves the book below `book/` and runs its pages again."""

    name = "nqf"
    extension_url = "/book/index.html"
    load_other_extensions = False
    serverapp_class = BookServer

    at_once = Integer(help="How many runs go at the same time; by default as many as there are cores.").tag(config=True)
    hours = Float(3.0, help="The time budget of a run in hours.").tag(config=True)
    gigabytes = Float(help="The memory budget of a run; by default half of the machine's.").tag(config=True)

    @default("at_once")
    def _cores(self) -> int:
        return max(1, os.cpu_count() or 1)

    @default("gigabytes")
    def _half_of_memory(self) -> float:
        return psutil.virtual_memory().total / 2e9

    @classmethod
    def get_extension_package(cls) -> str:
        return "nqflib.serve"

    def initialize_settings(self) -> None:
        """Give the handlers the runs."""
        self.runs = Runs(max(1, self.at_once), 3600 * self.hours, 1e9 * self.gigabytes)
        self.settings["nqf_runs"] = self.runs

    def initialize_handlers(self) -> None:
        """Add the API and the book."""
        self.handlers.extend(handlers(BOOK))

    async def stop_extension(self) -> None:
        """End what goes on."""
        await self.runs.close()


def main(arguments: list[str] | None = None) -> int:
    """The command line of `python -m nqflib.serve`; returns when the server was stopped."""
    parser = argparse.ArgumentParser(prog="python -m nqflib.serve", description="The book, with figures to run again.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--at-once", type=int, metavar="N", help="runs at the same time (default: the cores)")
    parser.add_argument("--hours", type=float, help="time budget of a run (default: 3)")
    parser.add_argument("--gigabytes", type=float, help="memory budget of a run (default: half of the machine's)")
    options = parser.parse_args(arguments)
    if not (BOOK / "index.html").exists():
        print(f"There is no book in {BOOK}: run `make book` first.", file=sys.stderr)
        return 1
    # A token that is given is not announced a second time by the server itself.
    os.environ.setdefault("JUPYTER_TOKEN", secrets.token_hex(24))
    os.environ["JUPYTER_NO_CONFIG"] = "1"  # another server's settings and extensions are not meant for this one
    traits = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": options.port,
        "ServerApp.port_retries": 0,
        "ServerApp.open_browser": False,
        "ServerApp.allow_root": True,  # in a container everybody is root; a run may do what `make figure` may
        "ServerApp.root_dir": BOOK,
        "ServerApp.max_body_size": 1_000_000,  # the API's own bound, 64 kB, is told in a sentence
        "ServerApp.terminals_enabled": False,
        "ServerApp.log_level": 30,
        "RerunExtension.at_once": options.at_once,
        "RerunExtension.hours": options.hours,
        "RerunExtension.gigabytes": options.gigabytes,
    }
    server = RerunExtension.initialize_server(
        [f"--{key}={value}" for key, value in traits.items() if value is not None]
    )
    print(greeting(server), flush=True)
    server.start()
    return 0


def greeting(server: Any) -> str:
    """What to open, with the token that lets nobody else in."""
    return (
        f"The book: {server.local_url.split('?')[0]}?token={server.identity_provider.token}\n"
        "Change a parameter in the box “Rerun this page” of a figure, then press Run again. Ctrl-C ends the server."
    )
