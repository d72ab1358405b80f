"""The pages of the book on a cluster: the same pages, commands and dependencies as `make book`.

    pip install snakemake snakemake-executor-plugin-slurm
    make setup && snakemake --executor slurm --jobs 20 --config preset=evening

Run it from the repository on a file system that all machines see. Without `--executor slurm`, `--cores 16` runs here.
"""

import sys
from pathlib import Path

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT))

from nqflib import runner

PRESET = config.get("preset", "laptop")
GIVEN = "" if PRESET == "laptop" else f"preset={PRESET}"


rule site:
    input: [f"book/notebooks/{page}.ipynb" for page in runner.pages()]
    output: "_build/html/index.html"
    localrule: True
    shell: ".venv/bin/python -m nqflib.site"


rule page:
    input: lambda wildcards: [str(path.relative_to(ROOT)) for path in runner.inputs(wildcards.page)]
    output: "book/notebooks/{page}.ipynb"
    wildcard_constraints: page = "|".join(runner.pages())
    threads: 1
    resources: mem_mb = 8000, runtime = 240
    shell: ".venv/bin/python -m nqflib.runner page {wildcards.page} {GIVEN}"
