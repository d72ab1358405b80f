"""Windows of training: the network's own trajectory, the optimizers' variants, the measure, and the stored result."""

import math

import numpy as np
import pytest
import torch
from small_runs import small_run, write_text

from nqflib.language_model import storage, windows
from nqflib.language_model.optimizer import Adam, beta2, rate_factor
from nqflib.language_model.passes import Passes
from nqflib.language_model.pretrain import pretrain
from nqflib.language_model.storage import DamagedFileError
from nqflib.language_model.transformer import flatten
from nqflib.language_model.windows import Stretch, agreement, follow, follow_all


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    run = small_run(write_text(folder), precision="float64", tokens=120 * 4 * 16)
    return folder, run, pretrain(run, folder=folder)


def stretch(trained, done, *surrogates, **changes):
    _, run, result = trained
    options = {"length": 0.1, "evaluations": 4} | changes
    return Stretch(run, result.checkpoint(done), result.corpus, surrogates, **options)


def window_of(trained, done, *surrogates, **changes):
    return follow(stretch(trained, done, *surrogates, **changes), trained[0])


def test_the_network_itself_goes_on_as_adam_does_from_the_averaged_weights(trained):
    _, run, result = trained
    checkpoint = result.checkpoint(0.5)
    window = window_of(trained, 0.5)
    passes = Passes(run.size, torch.float64, run.micro_batch, torch.device("cpu"))
    start = checkpoint.average(0.04)
    adam = Adam.start(passes.model, flatten(start.weights).clone())
    adam.first_moment.copy_(flatten(checkpoint.first_moment))
    adam.step, adam.beta2_product = checkpoint.step, checkpoint.beta2_product
    adam.second_moment = flatten(start.second_moment) * (1 - checkpoint.beta2_product)
    average, losses, averaged = adam.weights.clone(), [], []
    for k in range(12):
        _, gradient = passes.gradient(adam.weights, result.corpus.batch(checkpoint.step + k, run.batch, run.seed))
        adam.update(gradient, run.peak_rate * rate_factor(checkpoint.step / run.steps, run.schedule))
        average += (adam.weights - average) * 0.96 / 0.04 / adam.step
        losses.append(passes.evaluate(adam.weights, result.corpus.held_out))
        averaged.append(passes.evaluate(average, result.corpus.held_out))
    at = np.round(window.percent[1:] * run.steps / 100).astype(int) - 1
    assert at[-1] == 11
    np.testing.assert_allclose(window.loss["none"][1:], np.array(losses)[at], rtol=1e-12)
    np.testing.assert_allclose(window.average_loss["none"][1:], np.array(averaged)[at], rtol=1e-12)
    assert window.change() == pytest.approx(window.loss["none"][-1] - window.loss["none"][0])


def test_surrogates_leave_the_network_at_second_order_of_the_rate(trained):
    ends = {}
    for factor in (1e-2, 1e-3):
        window = window_of(trained, 0.5, "prox", "quad", "hquad", rate_factor=factor)
        assert window.loss["prox"][0] == window.loss["none"][0]
        ends[factor] = {k: abs(window.loss[k][-1] - window.loss["none"][-1]) for k in ("prox", "quad", "hquad")}
    order = {kind: math.log10(ends[1e-2][kind] / ends[1e-3][kind]) for kind in ends[1e-2]}
    assert all(1.7 < value < 4 for value in order.values()), order
    # The Hessian's model is right to one order more than the other two.
    assert ends[1e-3]["hquad"] < 0.1 * min(ends[1e-3]["prox"], ends[1e-3]["quad"])


def scalar(optimizer, gradients, rate):
    """One weight from 0 with m = 0.3, nu^ = 2, factors 1.5 and 0.7, after 30 steps; in plain floats."""
    w, m, nu, product, t = 0.0, 0.3, 2.0, 0.5, 30
    for g in gradients:
        t += 1
        b, g = 1 - 1 / max(20, t / 100), 1.5 * g
        m = 0.9 * m + 0.1 * g
        old, seen = nu, b * nu * (1 - product) + (1 - b) * g * g
        if optimizer in ("adam", "stale_adam"):
            product *= b
            nu = seen / (1 - product)
        divisor = {"adam": nu, "stale_adam": old, "sgdm": nu, "frozen_adam": b * nu + (1 - b) * g * g}[optimizer]
        w -= rate * 0.7 * m / (1 - 0.9**t) / (math.sqrt(divisor) + 1e-8)
    return w


