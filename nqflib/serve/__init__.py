"""The served book: a Jupyter Server extension that runs a page again with the reader's parameters.

    python -m nqflib.serve        # the book of this checkout on 127.0.0.1; `make serve` calls it
    jupyter server --ServerApp.jpserver_extensions=nqflib.serve=True    # the same in a Jupyter Server of your own

`form` is what a page lets the reader change, `runs` the queue and what is kept of it, `job` the process of one run,
`results` what came out beside the published page, `handlers` the HTTP API, `app` the extension and the server.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    from nqflib.serve.app import RerunExtension

    return [{"module": "nqflib.serve.app", "app": RerunExtension}]
