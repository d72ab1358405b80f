"""Lists of runs: in order, each once, and never waiting for another process while there is something else to do."""

import math
import threading

import numpy as np
import torch
from small_runs import small_run, write_text

from nqflib.language_model import runs as module
from nqflib.language_model.passes import Passes
from nqflib.language_model.pretrain import Diverged, Trained, pretrain, run_folder
from nqflib.language_model.runs import average_losses, pretrain_all
from nqflib.language_model.storage import is_locked, locked


def test_results_are_those_of_single_runs_in_the_order_asked_for(tmp_path):
    text = write_text(tmp_path)
    runs = [small_run(text, seed=seed, tokens=6 * 64) for seed in (2, 0, 2)]
    results = pretrain_all(runs, folder=tmp_path)
    for run, result in zip(runs, results, strict=True):
        assert isinstance(result, Trained)
        assert np.array_equal(result.train_loss, pretrain(run, folder=tmp_path / "alone").train_loss)


def test_a_run_in_another_s_hands_comes_last(tmp_path, monkeypatch):
    text = write_text(tmp_path)
    runs = [small_run(text, seed=seed, tokens=4 * 64) for seed in range(3)]
    home = run_folder(runs[0], runs[0].corpus(tmp_path), torch.device("cpu"), tmp_path)
    order, release = [], threading.Event()

    def hold():
        with locked(home):
            held.set()
            release.wait(60)

    def recorded(run, **options):
        order.append(run.seed)
        if len(order) == 2:  # the other is done when two are trained
            release.set()
            other.join()
        return pretrain(run, **options)

    held = threading.Event()
    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(60)
    assert is_locked(home)
    monkeypatch.setattr(module, "pretrain", recorded)
    results = pretrain_all(runs, folder=tmp_path)
    assert order == [1, 2, 0]
    assert len(results) == 3
    assert not is_locked(home)


def test_a_run_that_diverges_is_a_named_result_and_the_others_are_trained(tmp_path, monkeypatch):
    text = write_text(tmp_path)
    runs = [small_run(text, tokens=4 * 64, peak_rate=rate) for rate in (3.0, 1.0)]
    gradient = Passes.gradient

    def spoiled(self, weights, windows):
        loss, g = gradient(self, weights, windows)
        calls.append(1)
        return (loss * math.nan if len(calls) == 2 else loss), g

    calls = []
    monkeypatch.setattr(Passes, "gradient", spoiled)
    first, second = pretrain_all(runs, folder=tmp_path)
    assert isinstance(first, Diverged)
    assert first.step == 2
    assert isinstance(second, Trained)
    assert len(second.train_loss) == 4


def test_losses_of_the_stored_averages_are_those_of_the_history(tmp_path):
    run = small_run(write_text(tmp_path))
    trained = pretrain(run, folder=tmp_path)
    at = np.isin(trained.history.step, list(trained.checkpoints))
    assert average_losses(trained, run, 0.04).tolist() == trained.history.average_loss[at].tolist()
    assert np.abs(average_losses(trained, run, 0.08) - trained.history.average_loss[at]).max() > 1e-4
