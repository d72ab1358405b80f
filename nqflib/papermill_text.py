"""papermill on text notebooks: `papermill notebooks/nqf/fig3_features.md out.ipynb -p eps 1e-8` just works.

papermill loads this module at every start, through the entry point group `papermill.io`. It chooses handlers by the
prefix of a path, and its own handler for local files always wins by name, so that handler is wrapped in place: a
path that ends in .md is read through jupytext, and everything else is left to papermill.

papermill only warns of a parameter that a notebook does not declare, and then runs with the default. For the
notebooks of this project (those with a cell tagged `presets`) a wrong name, type or value is refused instead.
"""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any


class TextNotebookHandler:
    """papermill's own handler for local files, except that it reads .md notebooks through jupytext."""

    def __init__(self, local: Any = None):
        self._local = local

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def read(self, path: str) -> str:
        text = self._local.read(path)
        if not str(path).endswith(".md"):
            return text
        import jupytext
        import nbformat

        _check_parameters_before_running()
        return nbformat.writes(jupytext.reads(text, fmt="md"))


# papermill asks for this name while it is itself half imported, so it has to exist before papermill is imported.
handler = TextNotebookHandler()


def _wrap_local_handler() -> None:
    from papermill.iorw import papermill_io

    for index, (scheme, local) in enumerate(papermill_io._handlers):
        if scheme == "local" and not isinstance(local, TextNotebookHandler):
            handler._local = local
            papermill_io._handlers[index] = (scheme, handler)
    warnings.filterwarnings("ignore", message=r"The specified file \(.*\.md\) does not end in one of")


def _check_parameters_before_running() -> None:
    """Let papermill refuse what our runner refuses, and show in `--help-notebook` what preset `laptop` sets."""
    from papermill import execute, inspection
    from papermill.models import Parameter

    if hasattr(execute.parameterize_notebook, "__wrapped__"):
        return
    parameterize_notebook, infer_parameters = execute.parameterize_notebook, inspection._infer_parameters

    @wraps(parameterize_notebook)
    def checked(nb: Any, parameters: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return parameterize_notebook(nb, _checked(nb, parameters), *args, **kwargs)

    @wraps(infer_parameters)
    def declared_parameters(nb: Any, *args: Any, **kwargs: Any) -> Any:
        # papermill's own reading does not know the type `float | None`.
        from nqflib.presets import declaration

        declared = declaration(nb.cells)
        if not declared.presets:
            return infer_parameters(nb, *args, **kwargs)
        return [Parameter(p.name, p.type, declared.default(p.name), p.help) for p in declared.parameters.values()]

    execute.parameterize_notebook = checked
    execute._infer_parameters = inspection._infer_parameters = declared_parameters


def _checked(nb: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    import click

    from nqflib.presets import ParameterError, declaration

    declared = declaration(nb.cells)
    if not declared.presets:
        return parameters
    try:
        return declared.check(parameters)
    except ParameterError as error:
        # Inside papermill's own command a message of one line, elsewhere the error itself.
        if click.get_current_context(silent=True):
            raise click.ClickException(str(error)) from None
        raise


_wrap_local_handler()
