"""The process of one run: `python -m nqflib.serve.job FOLDER SERVER`: page and parameters are in `FOLDER/run.json`.

What the run says of itself goes to two small files that the server reads: `cells` ("7 17": in the seventh of 17
cells) and `progress`, the line of the notebook's own progress bar. Errors go to standard error.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nqflib import runner
from nqflib.presets import ParameterError
from nqflib.progress import VARIABLE, write_line
from nqflib.serve import results
from nqflib.serve.family import end, members

REQUEST = "run.json"
CELLS = "cells"
BAR = "progress"


def main(folder: Path, server: int) -> int:
    """Run what `run.json` asks for, as long as the server lives; the exit status says whether it succeeded.

    Args:
        folder: the run's folder.
        server: the process id of the server, which started this process.
    """
    request = json.loads((folder / REQUEST).read_text("utf-8"))
    threading.Thread(target=_end_with_server, args=[server], daemon=True).start()
    os.environ[VARIABLE] = str(folder / BAR)
    _tell_cells(folder)
    try:
        # The half-run notebook lies in the run's own folder, so that two runs of one page never meet.
        output = folder / "notebook.ipynb"
        runner.run_notebook(request["page"], request["given"], output, aside=folder / "unfinished.ipynb")
        results.collect(request["page"], folder)
    except (ParameterError, runner.NotebookFailed) as error:
        print(re.sub(r"\x1b\[[\d;]*m", "", str(error)), file=sys.stderr)
        return 1
    return 0


def _tell_cells(folder: Path) -> None:
    """Let papermill's default engine say which cell it is in."""
    from papermill.engines import NBClientEngine, papermill_engines

    class TellingEngine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, *args: Any, **kwargs: Any) -> Any:
            start = nb_man.cell_start

            def cell_start(cell: Any, cell_index: int = 0, **more: Any) -> None:
                (folder / BAR).unlink(missing_ok=True)  # the bar of an earlier cell
                write_line(folder / CELLS, f"{cell_index + 1} {len(nb_man.nb.cells)}")
                start(cell, cell_index, **more)

            nb_man.cell_start = cell_start
            return super().execute_managed_notebook(nb_man, kernel_name, *args, **kwargs)

    papermill_engines.register(None, TellingEngine)


def _end_with_server(server: int) -> None:
    """A server that was killed cannot end its runs."""
    while os.getppid() == server:
        time.sleep(1)
    end(process for process in members(os.getpid()) if process.pid != os.getpid())
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
