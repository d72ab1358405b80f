"""A run against a plain loop with torch's own optimizer, and what a run promises about its files, errors and costs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import contents, small_run, write_text

from nqflib.language_model import command
from nqflib.language_model.checkpoints import load_checkpoint
from nqflib.language_model.corpus import unigram_entropy
from nqflib.language_model.cost import cost
from nqflib.language_model.optimizer import rate_factor
from nqflib.language_model.passes import Passes
from nqflib.language_model.presets import preset
from nqflib.language_model.pretrain import Diverged, Run, pretrain
from nqflib.language_model.storage import DamagedFileError
from nqflib.language_model.transformer import Transformer, flatten, next_token_loss


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def text(folder):
    return write_text(folder)


@pytest.fixture(scope="module")
def trained(folder, text):
    """A finished run."""
    return pretrain(small_run(text), folder=folder)


def home_of(trained):
    return next(iter(trained.checkpoints.values())).parent


def test_a_run_equals_a_plain_loop_with_torch_s_adam(folder, text):
    run = small_run(text, precision="float64", micro_batch=2, seed=5)
    trained = pretrain(run, folder=folder)

    model = Transformer(run.size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    factors = model.factors()
    groups = [{"params": [p], "post": factors[n].post, "pre": factors[n].pre} for n, p in model.named_parameters()]
    peer = torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-8)
    losses, iterates = [], []
    for step in range(run.steps):
        for group in peer.param_groups:
            group["lr"] = run.peak_rate * rate_factor(step / run.steps, "cosine") * group["post"]
        peer.zero_grad()
        loss = next_token_loss(model, trained.corpus.batch(step, run.batch, run.seed))
        loss.backward()
        for group in peer.param_groups:
            group["params"][0].grad *= group["pre"]
        peer.step()
        losses.append(loss.item())
        iterates.append(flatten(dict(model.named_parameters())).detach().clone())
    np.testing.assert_allclose(trained.train_loss, losses, rtol=1e-10)

    last = trained.checkpoint(1.0)
    torch.testing.assert_close(flatten(last.weights), iterates[-1], rtol=1e-8, atol=1e-10)
    second = torch.cat([peer.state[g["params"][0]]["exp_avg_sq"].flatten() for g in peer.param_groups])
    torch.testing.assert_close(flatten(last.second_moment), second, rtol=1e-8, atol=1e-20)
    average = iterates[0]
    for t, weights in enumerate(iterates, start=1):
        average = average + (weights - average) / max(1, t / 24)
    torch.testing.assert_close(flatten(last.average(0.04).weights), average, rtol=1e-8, atol=1e-10)
    with torch.no_grad():
        held_out = next_token_loss(model, trained.corpus.held_out).item()
    assert trained.history.loss[-1] == pytest.approx(held_out, rel=1e-10)


def test_a_run_is_kept_at_the_paper_s_fractions_and_evaluated_at_every_cut():
    run = Run.of(preset("laptop"), 32)
    kept, stored, evaluated = run.cuts()
    percent = [100 * step / run.steps for step in sorted(kept)]
    assert percent == pytest.approx([6.9, 17.2, 27.6, 37.9, 48.3, 58.6, 69.0, 79.3, 89.7, 100.0], abs=0.15)
    assert len(stored) == 29
    assert kept <= stored <= evaluated
    paper = Run.of(preset("paper"), 64)
    steps = np.linspace(0, paper.steps, 30).astype(int)[2::3]
    assert sorted(paper.cuts()[0]) == steps.tolist()


def test_history_and_files_say_where_the_run_was(trained, text):
    run = small_run(text)
    history = trained.history
    kept, _, evaluated = run.cuts()
    assert history.step.tolist() == sorted(evaluated)
    assert np.array_equal(history.tokens, history.step * 64)
    assert sorted(trained.checkpoints) == sorted(kept)
    assert sorted(contents(home_of(trained))) == [file.name for file in trained.checkpoints.values()]
    late = trained.checkpoint(0.897)
    assert late.step == 26 * 40 // 29
    assert late.rate == pytest.approx(rate_factor(late.step / 40, "cosine"))
    assert late.beta2_product == pytest.approx(0.95**late.step)
    assert late.train_loss.tolist() == pytest.approx(trained.train_loss[: late.step].tolist(), rel=1e-7)


def test_training_beats_the_unigram_entropy_of_the_same_windows(folder, text):
    run = small_run(text, tokens=250 * 64, peak_rate=2.0, ends_only=True)
    trained = pretrain(run, folder=folder)
    entropy = unigram_entropy(trained.corpus.held_out[:, 1:], 80)
    assert trained.history.average_loss[-1] < entropy - 0.2
    assert trained.history.step.tolist() == [250]


def test_a_finished_run_is_read_and_a_stopped_one_goes_on_to_the_same_bits(folder, text, trained, monkeypatch):
    calls = []
    gradient = Passes.gradient
    monkeypatch.setattr(Passes, "gradient", lambda *a: calls.append(1) or gradient(*a))
    again = pretrain(small_run(text), folder=folder)
    assert not calls
    assert np.array_equal(again.history.average_loss, trained.history.average_loss)

    other = folder / "stopped"
    part = pretrain(small_run(text), folder=other, until=0.63)
    assert part.history.step[-1] == 24
    assert max(part.checkpoints) <= 25
    assert "step_00000025.safetensors" in contents(home_of(part))
    whole = pretrain(small_run(text), folder=other)
    assert len(calls) == 40
    stopped, straight = contents(home_of(whole)), contents(home_of(trained))
    assert stopped == straight


def test_runs_that_differ_in_anything_have_folders_of_their_own(folder, text):
    homes = {
        home_of(pretrain(small_run(text, tokens=10 * 64, ends_only=True, **change), folder=folder))
        for change in ({}, {"seed": 1}, {"peak_rate": 0.5}, {"schedule": "constant"}, {"precision": "float64"})
    }
    assert len(homes) == 5


def test_a_loss_that_is_not_finite_is_named_by_its_step_and_nothing_stored_is_touched(folder, text, monkeypatch):
    run = small_run(text, seed=2)
    home = home_of(pretrain(run, folder=folder, until=0.5))
    before = contents(home)
    gradient = Passes.gradient
    calls = []

    def poisoned(self, weights, windows):
        calls.append(1)
        loss, g = gradient(self, weights, windows)
        return (loss * math.nan if len(calls) == 4 else loss), g

    monkeypatch.setattr(Passes, "gradient", poisoned)
    with pytest.raises(Diverged, match="diverged at step 24: the loss is nan") as caught:
        pretrain(run, folder=folder)
    assert caught.value.step == 24
    assert caught.value.history.step.max() == 23
    survived = contents(home)
    assert {name: h for name, h in survived.items() if name in before} == {
        n: before[n] for n in before if n in survived
    }
    assert max(survived) < "step_00000024"
    monkeypatch.setattr(Passes, "gradient", gradient)
    resumed, straight = pretrain(run, folder=folder), pretrain(run, folder=folder / "straight")
    assert flatten(resumed.checkpoint(1.0).weights).equal(flatten(straight.checkpoint(1.0).weights))


def test_a_damaged_checkpoint_stops_the_run_and_is_left_as_it_is(folder, text):
    run = small_run(text, seed=3)
    home = home_of(pretrain(run, folder=folder, until=0.5))
    newest = max(home.glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-5])
    before = contents(home)
    with pytest.raises(DamagedFileError, match=newest.name):
        pretrain(run, folder=folder)
    assert contents(home) == before
    newest.unlink()  # as the message says
    assert pretrain(run, folder=folder).history.step[-1] == 40


def test_a_checkpoint_in_the_wrong_folder_is_refused(folder, text):
    one, other = small_run(text, seed=11), small_run(text, seed=12)
    home = home_of(pretrain(one, folder=folder, until=0.5))
    newest = max(home.glob("*.safetensors"))
    elsewhere = home_of(pretrain(other, folder=folder, until=0.1))
    (elsewhere / newest.name).write_bytes(newest.read_bytes())
    with pytest.raises(ValueError, match=r"belongs to another run"):
        pretrain(other, folder=folder)


def test_bfloat16_passes_stay_near_those_of_float32_with_float32_weights(folder, text):
    wide = pretrain(small_run(text, ends_only=True), folder=folder)
    narrow = pretrain(small_run(text, ends_only=True, precision="bfloat16"), folder=folder)
    np.testing.assert_allclose(narrow.train_loss[:15], wide.train_loss[:15], atol=0.03)
    np.testing.assert_allclose(narrow.train_loss, wide.train_loss, atol=0.2)
    assert not np.array_equal(narrow.train_loss, wide.train_loss)
    checkpoint = load_checkpoint(narrow.checkpoints[40])
    assert all(w.dtype == torch.float32 for w in checkpoint.weights.values())
    assert any((w != w.bfloat16().float()).any() for w in checkpoint.weights.values())


def test_runs_that_cannot_be_are_refused_by_name(text):
    for change, message in (
        ({"batch": 6}, "batch must be a positive multiple of micro_batch 4, got 6"),
        ({"peak_rate": 0.0}, "peak_rate must be positive, got 0.0"),
        ({"schedule": "linear"}, "schedule must be one of cosine, constant"),
        ({"precision": "float16"}, "precision must be one of float64, float32, bfloat16"),
        ({"tokens": 0}, "tokens must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            small_run(text, **change)
    with pytest.raises(ValueError, match=r"until must lie in 1 / 40 to 1, got 0\.01"):
        pretrain(small_run(text), until=0.01)


def test_the_paper_s_run_costs_what_the_paper_s_numbers_say():
    c = cost(Run.of(preset("paper"), 64), "h100")
    assert (c.parameters, c.steps) == (167_772_160, 45_777)
    assert c.tokens == pytest.approx(3e9, rel=1e-4)
    assert c.block_flop == pytest.approx(2.72e18, rel=2e-3)
    assert c.product_flop == pytest.approx(3.10e18, rel=2e-3)
    assert c.checkpoint_bytes == pytest.approx(7 * 4 * 167_772_160, rel=1e-4)
    assert c.hours == pytest.approx(3.10e18 / (0.4 * 989e12) / 3600, rel=2e-3)
    assert cost(Run.of(preset("paper"), 64), "h100", devices=16).hours == pytest.approx(c.hours / 16)
    with pytest.raises(ValueError, match="device must be one of a100"):
        cost(Run.of(preset("paper"), 64), "abacus")


def test_a_checkpoint_takes_the_bytes_that_the_cost_says(trained, text):
    file = trained.checkpoints[40]
    expected = cost(replace(small_run(text)), "core").checkpoint_bytes
    assert file.stat().st_size == pytest.approx(expected, abs=16_000)  # the header


def test_the_command_line_trains_one_s_own_text_and_says_what_came_out(folder, capsys):
    from nqflib import data

    file = folder / "own.txt"
    file.write_text(data.load_documents("austen")[1].text[:120_000].replace("'", "’"))
    arguments = ["--preset", "smoke", "--batch", "8", "--text", str(file), "--folder", str(folder), "--until", "0.03"]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "batch 8, cosine: at step 6 of 200, 3,072 tokens" in out
    assert "characters of the text were replaced by plain ones: '’'" in out
    assert "unigram entropy" in out

    assert command.main(["--preset", "paper", "--dry-run", "--batch", "64", "--gpu", "h100"]) == 0
    out = capsys.readouterr().out
    for part in ("167,772,160", "3,000,041,472", "45,777", "2.72e+18", "3.1e+18", "4.7 GB", "hours on 1 h100"):
        assert part in out

    assert command.main(["--text", str(folder / "nowhere.txt"), "--batch", "4", "--folder", str(folder)]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
    assert command.main([*arguments[:6], "--folder", str(folder), "--base-rate", "1e30", "--until", "0.2"]) == 1
    assert "diverged at step" in capsys.readouterr().err
