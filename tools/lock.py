"""Write requirements.lock: every version that pyproject.toml leads to, with hashes, for Python 3.11 to 3.13.

Everything except torch, whose wheels differ by platform: it follows alone, in tools/bootstrap.py. What torch itself
needs is pinned here, as are pip and the build backend. Needs uv on the PATH. No line names a package index.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALSO = "pip>=25\nhatchling>=1.27\neditables>=0.5\nnetworkx>=3\nsympy>=1.13.3\n"
WITHOUT_TORCH = "torch ; sys_platform == 'none'\n"

with tempfile.TemporaryDirectory() as folder:
    also, overrides = Path(folder) / "also.in", Path(folder) / "overrides.txt"
    also.write_text(ALSO)
    overrides.write_text(WITHOUT_TORCH)
    command = ["uv", "pip", "compile", "pyproject.toml", str(also), "--output-file", "requirements.lock"]
    command += [word for extra in ("book", "test", "lm") for word in ("--extra", extra)]
    command += [
        "--universal",
        "--python-version",
        "3.11",
        "--generate-hashes",
        "--no-annotate",
        "--no-header",
    ]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--overrides", str(overrides)]
    command += ["--no-emit-package", "torch", "--quiet", *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=ROOT, env={**os.environ, "UV_NO_PROGRESS": "1"}).returncode)
