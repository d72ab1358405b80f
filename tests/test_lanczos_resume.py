"""A run that is killed or fails at any write goes on from its checkpoint to the same bits."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from nqflib.lanczos import lanczos, lockstep, random_starts
from nqflib.language_model import storage


@pytest.fixture(autouse=True)
def quiet_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("NQF_PROGRESS", str(tmp_path / "progress"))


def small_run(folder, operator=None, depth=12, **options):
    eigenvalues = 1 / torch.arange(1.0, 301)
    starts = random_starts(2, 300, torch.Generator().manual_seed(7))
    return lockstep(operator or (lambda Q: Q * eigenvalues), starts, depth, folder=folder, **options)


def same(left, right):
    return all(
        (a.alphas == b.alphas).all() and (a.betas == b.betas).all() and (a.basis.rows == b.basis.rows).all()
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"on_disk": True}, {"basis_dtype": torch.float16}],
    ids=["delayed", "on disk", "twice in float16"],
)
def test_a_failure_at_any_write_leaves_a_checkpoint_that_resumes_to_the_same_bits(options, tmp_path, monkeypatch):
    options |= {"save_every": 3, "depth": 6}
    whole = small_run(tmp_path / "whole", **options)
    assert same(whole, small_run(None, **{k: v for k, v in options.items() if k != "on_disk"}))
    point = {"now": 0, "fail": -1}

    def failing(original):
        def call(*arguments):
            point["now"] += 1
            if point["now"] == point["fail"]:
                raise OSError("no space left")
            return original(*arguments)

        return call

    for name in ("_write", "_flush", "_rename"):
        monkeypatch.setattr(storage, name, failing(getattr(storage, name)))
    points = 0
    while True:
        folder = tmp_path / f"fail_{points}"
        point.update(now=0, fail=points + 1)
        try:
            small_run(folder, **options)
            break
        except OSError:
            points += 1
        point["fail"] = -1
        assert same(whole, small_run(folder, **options))
    assert points >= 2 * 4  # two saves of at least a write, two flushes and a rename


def test_a_finished_run_is_read_back_and_a_deeper_one_goes_on(tmp_path):
    calls, eigenvalues = [], 1 / torch.arange(1.0, 301)

    def operator(Q):
        calls.append(0)
        return Q * eigenvalues

    small_run(tmp_path, operator)
    assert same(small_run(tmp_path, operator), small_run(None))
    assert len(calls) == 12
    assert same(small_run(tmp_path, operator, depth=20), small_run(None, depth=20))
    assert len(calls) == 20
    with pytest.raises(ValueError, match="depth must be at least the 20 steps"):
        small_run(tmp_path, operator, depth=5)


def test_another_runs_checkpoint_and_a_damaged_one_are_refused(tmp_path):
    small_run(tmp_path)
    with pytest.raises(ValueError, match="holds another run: method differ"):
        small_run(tmp_path, method="twice")
    state = tmp_path / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-3] ^= 1
    state.write_bytes(content)
    with pytest.raises(storage.DamagedFileError, match=r"state\.safetensors is damaged"):
        small_run(tmp_path)
    content[-3] ^= 1
    state.write_bytes(content)
    rows = tmp_path / "basis_1.rows"
    rows.write_bytes(rows.read_bytes()[:-1])
    with pytest.raises(storage.DamagedFileError, match=r"basis_1.rows must hold"):
        small_run(tmp_path)


KILLS = int(os.environ.get("NQF_KILLS", "3"))
KILLED = """
import sys, time, torch
from nqflib.lanczos import lanczos, random_starts
eigenvalues = 1 / torch.arange(1.0, 301)
def operator(v):
    time.sleep(float(sys.argv[2]))
    return eigenvalues * v
start = random_starts(1, 300, torch.Generator().manual_seed(7))[0]
print("ready", flush=True)
lanczos(operator, start, 200, folder=sys.argv[1], save_every=1)
print("done", flush=True)
"""


def test_kills_and_the_same_bits(tmp_path):
    folder, kills = tmp_path / "run", 0
    environment = os.environ | {"NQF_PROGRESS": str(tmp_path / "progress"), "OMP_NUM_THREADS": "1"}
    pauses = random.Random(0)
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(folder),
        str(0.0015 * KILLS),
    ]  # seconds a step: all kills find it going on
    for _ in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(pauses.uniform(0.1, 0.3))
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
    assert kills == KILLS
    assert (folder / "state.safetensors").is_file()
    eigenvalues, calls = 1 / torch.arange(1.0, 301), []

    def operator(v):
        calls.append(0)
        return eigenvalues * v

    v = random_starts(1, 300, torch.Generator().manual_seed(7))[0]
    resumed = lanczos(operator, v, 200, folder=folder)
    assert len(calls) < 200
    assert same([resumed], [lanczos(lambda q: eigenvalues * q, v, 200)])
