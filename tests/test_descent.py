import numpy as np
import pytest
import torch

from nqflib.descent import descend, half_time
from nqflib.layers import MLP, MultiHeadAttention, QuadraticTwin

PEERS = {
    "gd": lambda weights, rate: torch.optim.SGD(weights, rate),
    "momentum": lambda weights, rate: torch.optim.SGD(weights, rate, momentum=0.9),
    "adam": lambda weights, rate: torch.optim.Adam(weights, rate),
}


def problem():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(12, size, generator=generator, dtype=torch.float64) for size in (3, 2))
    layers = [MLP(3, 5, 2, scale=0.4, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    return x, y, layers


@pytest.mark.parametrize("optimizer", PEERS)
def test_losses_and_weights_are_those_of_the_optimizer_of_the_same_name_in_torch(optimizer):
    x, y, (layer, peer) = problem()
    losses = descend(lambda: layer(x), layer.parameters(), y, optimizer=optimizer, rate=0.03, steps=40)
    expected, steps = [], PEERS[optimizer](peer.parameters(), 0.03)
    for _ in range(41):
        steps.zero_grad()
        loss = (peer(x) - y).square().sum(1).mean()
        expected.append(loss.item())
        loss.backward()
        if len(expected) <= 40:
            steps.step()
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    for weight, peer_weight in zip(layer.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(weight, peer_weight, rtol=1e-11, atol=1e-13)


def test_watch_sees_the_weights_after_as_many_updates_as_it_is_told():
    x, y, (layer, _) = problem()
    seen = []

    def watch(step):
        seen.append((step, (layer(x) - y).square().sum(1).mean().item()))

    losses = descend(lambda: layer(x), layer.parameters(), y, optimizer="gd", rate=0.05, steps=5, watch=watch)
    assert [step for step, _ in seen] == list(range(6))
    np.testing.assert_allclose([loss for _, loss in seen], losses, rtol=1e-14)


@pytest.mark.parametrize("optimizer", PEERS)
def test_a_parameter_that_a_form_does_not_see_stays_where_it_is(optimizer):
    generator = torch.Generator().manual_seed(0)
    twin = QuadraticTwin(MultiHeadAttention(3, 2, key_dim=2, value_dim=2, generator=generator))
    x, X, y = (torch.randn(6, *size, generator=generator, dtype=torch.float64) for size in ((3,), (4, 3), (1,)))
    before = twin.layer.get_parameter("query").clone()
    losses = descend(twin.on(x, X), twin.parameters(), y, optimizer=optimizer, rate=0.01, steps=5)
    assert losses[-1] < losses[0]
    assert torch.equal(twin.layer.get_parameter("query"), before)


def test_a_run_that_diverges_ends_in_infinite_losses_and_is_not_watched_further():
    x, y, (layer, _) = problem()
    form, seen = QuadraticTwin(layer), []
    losses = descend(form.on(x), form.parameters(), y, optimizer="gd", rate=50.0, steps=60, watch=seen.append)
    assert np.isinf(losses[-1])
    assert seen == list(range(int(np.isinf(losses).argmax())))
    assert np.isfinite(losses[: len(seen)]).all()


def test_half_time_interpolates_between_steps_and_is_infinite_if_never_reached():
    assert half_time(np.array([4.0, 3.0, 1.0, 0.5])) == pytest.approx(1.5)
    assert half_time(np.array([4.0, 3.0, 2.5])) == np.inf


def test_an_unknown_optimizer_and_a_rate_that_is_not_positive_are_refused():
    x, y, (layer, _) = problem()
    with pytest.raises(ValueError, match="optimizer must be one of gd, momentum, adam, got 'sgd'"):
        descend(lambda: layer(x), layer.parameters(), y, optimizer="sgd", rate=0.1, steps=1)
    with pytest.raises(ValueError, match="rate must be positive, got 0"):
        descend(lambda: layer(x), layer.parameters(), y, optimizer="gd", rate=0, steps=1)
