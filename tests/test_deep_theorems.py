import torch

from nqflib.deep_theorems import closure_error, compression_error
from nqflib.stacks import DeepMLP


def stack(widths, scale, seed=0):
    return DeepMLP.of_widths(widths, scale=scale, generator=torch.Generator().manual_seed(seed))


def targets(widths, x):
    with torch.no_grad():
        return stack(widths, 0.5, seed=9)(x)


def test_a_stack_of_forms_closes_on_the_moments_of_its_layers_under_minibatches():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    batches = [torch.randint(20, (5,), generator=generator) for _ in range(60)]
    network = stack((3, 6, 4, 5, 2), 0.4)
    before = [w.clone() for w in network.parameters()]
    y = targets((3, 6, 4, 5, 2), x)
    settings = {"rate": 0.1, "steps": 60, "record_every": 20}
    assert closure_error(network, x, y, batches=batches, **settings) < 1e-12
    assert all(torch.equal(w, b) for w, b in zip(network.parameters(), before, strict=True))


def test_a_stack_compresses_exactly_over_the_whole_trajectory_and_not_with_the_first_subspace():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(10, 2, generator=generator, dtype=torch.float64) @ torch.randn(2, 5, generator=generator).double()
    y = targets((5, 6, 4, 5, 1), x)
    result = compression_error(stack((5, 30, 4, 30, 1), 0.15), x, y, rate=0.05, steps=80)
    assert result.error < 1e-11
    assert result.initial_subspace_error > 0.01
    # Layer 1 sees 2 inputs and 4 outputs, layer 2 at most 4 inputs and 1 output; one unit more than that each.
    assert result.widths == (7, 6)
    assert result.initial_subspace_widths == (7, 4)
