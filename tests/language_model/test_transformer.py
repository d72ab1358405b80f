"""The decoder against a slow one written from its definition, and the properties that its parametrisation promises."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vjp

from nqflib.language_model.transformer import (
    Architecture,
    Factors,
    Transformer,
    next_token_loss,
    norm,
    rotary_turns,
    rotate,
)

SMALL = Architecture(vocabulary=11, width=12, layers=2, heads=2, hidden=20, context=7)
PAPER = Architecture(vocabulary=8192, width=1024, layers=12, heads=16, hidden=4096, context=1024)


def model_with_readout(size: Architecture = SMALL, seed: int = 0) -> Transformer:
    """A float64 model whose unembedding is not zero, so that every weight matters."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(size, generator=generator, dtype=torch.float64)
    nn.init.normal_(model.unembedding, generator=generator)
    return model


def tokens_of(size: Architecture, batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(size.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def slow_logits(weights: dict[str, np.ndarray], size: Architecture, tokens: list[int]) -> np.ndarray:
    """One sequence, position by position and head by head, in plain NumPy."""
    D, H, K = size.width, size.heads, size.head_width

    def unit(x):
        return x / math.sqrt(sum(v * v for v in x) / len(x) + 1e-6)

    def turn(x, position):
        y = x.copy()
        for j in range(K // 2):
            angle = position * 10000 ** (-2 * j / K)
            pair = complex(x[2 * j], x[2 * j + 1]) * complex(math.cos(angle), math.sin(angle))
            y[2 * j], y[2 * j + 1] = pair.real, pair.imag
        return y

    stream = [weights["embedding"][token] for token in tokens]
    for layer in range(size.layers):
        qkv, out, up, down = (
            weights[f"blocks.{layer}.{k}"] for k in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
        )
        projected = [qkv @ unit(x) for x in stream]
        mixed = np.zeros((len(tokens), D))
        for head in range(H):
            part = slice(head * K, (head + 1) * K)
            q = [turn(unit(p[:D][part]), t) for t, p in enumerate(projected)]
            k = [turn(unit(p[D : 2 * D][part]), t) for t, p in enumerate(projected)]
            v = [p[2 * D :][part] for p in projected]
            for t in range(len(tokens)):
                weight = np.array([math.exp(q[t] @ k[s] / math.sqrt(K)) for s in range(t + 1)])
                mixed[t, part] = sum(w * v[s] for s, w in enumerate(weight / weight.sum()))
        stream = [x + out @ y / size.layers for x, y in zip(stream, mixed, strict=True)]
        for t, x in enumerate(stream):
            hidden = up @ unit(x)
            active = np.array([h * 0.5 * (1 + math.erf(h / math.sqrt(2))) for h in hidden])
            stream[t] = x + down @ active / size.layers
    return np.array([weights["unembedding"] @ unit(x) for x in stream])


def test_the_paper_s_model_has_167772160_parameters():
    with torch.device("meta"):
        model = Transformer(PAPER)
    assert sum(p.numel() for p in model.parameters()) == PAPER.parameters == 167_772_160
    assert PAPER.block_parameters == 150_994_944
    assert PAPER.head_width == 64


@pytest.mark.parametrize("length", [1, 4, 7])
def test_logits_equal_those_of_a_slow_decoder_written_from_the_definition(length):
    model = model_with_readout()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    tokens = tokens_of(SMALL, 2, length)
    expected = np.stack([slow_logits(weights, SMALL, row) for row in tokens.tolist()])
    np.testing.assert_allclose(model(tokens).detach().numpy(), expected, rtol=0, atol=1e-11)


def test_the_loss_is_the_mean_negative_log_probability_of_the_next_token():
    model, windows = model_with_readout(), tokens_of(SMALL, 3, 6)
    probability = model(windows[:, :-1]).softmax(-1)
    by_hand = [-math.log(probability[b, t, windows[b, t + 1]].item()) for b in range(3) for t in range(5)]
    assert next_token_loss(model, windows).item() == pytest.approx(np.mean(by_hand), rel=1e-12)


def test_an_untrained_model_predicts_every_token_alike_and_only_its_readout_has_a_gradient():
    model = Transformer(SMALL, dtype=torch.float64)
    loss = next_token_loss(model, tokens_of(SMALL, 2, 5))
    assert loss.item() == pytest.approx(math.log(11), rel=1e-14)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    nonzero = [
        name for (name, _), g in zip(model.named_parameters(), gradients, strict=True) if g.abs().max().item() > 0
    ]
    assert nonzero == ["unembedding"]


def test_a_token_changes_no_prediction_before_it_and_its_own():
    model, tokens = model_with_readout(), tokens_of(SMALL, 1, 7)
    before = model(tokens)
    changed = tokens.clone()
    changed[0, 4] = (tokens[0, 4] + 1) % 11
    difference = (model(changed) - before).abs().amax(-1)[0]
    assert torch.equal(difference[:4], torch.zeros(4, dtype=torch.float64))
    assert difference[4:].min().item() > 1e-3


def test_rotated_products_depend_on_the_distance_only_and_lengths_stay():
    generator = torch.Generator().manual_seed(3)
    turns = rotary_turns(30, 8)
    q, k = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    turned_q, turned_k = rotate(q.expand(30, 8), turns), rotate(k.expand(30, 8), turns)
    scores = turned_q @ turned_k.T
    for distance in (-17, -1, 0, 5, 29):
        diagonal = torch.diagonal(scores, distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)
    assert (scores[0] - scores[0, 0]).abs().max().item() > 0.1, "distance must matter"
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(30), rtol=1e-12, atol=0)


def test_the_scale_of_queries_and_keys_is_forgotten_and_that_of_values_is_not():
    model, tokens = model_with_readout(), tokens_of(SMALL, 2, 7)
    before = model(tokens)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv[: 2 * SMALL.width] *= 1000  # large enough for the norm's eps to vanish
    first = model(tokens)
    assert (first - before).abs().max().item() < 1e-4
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv[: 2 * SMALL.width] *= 1000
    assert (model(tokens) - first).abs().max().item() < 1e-9
    with torch.no_grad():
        model.blocks[0].attention.qkv[2 * SMALL.width :] *= 2
    assert (model(tokens) - first).abs().max().item() > 1e-2


def test_the_norm_gives_mean_square_one_and_works_in_float32_for_half_precision():
    x = torch.tensor([[3.0, -4.0], [1e-3, 1e-3]], dtype=torch.float64)
    expected = torch.stack([x[0] / math.sqrt(12.5 + 1e-6), x[1] / math.sqrt(2e-6)])
    torch.testing.assert_close(norm(x), expected, rtol=1e-14, atol=0)
    large = torch.full((4,), 300.0, dtype=torch.float16)  # its square overflows float16
    torch.testing.assert_close(norm(large), torch.ones(4, dtype=torch.float16), rtol=1e-3, atol=0)


def test_initial_weights_have_the_spreads_of_the_parametrisation_whatever_the_dtype():
    size = Architecture(vocabulary=400, width=96, layers=2, heads=3, hidden=384, context=8)
    wide = Transformer(size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    narrow = Transformer(size, generator=torch.Generator().manual_seed(5))
    spread = {"embedding": 1, "qkv": 96**-0.5, "out": 96**-0.5, "up": 96**-0.5, "down": 96**0.5 / 384}
    for name, p in wide.named_parameters():
        expected = spread.get(name.rpartition(".")[2], 0.0)
        assert p.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * p.numel())), name
        assert abs(p.mean().item()) <= 5 * expected / math.sqrt(p.numel()), name
        assert torch.equal(p.float(), dict(narrow.named_parameters())[name])


def test_the_factors_are_those_of_the_paper_at_its_size():
    with torch.device("meta"):
        factors = Transformer(PAPER).factors()
    kinds = {"attention.qkv": (12288, 1 / 1024), "attention.out": (12288, 1 / 1024)}
    kinds |= {"mlp.up": (49152, 1 / 1024), "mlp.down": (12288, 1 / 4096)}
    expected = {f"blocks.{layer}.{kind}": Factors(*f) for layer in range(12) for kind, f in kinds.items()}
    assert factors == {"embedding": (1024, 1 / 64), **expected, "unembedding": (1, 1 / 1024)}


def test_forward_derivatives_agree_with_differences():
    model, tokens = model_with_readout(), tokens_of(SMALL, 2, 7)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    direction = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in weights.items()}

    def logits(w):
        return functional_call(model, w, (tokens,))

    def moved(h):
        return logits({n: p + h * direction[n] for n, p in weights.items()})

    _, tangent = jvp(logits, (weights,), (direction,))
    differences = (8 * (moved(1e-4) - moved(-1e-4)) - (moved(2e-4) - moved(-2e-4))) / 12e-4  # fourth order
    torch.testing.assert_close(tangent, differences, rtol=1e-8, atol=1e-8)

    _, pullback = vjp(logits, weights)
    cotangent = torch.randn(tangent.shape, generator=generator, dtype=tangent.dtype)
    (transposed,) = pullback(cotangent)
    inner = sum((transposed[n] * direction[n]).sum() for n in weights)
    torch.testing.assert_close(inner, (cotangent * tangent).sum(), rtol=1e-12, atol=0)


