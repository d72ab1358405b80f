"""Training of the weights themselves is that of torch's own optimizers, and its helpers do what they say."""

import pytest
import torch
from torch import Tensor

from nqflib.moments import squared_loss
from nqflib.tracking import Adam, Descent, mean_first_basis, rotation_about_the_mean, train


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem() -> tuple[Tensor, Tensor, list[Tensor]]:
    x = torch.randn(12, 3, generator=generator(), dtype=torch.float64)
    y = torch.randn(12, 2, generator=generator(1), dtype=torch.float64)
    return x, y, list(torch.randint(12, (40, 5), generator=generator(2)))


def weights() -> list[Tensor]:
    shapes = (3, 4), (4, 2), (1,)  # the last one has no gradient
    return [torch.randn(s, generator=generator(3), dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize(
    ("rule", "peer"),
    [
        (Descent(0.02), lambda w: torch.optim.SGD(w, 0.02)),
        (
            Descent(0.02, momentum=0.9, weight_decay=0.1),
            lambda w: torch.optim.SGD(w, 0.02, momentum=0.9, weight_decay=0.1),
        ),
        (Adam(0.02, (0.8, 0.95), 1e-3), lambda w: torch.optim.Adam(w, 0.02, betas=(0.8, 0.95), eps=1e-3)),
    ],
    ids=["descent", "momentum and decay", "adam"],
)
def test_every_rule_takes_the_steps_of_torchs_optimizer(rule, peer):
    x, y, batches = problem()
    ours, theirs = weights(), weights()
    run = train(
        lambda samples: torch.tanh(x[samples] @ ours[0]) @ ours[1],
        ours,
        y,
        rule=rule,
        steps=40,
        observe=lambda: ours[0],
        batches=batches,
    )
    optimizer = peer(theirs)
    for batch in batches:
        optimizer.zero_grad()
        (squared_loss(torch.tanh(x[batch] @ theirs[0]) @ theirs[1], y[batch]) + 0 * theirs[2].sum()).backward()
        optimizer.step()
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-14)
    assert run.outcome == "finished"
    assert (run.observed[0] - weights()[0]).abs().max() == 0  # what was observed is not changed by later steps


def test_the_last_step_is_observed_even_between_records():
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    target = torch.ones(1, 1, dtype=torch.float64)
    run = train(lambda _: w.view(1, 1), [w], target, rule=Descent(0.25), steps=5, observe=lambda: w, every=2)
    assert run.steps.tolist() == [0, 2, 4, 5]
    assert run.observed.tolist() == [0, 0.75, 1 - 2**-4, 1 - 2**-5]


def test_a_run_that_diverges_says_where_and_keeps_what_was_finite():
    w = torch.full((), 2.0, dtype=torch.float64, requires_grad=True)
    target = torch.zeros(1, 1, dtype=torch.float64)
    run = train(lambda _: (w**3).view(1, 1), [w], target, rule=Descent(1.0), steps=50, observe=lambda: w)
    assert run.outcome.startswith("diverged at step ")
    stopped = int(run.outcome.split()[-1])
    assert run.steps[-1] == stopped
    assert run.observed[:-1].isfinite().all()


def test_a_rotation_about_the_mean_keeps_both_moments_and_moves_the_weights():
    Q = rotation_about_the_mean(17, generator())
    W = torch.randn(4, 17, generator=generator(1), dtype=torch.float64)
    torch.testing.assert_close((W @ Q) @ (W @ Q).T, W @ W.T, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close((W @ Q).sum(1), W.sum(1), rtol=1e-13, atol=1e-13)
    assert (W @ Q - W).abs().max() > 0.5


@pytest.mark.parametrize("d", [1, 2, 5])
def test_the_first_vector_of_the_basis_is_the_mean(d):
    basis = mean_first_basis(d)
    torch.testing.assert_close(basis[:, 0], torch.full((d,), d**-0.5, dtype=torch.float64), rtol=1e-14, atol=0)
    torch.testing.assert_close(basis.T @ basis, torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"steps": -1}, "steps must be"), ({"every": 0}, "every at least 1"), ({"batches": []}, "one index tensor")],
)
def test_wrong_arguments_are_named(change, words):
    w = torch.zeros(1, 1, requires_grad=True)
    arguments = {"rule": Descent(0.1), "steps": 1, "observe": lambda: w} | change
    with pytest.raises(ValueError, match=words):
        train(lambda _: w, [w], torch.ones(1, 1), **arguments)
    with pytest.raises(ValueError, match="d must be"):
        rotation_about_the_mean(1, generator())
