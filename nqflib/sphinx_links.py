"""Links of the built pages that lead somewhere, and mathematics without a network.

The book renders `book/notebooks/x.ipynb`, which git does not hold: git holds `notebooks/x.md`, and the published
site the executed copy. The theme's buttons point at the first, so they are repointed here. The executed copy gets a
first cell that installs the library where it is missing, such as on Colab.
"""

from __future__ import annotations

import json
import re
from html import escape, unescape
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.fileutil import copy_asset_file
from sphinx.util.osutil import ensuredir

PUBLISHED_BRANCH = "gh-pages"  # where the built site lies, executed notebooks below _sources/
INSTALL_ID = "install-nqflib"
INSTALL = """\
# Only where nqflib is missing, such as on Colab.
import importlib.util

if importlib.util.find_spec("nqflib") is None:
    %pip install --quiet "nqflib[lm] @ git+{url}@{branch}"
"""
MATHJAX = "tex-svg-full.js"  # one file without fonts: Firefox refuses fonts to a page opened from a disk


def connect(app: Sphinx) -> None:
    """Connect the handlers of this module."""
    app.connect("config-inited", use_own_mathjax)
    app.connect("build-finished", copy_mathjax)
    app.connect("build-finished", make_copies_installable)
    # After the theme, which makes its buttons at 501.
    app.connect("html-page-context", repoint, priority=900)


def repository(config: Any) -> tuple[str, str]:
    """URL and branch of the repository, as the theme's options say; empty texts if they do not."""
    options = config.html_theme_options
    return options.get("repository_url", "").rstrip("/"), options.get("repository_branch", "") or "main"


def repoint(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Handler of `html-page-context`: repoint the theme's buttons, add the links below the text."""
    url, branch = repository(app.config)
    if not url or doctree is None:
        return
    report = issue_url(url, _plain(context.get("title", pagename)), pagename)
    for button in _buttons(context.get("header_buttons", [])):
        if "url" in button:
            button["url"] = repointed(button["url"], pagename, report)
        if button.get("label") == "source-issues-button":
            button.update(text="Found a mistake?", tooltip="Found a mistake?")
    source = source_path(app, pagename)
    links = [("Found a mistake?", report), ("Source of this page", f"{url}/blob/{branch}/{source}")]
    anchors = " · ".join(f'<a href="{escape(href)}">{text}</a>' for text, href in links)
    context["body"] += f'<p class="nqf-page-links">{anchors}</p>'


def repointed(url: str, pagename: str, report: str) -> str:
    """Where a button of the theme should lead."""
    if "/issues/new" in url:
        return report
    built = f"book/{pagename}.ipynb"
    if not pagename.startswith("notebooks/") or built not in url:
        return url
    if url.startswith("https://colab."):
        # Colab cannot open MyST text, so it gets the executed copy of the published site.
        return re.sub(rf"/blob/[^/]+/{re.escape(built)}", f"/blob/{PUBLISHED_BRANCH}/_sources/{pagename}.ipynb", url)
    return url.replace(built, f"{pagename}.md")


def source_path(app: Sphinx, pagename: str) -> str:
    """The file that git holds for a page, relative to the repository."""
    if pagename.startswith("notebooks/"):
        return f"{pagename}.md"
    return f"book/{pagename}{Path(app.env.doc2path(pagename)).suffix}"


def issue_url(url: str, title: str, pagename: str) -> str:
    """A new issue about a page, with its title filled in."""
    fields = {"title": f"Mistake on “{title}”", "body": f"Page: {pagename}\n\nWhat is wrong:\n"}
    return f"{url}/issues/new?{urlencode(fields, quote_via=quote)}"


def commit_link(config: Any, commit: str) -> str:
    """A commit as a MyST link to the repository, in code style; `+` marks a tree with changes of its own."""
    url, _ = repository(config)
    if not commit:
        return ""
    return f"[`{commit}`]({url}/commit/{commit.rstrip('+')})" if url else f"`{commit}`"


def use_own_mathjax(app: Sphinx, config: Any) -> None:
    """Handler of `config-inited`: MathJax from the site itself."""
    config.mathjax_path = f"mathjax/{MATHJAX}"


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Handler of `build-finished`: copy the one file that the pages load.

    The package `sphinx-mathjax-offline` is only the source of the file: as an extension it would copy all 24 MB.
    """
    if error or app.builder.format != "html":
        return
    found = find_spec("sphinx-mathjax-offline")
    if found is None or not found.submodule_search_locations:
        raise ExtensionError("the book needs the package sphinx-mathjax-offline: pip install sphinx-mathjax-offline")
    target = Path(app.outdir, "_static", "mathjax")
    ensuredir(target)
    copy_asset_file(str(Path(found.submodule_search_locations[0], "static", "mathjax", MATHJAX)), str(target))


def make_copies_installable(app: Sphinx, error: Exception | None) -> None:
    """Handler of `build-finished`: the executed copies of the site start with a cell that installs the library."""
    url, branch = repository(app.config)
    if error or app.builder.format != "html" or not url:
        return
    source = INSTALL.format(url=url, branch=branch).splitlines(keepends=True)
    cell = {
        "cell_type": "code",
        "id": INSTALL_ID,
        "metadata": {},
        "execution_count": None,
        "outputs": [],
        "source": source,
    }
    for path in Path(app.outdir, "_sources", "notebooks").rglob("*.ipynb"):
        notebook = json.loads(path.read_text("utf-8"))
        if notebook["cells"][0].get("id") != INSTALL_ID:
            notebook["cells"].insert(0, cell)
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _buttons(buttons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [inner for button in buttons for inner in (button, *_buttons(button.get("buttons", [])))]


def _plain(title: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", title))