def test_hessian_products_agree_forward_over_reverse_and_reverse_over_reverse():
    model, windows = model_with_readout(), tokens_of(SMALL, 2, 8)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(4)
    u, v = ({n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in weights.items()} for _ in range(2))

    def loss(w):
        logits = functional_call(model, w, (windows[:, :-1],))
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def product(direction):
        return grad(lambda w: sum((g * direction[n]).sum() for n, g in grad(loss)(w).items()))(weights)

    Hv = product(v)
    _, forward = jvp(grad(loss), (weights,), (v,))
    for name in weights:
        torch.testing.assert_close(Hv[name], forward[name], rtol=1e-9, atol=1e-12)
    uHv = sum((u[n] * Hv[n]).sum() for n in weights)
    vHu = sum((v[n] * h).sum() for n, h in product(u).items())
    torch.testing.assert_close(uHv, vHu, rtol=1e-10, atol=1e-12)


def test_fused_attention_gives_the_same_logits():
    tokens = tokens_of(SMALL, 2, 7)
    written_out, fused = model_with_readout(), Transformer(SMALL, dtype=torch.float64, fused=True)
    fused.load_state_dict(written_out.state_dict())
    torch.testing.assert_close(fused(tokens), written_out(tokens), rtol=0, atol=1e-12)


def test_sizes_that_make_no_model_are_refused_by_name():
    with pytest.raises(ValueError, match=r"width must be a multiple of 2 heads = 6, got 16"):
        Architecture(vocabulary=8, width=16, layers=1, heads=3, hidden=8, context=4)
    with pytest.raises(ValueError, match="layers must be a whole number of at least 1, got 0"):
        Architecture(vocabulary=8, width=16, layers=0, heads=2, hidden=8, context=4)
    with pytest.raises(ValueError, match="at most 7 positions, got 8"):
        Transformer(SMALL)(tokens_of(SMALL, 1, 8))
