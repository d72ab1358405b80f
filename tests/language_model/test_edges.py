"""The edge of the frozen quadratic against a plain recursion, and sequences' scores against their dense matrices."""

import numpy as np
import pytest
import torch
from small_runs import small_run, write_text

from nqflib.geometry import preconditioned
from nqflib.language_model import edges
from nqflib.language_model.edges import full_batch_limit, largest_stable, stream_after
from nqflib.language_model.optimizer import EPS
from nqflib.language_model.outliers import sequence_scores
from nqflib.language_model.pretrain import pretrain
from nqflib.language_model.spectra import curvature_at, preconditioner
from nqflib.language_model.storage import DamagedFileError
from nqflib.language_model.transformer import Transformer, flatten
from nqflib.stability import full_batch_edge

STEPS = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edges")
    run = small_run(write_text(folder), precision="float64")
    result = pretrain(run, folder=folder)
    return folder, run, result, result.checkpoint(0.9)


def edge(trained, batch=4, steps=STEPS, **changes):
    folder, run, result, checkpoint = trained
    stream = stream_after(run, checkpoint, result.corpus, batch * steps)
    return largest_stable(run, checkpoint, stream, batch, steps=steps, **({"folder": folder} | changes))


def test_the_stream_is_what_the_run_reads_next(trained):
    _, run, result, checkpoint = trained
    stream = stream_after(run, checkpoint, result.corpus, 10)
    assert stream.shape == (12, 17)  # whole batches of the run
    assert torch.equal(stream[4:8], result.corpus.batch(checkpoint.step + 1, 4, run.seed))
    assert not torch.equal(stream, stream_after(run, checkpoint, result.corpus, 10, seed=9))


def test_a_trial_is_momentum_descent_on_the_quadratic(trained):
    _, run, result, checkpoint = trained
    batch, steps, factor = 4, 6, 0.5
    found = edge(trained, batch, steps, factors=[factor])
    factors = Transformer(run.size).factors()
    nu = checkpoint.average(0.04).second_moment
    pre = torch.cat([torch.full((p.numel(),), factors[name].pre, dtype=torch.float64) for name, p in nu.items()])
    post = torch.cat([torch.full((p.numel(),), factors[name].post, dtype=torch.float64) for name, p in nu.items()])
    divisor = flatten(nu).sqrt() + EPS
    m, delta, losses = flatten(checkpoint.first_moment).clone(), torch.zeros_like(pre), []
    for i in range(steps):
        curvature = curvature_at(run, checkpoint, result.corpus.batch(checkpoint.step + i, batch, run.seed))
        g, bent = curvature.gradient(), curvature.gauss_newton(delta)
        losses.append(curvature.value() + (g @ delta + delta @ bent / 2).item())
        m = 0.9 * m + 0.1 * pre * (g + bent)
        delta = delta - factor * checkpoint.rate * m * post / divisor / (1 - 0.9 ** (checkpoint.step + i + 1))
    assert found.trials[0].largest == pytest.approx(max(losses) / losses[0], rel=1e-9)
    assert found.trials[0].last == pytest.approx(losses[-1] / losses[0], rel=1e-9)


def test_the_search_goes_down_to_the_first_stable_factor_and_looks_once_between(trained):
    tried = [2.0**k for k in range(3, -14, -1)]
    found = edge(trained, factors=tried)
    factors = [t.factor for t in found.trials]
    assert 3 <= len(factors) <= len(tried)
    assert factors[:-1] == tried[: len(factors) - 1]
    assert all(t.stopped is not None for t in found.trials[:-2])
    assert found.trials[-2].stopped is None
    assert factors[-1] == pytest.approx(2**0.5 * factors[-2])
    assert found.factor == max(t.factor for t in found.trials if t.stopped is None)
    assert found.rate == pytest.approx(found.factor * trained[3].rate)
    assert all(t.largest > edges.RUNAWAY for t in found.trials if t.stopped is not None)
    assert edge(trained, factors=[1024.0]).factor == 0


def test_an_edge_is_searched_once_and_read_afterwards(trained, monkeypatch):
    first = edge(trained, factors=[0.5, 0.25])
    monkeypatch.setattr(edges, "trial_losses", lambda *_: pytest.fail("it was searched again"))
    assert edge(trained, factors=[0.5, 0.25]) == first
    with pytest.raises(pytest.fail.Exception, match="searched again"):
        edge(trained, factors=[0.5])


def test_wrong_input_is_refused(trained, tmp_path):
    _, run, result, checkpoint = trained
    stream = stream_after(run, checkpoint, result.corpus, 8)
    with pytest.raises(ValueError, match="stream must hold batch x steps = 40 windows or more, got 8"):
        largest_stable(run, checkpoint, stream, 4, steps=10)
    with pytest.raises(ValueError, match="factors must be positive and fall"):
        largest_stable(run, checkpoint, stream, 4, steps=2, factors=[1.0, 2.0])
    edge(trained, folder=tmp_path, steps=2, factors=[0.5])
    (file,) = (tmp_path / "edges").glob("*.json")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DamagedFileError, match=f"{file.name} is damaged"):
        edge(trained, folder=tmp_path, steps=2, factors=[0.5])
    with pytest.raises(ValueError, match="probes must be at least 2"):
        sequence_scores(run, checkpoint, stream, torch.ones(1), probes=1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_limit_without_noise(momentum):
    eigenvalues = torch.linspace(0.01, 3, 40)
    limit = full_batch_limit(
        lambda v: eigenvalues * v, 40, momentum=momentum, guess=full_batch_edge(2.8, momentum=momentum)
    )
    assert limit == pytest.approx(full_batch_edge(3, momentum=momentum), rel=0.01)
    with pytest.raises(ValueError, match=r"within a factor of 1\.5"):
        full_batch_limit(lambda v: eigenvalues * v, 40, momentum=momentum, guess=0.01)


def test_scores_are_squared_frobenius_norms(trained):
    _, run, result, checkpoint = trained
    P, _ = preconditioner(run, checkpoint, "adam", 0.95)
    windows = stream_after(run, checkpoint, result.corpus, 2)
    found = sequence_scores(run, checkpoint, windows, P, probes=120)
    # |M|_F^2 = E |M z|^2, by products with the whole matrix of one sequence
    z = 2 * torch.randint(0, 2, (200, len(P)), generator=torch.Generator().manual_seed(2)).double() - 1
    products = preconditioned(curvature_at(run, checkpoint, windows[:1]).gauss_newton, P)(z)
    assert found[0] == pytest.approx(products.square().sum(1).mean().item(), rel=0.3)
    again = sequence_scores(run, checkpoint, windows, P, probes=120, seed=1)
    np.testing.assert_allclose(found, again, rtol=0.5)
    assert (found != again).all()
