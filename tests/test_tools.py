import json
import os
import subprocess
import sys
from pathlib import Path

import bench
import bootstrap
import chromium
import lint
import pytest

ROOT = Path(bootstrap.__file__).parent.parent


def report_of(tmp_path, *sizes):
    """A pip that would take wheels of these sizes, and says so in its report."""
    items = []
    for number, size in enumerate(sizes):
        wheel = tmp_path / f"part{number}.whl"
        with wheel.open("wb") as file:
            file.truncate(size)
        items.append({"metadata": {"name": f"part{number}", "version": "1"}, "download_info": {"url": wheel.as_uri()}})
    calls = []

    def pip(*arguments):
        calls.append(arguments)
        if "--report" in arguments:
            Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps({"install": items}))

    return pip, calls


def test_a_torch_of_gigabytes_is_not_installed_unasked(tmp_path, monkeypatch):
    pip, calls = report_of(tmp_path, 900_000_000, 1_300_000_000)
    monkeypatch.setattr(bootstrap, "pip", pip)
    monkeypatch.delenv("TORCH", raising=False)
    with pytest.raises(SystemExit) as stopped:
        bootstrap.install_torch()
    for part in ("2.2 GB", "TORCH_INDEX=", "TORCH=cuda"):
        assert part in str(stopped.value)
    assert all("--dry-run" in call for call in calls)


def test_a_torch_of_gigabytes_is_installed_when_cuda_was_said(tmp_path, monkeypatch):
    pip, calls = report_of(tmp_path, 2_200_000_000)
    monkeypatch.setattr(bootstrap, "pip", pip)
    monkeypatch.setenv("TORCH", "cuda")
    bootstrap.install_torch()
    assert "--dry-run" not in calls[-1]


def test_a_small_torch_is_installed_from_the_index_that_was_named(tmp_path, monkeypatch):
    pip, calls = report_of(tmp_path, 200_000_000)
    monkeypatch.setattr(bootstrap, "pip", pip)
    monkeypatch.setenv("TORCH_INDEX", "file:///wheels")
    bootstrap.install_torch()
    assert len(calls) == 2
    assert all(call[-2:] == ("--index-url", "file:///wheels") for call in calls)


def test_an_unsupported_python_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(bootstrap, "SUPPORTED", ("1.0", "1.1"))
    with pytest.raises(SystemExit, match=r"Python 1\.0 or 1\.1 is needed"):
        bootstrap.choose_python()


def test_every_line_of_the_lock_is_pinned_and_hashed_and_names_no_index():
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    blocks = [block for block in lock.replace("\\\n", " ").splitlines() if block.strip() and block[0] != "#"]
    assert len(blocks) > 100
    assert all("==" in block and "--hash=sha256:" in block for block in blocks)
    assert not any(block.startswith("torch==") for block in blocks)


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "home/ada/book",
        "open('/" + "tmp/x.npz')",
        "pip install --index-url " + "https://wheels.example/cpu",
        "https://pypi.example" + "/simple",
    ],
)
def test_lint_refuses_machine_paths_and_index_addresses(text):
    assert lint.forbidden("fine\n" + text)[0][0] == 2


@pytest.mark.parametrize("text", ["https://github.com/a/b", "a/home/b", "book/_build/html", "/dev/null"])
def test_lint_lets_ordinary_addresses_and_paths_pass(text):
    assert lint.forbidden(text) == []


def test_lint_refuses_a_link_to_a_page_by_its_bare_name():
    assert [line for line, _, _ in lint.bare_links("fine\nsee [where it ends](limits)")] == [2]
    assert lint.bare_links("see {doc}`where it ends <limits>`, [the licence](LICENSE) and forms[0](W)") == []


def test_a_missing_chromium_is_one_loud_line_and_an_error_only_in_ci():
    script = (
        "import sys, shutil, pathlib, runpy, subprocess; shutil.which = lambda *a, **k: None;"
        "subprocess.run = lambda *a, **k: None; sys.modules['playwright'] = None;"
        f"runpy.run_path({str(ROOT / 'tools' / 'chromium.py')!r}, run_name='__main__')"
    )
    for ci, expected in (("true", 1), ("", 0)):
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "CI": ci}, timeout=60
        )
        if not chromium.MAC.exists():
            assert result.returncode == expected
            assert len(result.stderr.strip().splitlines()) == 1
            assert "NO CHROMIUM" in result.stderr


def test_make_help_lists_every_target_of_the_readme():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("book", "test", "serve", "figure", "verify", "bench", "lint", "clean", "help"):
        assert f"make {target} " in shown


def test_bench_refuses_an_unknown_benchmark_with_the_names_there_are():
    result = subprocess.run([sys.executable, "tools/bench.py", "speed"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout.startswith("there is no benchmark speed; there are ")
    assert "lotka_volterra, moments" in result.stdout


def test_bench_records_machine_and_versions_above_the_output(tmp_path, monkeypatch):
    script = tmp_path / "quick.py"
    script.write_text("import os\nprint('threads', os.environ['OMP_NUM_THREADS'])\nraise SystemExit(3)\n")
    monkeypatch.setattr(bench, "RECORDS", tmp_path / "records")
    assert not bench.run(script, record=True)
    first, second, empty, output = (tmp_path / "records" / "quick.txt").read_text().splitlines()
    assert "one thread; 20" in first
    assert second.startswith(f"Python {sys.version.split()[0]}, torch ")
    assert (empty, output) == ("", "threads 1")
