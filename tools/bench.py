"""`make bench`: run every benchmark in benchmarks/, one after the other, one thread each.

A benchmark is a script that runs both sides interleaved, five times each, and prints medians beside the peer's.
Peers that are not installed are named in its output, with the command that installs them.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

failed = 0
for script in sorted((ROOT / "benchmarks").glob("*.py")):
    print(f"\n== {script.stem} ==", flush=True)
    failed += subprocess.run([sys.executable, str(script)], env={**os.environ, **THREADS}).returncode != 0
sys.exit(failed)
