"""The optimizer against a scalar loop and torch's Adam, schedules against the paper's, averages against their sums."""

import math

import numpy as np
import pytest
import torch

from nqflib.language_model.linearization import loss_and_gradient
from nqflib.language_model.optimizer import Adam, Average, beta2, rate_factor
from nqflib.language_model.transformer import Architecture, Transformer, flatten, unflatten


def adam_of(weights, pre, post):
    return Adam(weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights), pre, post)


def random_case(n=5, steps=60):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(n), draw(n).exp(), draw(n).exp(), draw(steps, n)


def test_updates_equal_those_of_a_scalar_loop():
    start, pre, post, gradients = random_case()
    adam = adam_of(start, pre, post)
    for gradient in gradients:
        adam.update(gradient.clone(), 0.01)

    for i in range(len(start)):
        w, m, nu, product = start[i].item(), 0.0, 0.0, 1.0
        for t, g in enumerate(gradients[:, i].tolist(), start=1):
            g *= pre[i].item()
            b = 1 - 1 / max(20, t / 100)
            m, nu, product = 0.9 * m + 0.1 * g, b * nu + (1 - b) * g * g, product * b
            w -= 0.01 * post[i].item() * (m / (1 - 0.9**t)) / (math.sqrt(nu / (1 - product)) + 1e-8)
        assert adam.weights[i].item() == pytest.approx(w, rel=1e-12)
        assert adam.corrected_second_moment()[i].item() == pytest.approx(nu / (1 - product), rel=1e-12)
    assert adam.beta2_product == pytest.approx(0.95**60, rel=1e-12)


def test_without_factors_the_first_2000_steps_are_those_of_torch_s_adam():
    start, _, _, gradients = random_case()
    one = torch.ones_like(start)
    ours, theirs = adam_of(start, one, one), torch.nn.Parameter(start.clone())
    peer = torch.optim.Adam([theirs], lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    for gradient in gradients:
        ours.update(gradient.clone(), 0.02)
        theirs.grad = gradient.clone()
        peer.step()
    torch.testing.assert_close(ours.weights, theirs.detach(), rtol=1e-12, atol=1e-14)


def test_the_second_moment_remembers_20_steps_or_a_hundredth_of_the_run():
    assert [beta2(t) for t in (1, 2000, 4000, 10**6)] == [0.95, 0.95, 0.975, 1 - 1e-4]


def test_the_schedule_has_the_paper_s_rates_at_its_checkpoints():
    assert [rate_factor(x, "cosine") for x in (0.0, 0.05, 0.1, 1.0)] == pytest.approx([0.1, 0.55, 1, 0.1], abs=1e-12)
    at_checkpoints = [rate_factor(k / 29, "cosine") for k in (2, 14, 29)]
    assert at_checkpoints == pytest.approx([0.72, 0.655, 0.10], abs=0.002)
    assert rate_factor(0.5, "constant") == rate_factor(1.0, "constant") == 1.0
    assert rate_factor(0.05, "constant") == rate_factor(0.05, "cosine")
    with pytest.raises(ValueError, match="schedule must be one of cosine, constant, got 'linear'"):
        rate_factor(0.5, "linear")


@pytest.mark.parametrize("window", [0.04, 0.08])
def test_averages_weigh_steps_by_a_power_of_time_and_lag_by_their_window(window):
    steps, start = 3000, torch.zeros(1, dtype=torch.float64)
    adam, average = adam_of(start, start, start), Average.start(window, start + 7)
    weights = np.zeros(0)
    values = np.arange(1, steps + 1) / steps  # straight line, so that the average lags by the mean age
    squares = 1 + np.sin(np.arange(steps) / 400)
    for t in range(1, steps + 1):
        adam.step, adam.beta2_product = t, 0.5
        adam.weights.fill_(values[t - 1])
        adam.second_moment.fill_(squares[t - 1] * 0.5)  # nu^ is twice this
        average.update(adam)
        h = max(1.0, t * window / (1 - window))
        weights = np.append(weights * (1 - 1 / h), 1 / h)
    assert average.weights.item() == pytest.approx(weights @ values, rel=1e-10)
    assert average.second_moment.item() == pytest.approx(weights @ squares, rel=1e-10)
    assert 1 - average.weights.item() == pytest.approx(window, rel=0.02)
    expected = np.arange(1, steps + 1) ** ((1 - window) / window - 1.0)
    late = slice(steps // 2, None)
    np.testing.assert_allclose(weights[late] / weights[-1], (expected / expected[-1])[late], rtol=0.02, atol=1e-4)


def losses(width: int, layers: int, rescaled: bool = True) -> list[float]:
    """The first losses on one batch of counting sequences, at the same rate for every size."""
    size = Architecture(vocabulary=32, width=width, layers=layers, heads=2, hidden=4 * width, context=16)
    model = Transformer(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    adam = Adam.start(model, flatten({name: p.detach() for name, p in model.named_parameters()}))
    if not rescaled:
        adam.post = torch.full_like(adam.post, 1 / 64)
    windows = torch.randint(32, (16, 17), generator=torch.Generator().manual_seed(5)).cumsum(1) % 32
    result = []
    for _ in range(4):
        loss, gradient = loss_and_gradient(model, unflatten(adam.weights, model), windows)
        adam.update(flatten(gradient), 1.0)
        result.append(loss.item())
    return result


def test_one_rate_trains_every_width_and_depth_alike_and_only_with_the_factors():
    small = losses(64, 2)
    assert small[-1] < small[0] - 0.9
    for width, layers in ((192, 2), (64, 8)):
        assert losses(width, layers) == pytest.approx(small, abs=0.15)
    without = losses(192, 2, rescaled=False)
    assert max(abs(a - b) for a, b in zip(without, small, strict=True)) > 0.5
