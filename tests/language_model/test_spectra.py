"""Spectra of a checkpoint against the dense preconditioned matrix, and results that are read instead of computed."""

import numpy as np
import pytest
import torch
from small_runs import small_run, write_text
from torch.func import functional_call

from nqflib.language_model import spectra, storage
from nqflib.language_model.optimizer import EPS
from nqflib.language_model.pretrain import pretrain
from nqflib.language_model.spectra import (
    Cell,
    curvature_at,
    lanczos_all,
    lanczos_at,
    preconditioner,
    untrained,
    windows_after,
)
from nqflib.language_model.storage import DamagedFileError
from nqflib.language_model.transformer import Transformer, flatten, next_token_loss, unflatten
from nqflib.quadrature import gauss


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spectra")
    run = small_run(write_text(folder), precision="float64")
    result = pretrain(run, folder=folder)
    return folder, run, result, result.checkpoint(0.9)


def spectrum(trained, **changes):
    home, run, result, checkpoint = trained
    folder = changes.pop("folder", home)
    return lanczos_at(Cell(run, checkpoint, result.corpus, **({"tokens": 64, "depth": 30} | changes)), folder)


def hessian_rows(trained, tokens, vectors):
    """H v for rows v (k, n), and the gradient, of the mean loss at the averaged weights, by autograd."""
    _, run, result, checkpoint = trained
    model = Transformer(run.size, dtype=torch.float64)
    theta = flatten(checkpoint.average(0.04).weights).clone().requires_grad_()
    windows = result.corpus.batch(checkpoint.step, tokens // run.size.context, run.seed)
    loss = next_token_loss(lambda x: functional_call(model, unflatten(theta, model), (x,)), windows)
    (gradient,) = torch.autograd.grad(loss, theta, create_graph=True)
    vectors = torch.eye(len(theta), dtype=torch.float64) if vectors is None else vectors
    rows = [torch.autograd.grad(gradient, theta, part, is_grads_batched=True, retain_graph=True)[0]
            for part in vectors.split(128)]  # fmt: skip
    return torch.cat(rows), gradient.detach()


def test_the_operator_is_the_dense_preconditioned_hessian(trained):
    _, run, _, checkpoint = trained
    H, gradient = hessian_rows(trained, 16, None)
    P, cap = preconditioner(run, checkpoint, "adam", 0.95)
    wanted = torch.linalg.eigvalsh(P.sqrt()[:, None] * H * P.sqrt())
    found = spectrum(trained, matrix="hessian", tokens=16, depth=120, starts=2)
    assert (found.size, found.cap) == (len(H), cap)
    assert found.gradient_square == pytest.approx((P * gradient**2).sum().item(), rel=1e-10)
    for alphas, betas in [*found.runs, found.gradient_run]:
        nodes = gauss(alphas, betas).nodes
        np.testing.assert_allclose(nodes[-8:], wanted[-8:], rtol=1e-9)
        np.testing.assert_allclose(nodes[:2], wanted[:2], rtol=1e-6)
    assert found.orthogonality < 1e-12


def test_products_see_the_windows_that_follow_the_checkpoint(trained):
    _, run, result, checkpoint = trained
    windows = windows_after(Cell(run, checkpoint, result.corpus, tokens=64), 64)
    curvature = curvature_at(run, checkpoint, windows)
    v = torch.randn(2, curvature.n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    products, gradient = hessian_rows(trained, 64, v)
    torch.testing.assert_close(curvature.hessian(v), products, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(curvature.gradient(), gradient, rtol=1e-9, atol=1e-12)


def test_the_preconditioner_is_that_of_adam_and_its_cap_a_quantile(trained):
    _, run, _, checkpoint = trained
    P, cap = preconditioner(run, checkpoint, "adam", None)
    factors = Transformer(run.size).factors()
    start, expected = checkpoint.average(0.04), []
    for name, nu in start.second_moment.items():
        expected.append((factors[name].pre * factors[name].post / (nu.sqrt() + EPS)).flatten())
    torch.testing.assert_close(P, torch.cat(expected), rtol=1e-12, atol=0)
    assert cap == float("inf")
    lower, at = preconditioner(run, checkpoint, "adam", 0.9)
    assert (at > P).sum() < 0.9 * len(P) <= (at >= P).sum()
    torch.testing.assert_close(lower, P.clamp(max=at))
    raw, cap = preconditioner(run, checkpoint, "raw", 0.9)
    assert set(raw.tolist()) == {factors[name].pre * factors[name].post for name in start.weights}
    assert cap == float("inf")


def test_masses_of_ritz_vectors_sum_to_one_and_name_every_parameter(trained):
    found = spectrum(trained)
    assert found.names == list(trained[3].weights)
    assert found.masses.shape == (30, len(found.names))
    np.testing.assert_allclose(found.masses.sum(1), 1, rtol=1e-10)


def test_rows_are_the_unembeddings_part_of_the_leading_ritz_vectors(trained):
    found = spectrum(trained)
    column = found.names.index("unembedding")
    assert found.rows.shape == (10, trained[1].size.vocabulary)
    np.testing.assert_allclose(found.rows.sum(1), found.masses[: -10 - 1 : -1, column], rtol=1e-10)
    assert found.share("unembedding", top=10) == pytest.approx(found.rows.sum(1).mean())
    assert found.share("up", bottom=3) == pytest.approx(
        found.masses[:3, [name.endswith(".up") for name in found.names]].sum(1).mean()
    )
    with pytest.raises(ValueError, match="either top or bottom"):
        found.share("up")
    with pytest.raises(ValueError, match="parameter must be one of"):
        found.share("gate", top=3)


def test_the_negative_end_has_ranks_of_its_own(trained):
    found = spectrum(trained, matrix="hessian")
    ranks, values = found.nodes(negative=True)
    assert (values > 0).all()
    assert (np.diff(values) <= 0).all()
    assert (np.diff(ranks) > 0).all()
    assert values[0] == pytest.approx(-gauss(*found.runs[0]).nodes[0], rel=1e-12)
    assert found.leading(3).tolist() == gauss(*found.runs[0]).nodes[:-4:-1].tolist()


def test_controls_look_at_other_matrices(trained):
    folder, run, result, checkpoint = trained
    before = untrained(run, checkpoint)
    assert (before.average(0.04).weights["unembedding"] == 0).all()
    cells = {
        "as it is": Cell(run, checkpoint, result.corpus, geometry="raw", tokens=64, depth=10),
        "shuffled": Cell(run, checkpoint, result.corpus, geometry="raw", tokens=64, depth=10, shuffled=True),
        "untrained": Cell(run, before, result.corpus, geometry="raw", tokens=64, depth=10),
    }
    found = lanczos_all(cells, folder)
    assert list(found) == list(cells)
    assert len({round(float(s.leading(1)[0]), 6) for s in found.values()}) == 3
    # Without an unembedding nothing else can change the outputs.
    assert found["untrained"].share("unembedding", top=1) == pytest.approx(1, abs=1e-3)


def test_a_spectrum_is_computed_once_and_read_afterwards(trained, monkeypatch):
    first = spectrum(trained, matrix="gauss_newton", starts=2, seed=3)
    monkeypatch.setattr(spectra, "lockstep", lambda *_, **__: pytest.fail("it was computed again"))
    again = spectrum(trained, matrix="gauss_newton", starts=2, seed=3)
    for one, two in zip([*first.runs, first.gradient_run], [*again.runs, again.gradient_run], strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(first.masses, again.masses)
    np.testing.assert_array_equal(first.rows, again.rows)
    assert (first.gradient_square, first.size, first.names, first.cap, first.orthogonality) == (
        again.gradient_square, again.size, again.names, again.cap, again.orthogonality,
    )  # fmt: skip
    for changes in (
        {"seed": 4},
        {"tokens": 128},
        {"geometry": "raw"},
        {"cap": None},
        {"depth": 31},
        {"shuffled": True},
        {"gradient_tokens": 128},
    ):
        with pytest.raises(pytest.fail.Exception, match="computed again"):
            spectrum(trained, **({"matrix": "gauss_newton", "starts": 2, "seed": 3} | changes))


def test_what_another_process_computes_is_left_for_later(trained, monkeypatch):
    _, run, result, checkpoint = trained
    cells = {name: Cell(run, checkpoint, result.corpus, seed=seed) for name, seed in (("one", 1), ("two", 2))}
    order = []
    monkeypatch.setattr(storage, "is_locked", lambda file: file == cells["one"].file() and len(order) < 1)
    monkeypatch.setattr(spectra, "lanczos_at", lambda cell, _: order.append(cell.seed) or cell.seed)
    assert lanczos_all(cells) == {"one": 1, "two": 2}
    assert order == [2, 1]


def test_a_gradient_over_more_tokens_is_another_start_of_the_same_operator(trained):
    few, more = spectrum(trained), spectrum(trained, gradient_tokens=128)
    np.testing.assert_array_equal(few.runs[0][0], more.runs[0][0])
    _, gradient = hessian_rows(trained, 128, torch.zeros(1, few.size, dtype=torch.float64))
    P, _ = preconditioner(trained[1], trained[3], "adam", 0.95)
    assert more.gradient_square == pytest.approx((P * gradient**2).sum().item(), rel=1e-9)
    assert more.gradient_square != few.gradient_square


def test_a_damaged_result_is_named(trained, tmp_path):
    spectrum(trained, folder=tmp_path)
    (file,) = (tmp_path / "spectra").glob("*.npz")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DamagedFileError, match=f"{file.name} is damaged"):
        spectrum(trained, folder=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matrix": "fisher"}, "matrix must be one of gauss_newton, hessian, got 'fisher'"),
        ({"geometry": "sgd"}, "geometry must be one of adam, raw"),
        ({"tokens": 3}, "tokens must be 16 or more"),
    ],
)
def test_wrong_options_are_refused(trained, changes, message):
    with pytest.raises(ValueError, match=message):
        spectrum(trained, **changes)
