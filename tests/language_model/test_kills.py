"""Whatever moment a process dies at, the next one ends with the same bits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_runs import contents, small_run, write_text

from nqflib.language_model import pretrain as module
from nqflib.language_model import storage
from nqflib.language_model.corpus import load_corpus
from nqflib.language_model.pretrain import pretrain

KILLS = int(os.environ.get("NQF_KILLS", "3"))
STEPS = 100 * KILLS  # enough for each kill to find the run going on
CORPUS = {"vocabulary": 80, "context": 16, "held_out": 8}


class Killed(BaseException):
    """Stands for the end of the process."""


class Faults:
    """Counts the operations on files, and dies at number `at`: before it, after it, or with half of it done."""

    def __init__(self, monkeypatch, at=None, when="before"):
        self.names, self.at, self.when = [], at, when
        for name in ("_write", "_flush", "_rename"):
            monkeypatch.setattr(storage, name, self.wrap(name, getattr(storage, name)))

    def wrap(self, name, operation):
        def run(*arguments):
            self.names.append(name)
            if len(self.names) != self.at:
                return operation(*arguments)
            if self.when == "halfway":
                stream, piece = arguments
                stream.write(piece[: len(piece) // 2])
                stream.flush()
            elif self.when == "after":
                operation(*arguments)
            raise Killed

        return run


MOMENTS = {"_write": ("before", "halfway", "after"), "_flush": ("after",), "_rename": ("before", "after")}


def every_fault(work, monkeypatch):
    """Do `work(folder)` with every fault in turn, each in a folder of its own, and again without; yield the folders."""
    with monkeypatch.context() as patch:
        faults = Faults(patch)
        work("counted")
    assert len(faults.names) > 10
    for at, name in enumerate(faults.names, start=1):
        for when in MOMENTS[name]:
            folder = f"{at}{name}-{when}"
            with monkeypatch.context() as patch:
                Faults(patch, at, when)
                with pytest.raises(Killed):
                    work(folder)
            yield folder


def test_tokens_are_the_same_after_a_death_at_any_write_flush_or_rename(tmp_path, monkeypatch):
    text = write_text(tmp_path)
    tokenizer = module.load_corpus(text, **CORPUS, folder=tmp_path / "straight").tokenizer()
    # Learning the merges takes longest and touches no file; it is the same every time.
    monkeypatch.setattr("nqflib.language_model.corpus.train_tokenizer", lambda *a, **k: tokenizer)

    def work(name):
        return load_corpus(text, **CORPUS, folder=tmp_path / name)

    expected = contents(work("straight").folder)
    for name in every_fault(work, monkeypatch):
        corpus = work(name)
        assert contents(corpus.folder) == expected, name


def test_a_run_is_the_same_after_a_death_at_any_write_flush_or_rename(tmp_path, monkeypatch):
    text = write_text(tmp_path)
    corpus = load_corpus(text, **CORPUS, folder=tmp_path)
    monkeypatch.setattr(module, "load_corpus", lambda *a, **k: corpus)
    run = small_run(text, tokens=6 * 64)
    monkeypatch.setattr(type(run), "cuts", lambda self: ({2, 6}, {2, 4, 6}, {1, 2, 4, 6}))

    def work(name):
        return pretrain(run, folder=tmp_path / name)

    def home(trained):
        return trained.checkpoints[6].parent

    straight = work("straight")
    expected = contents(home(straight))
    assert len(expected) == 2, "what is not kept is deleted"
    for name in every_fault(work, monkeypatch):
        trained = work(name)
        assert contents(home(trained)) == expected, name
        assert np.array_equal(trained.history.loss, straight.history.loss)


WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from small_runs import small_run
from nqflib.language_model.corpus import OwnText
from nqflib.language_model.pretrain import pretrain
torch.set_num_threads(1)
folder = Path(sys.argv[2])
print("ready", flush=True)
pretrain(small_run(OwnText((str(folder / "text.txt"),)), tokens=int(sys.argv[3]) * 64), folder=folder / "killed")
"""


@pytest.mark.distributed
def test_a_run_survives_real_kills_at_random_moments(tmp_path):
    text = write_text(tmp_path)
    straight = pretrain(small_run(text, tokens=STEPS * 64), folder=tmp_path / "straight")
    random = np.random.default_rng(0)
    command = [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(tmp_path), str(STEPS)]
    killed = 0
    for _ in range(KILLS):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(random.uniform(0.05, 0.6))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed >= (2 * KILLS + 2) // 3, f"the run must be long enough to be killed: it was {killed} times"
    resumed = pretrain(small_run(text, tokens=STEPS * 64), folder=tmp_path / "killed")
    expected, found = (contents(t.checkpoints[STEPS].parent) for t in (straight, resumed))
    assert {n: h for n, h in found.items() if not n.endswith(".new")} == expected
    assert np.array_equal(resumed.train_loss, straight.train_loss)