@pytest.mark.parametrize("optimizer", ["adam", "stale_adam", "frozen_adam", "sgdm"])
def test_optimizers_of_a_window_equal_a_scalar_loop(optimizer):
    one = lambda value: torch.tensor([value], dtype=torch.float64)  # noqa: E731
    adam = Adam(one(0.0), one(0.3), one(2.0 * 0.5), one(1.5), one(0.7), step=30, beta2_product=0.5)
    gradients = [1.0, -0.4, 2.5, 0.1]
    for gradient in gradients:
        windows._UPDATES[optimizer](adam, one(gradient), 0.1)
    assert adam.weights.item() == pytest.approx(scalar(optimizer, gradients, 0.1), rel=1e-12)
    assert adam.step == 34
    assert beta2(31) == 0.95


def test_the_measure_on_losses_made_by_hand():
    percent = np.array([0.0, 1, 2, 4, 10])
    true = np.array([3.0, 2.9, 2.8, 2.7, 2.6])
    told = np.array([3.0, 2.905, 2.85, 2.72, 2.7])  # errors over the change: .05, .25, .067, .25
    first_exit, last_within, end_error, nats, relative = agreement(percent, true, told)
    assert (first_exit, last_within) == (2, 4)
    assert (end_error, nats, relative) == pytest.approx((0.25, 0.1, 0.1 / 2.6))
    assert agreement(percent, true, true)[:3] == (10, 10, 0)
    lost = agreement(percent, true, np.array([3.0, np.nan, np.nan, np.nan, np.nan]))
    assert lost[:2] == (1, 0)
    assert math.isinf(lost.end_error)


def test_a_surrogate_that_diverges_is_named_with_its_step_and_not_followed(trained):
    changes = {"rate_factor": 1e40, "optimizer": "sgdm"}
    window = window_of(trained, 0.5, "prox", "hquad", **changes)
    assert set(window.diverged) == {"hquad"}
    assert 1 <= window.diverged["hquad"] <= 12
    assert np.isnan(window.loss["hquad"][-1])
    assert window.agreement("hquad").last_within == 0


def test_a_window_is_run_once_and_read_afterwards(trained, monkeypatch):
    first = window_of(trained, 0.7, "quad")
    monkeypatch.setattr(windows, "_gradients", lambda *_: pytest.fail("it was run again"))
    again = window_of(trained, 0.7, "quad")
    for name in ("loss", "average_loss"):
        for kind, values in getattr(first, name).items():
            np.testing.assert_array_equal(getattr(again, name)[kind], values)
    with pytest.raises(pytest.fail.Exception, match="run again"):
        window_of(trained, 0.7, "quad", rate_factor=0.5)


def test_what_another_process_follows_is_left_for_later(trained, monkeypatch):
    stretches = {done: stretch(trained, done, "quad") for done in (0.5, 0.7)}
    order = []
    monkeypatch.setattr(storage, "is_locked", lambda file: file == stretches[0.5].file() and len(order) < 1)
    monkeypatch.setattr(windows, "follow", lambda s, _: order.append(s.checkpoint.step) or s.checkpoint.step)
    found = follow_all(stretches)
    assert list(found) == [0.5, 0.7]
    assert order == [found[0.7], found[0.5]] != [0, 0]


def test_a_damaged_result_is_named(trained):
    folder = trained[0]
    before = set((folder / "windows").glob("*.npz")) if (folder / "windows").exists() else set()
    window_of(trained, 0.9, "quad")
    (file,) = set((folder / "windows").glob("*.npz")) - before
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DamagedFileError, match=f"{file.name} is damaged"):
        window_of(trained, 0.9, "quad")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"optimizer": "sgd"}, "optimizer must be one of adam"), ({"length": 0.0}, "at least one step")],
)
def test_wrong_options_are_refused(trained, changes, message):
    with pytest.raises(ValueError, match=message):
        window_of(trained, 0.5, **changes)
