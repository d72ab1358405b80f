"""`make bench`: run every benchmark in benchmarks/, one after the other, one thread each.

    python tools/bench.py [--record] [NAME ...]

A benchmark is a script that runs both sides interleaved, five times each, and prints medians beside the peer's. Peers
that are not installed are named in its output, with the command that installs them. With --record the output goes to
book/benchmarks/NAME.txt too, below a line that says machine, versions, commit and date: what the book shows.
"""

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "book" / "benchmarks"
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
VERSIONS = (
    *("torch", "numpy", "scipy", "jax", "diffrax", "torchdiffeq"),
    *("PyHessian", "hessian-eigenthings", "curvlinops-for-pytorch", "matfree"),
)


def machine() -> str:
    """CPU, cores, versions of what is installed, commit and date, in two lines."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].split(":")[1].strip() if models else cpu
    versions = []
    for name in VERSIONS:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    today = datetime.date.today().isoformat()
    python = platform.python_version()
    return (
        f"{cpu}, {os.cpu_count()} cores, one thread; {today}, commit {commit}\nPython {python}, {', '.join(versions)}"
    )


def run(script: Path, record: bool) -> bool:
    """Run one benchmark, showing its output as it comes; True if it met its bars."""
    print(f"\n== {script.stem} ==", flush=True)
    process = subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, **THREADS}, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    lines = []
    for line in process.stdout or ():
        print(line, end="", flush=True)
        lines.append(line)
    if record:
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / f"{script.stem}.txt").write_text(f"{machine()}\n\n{''.join(lines)}")
    return process.wait() == 0


def main() -> int:
    names = [argument for argument in sys.argv[1:] if argument != "--record"]
    scripts = sorted((ROOT / "benchmarks").glob("*.py"))
    unknown = set(names) - {script.stem for script in scripts}
    if unknown:
        print(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(s.stem for s in scripts)}")
        return 2
    results = [run(script, "--record" in sys.argv) for script in scripts if not names or script.stem in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
