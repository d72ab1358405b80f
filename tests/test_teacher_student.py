import numpy as np
import pytest
import torch

from nqflib.layers import MLP, QuadraticTwin, QueryKeyAttention
from nqflib.teacher_student import Perceptron, QueryKey, Runs, train


@pytest.fixture(autouse=True)
def quiet_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("NQF_PROGRESS", str(tmp_path / "progress"))


def perceptron_layer(student, weights, constants):
    layer = MLP(student.dim, student.width)
    with torch.no_grad():
        layer.u.copy_(weights[0])
        layer.v.copy_(weights[1])
    return layer


def attention_layer(student, weights, constants):
    layer = QueryKeyAttention(constants[0].T, student.heads, key_dim=student.key_dim)
    with torch.no_grad():
        layer.query.copy_(weights[0])
        layer.key.copy_(weights[1])
    return layer


STUDENTS = [
    (Perceptron(dim=4, width=6), perceptron_layer),
    (QueryKey(dim=3, tokens=5, key_dim=2, heads=2), attention_layer),
]


@pytest.mark.parametrize(("student", "layer_of"), STUDENTS)
@pytest.mark.parametrize("quadratic", [False, True])
def test_a_student_computes_the_layer_of_the_same_weights_or_its_quadratic_twin(student, layer_of, quadratic):
    generator = torch.Generator().manual_seed(0)
    weights, constants = student.weights(0.7, generator), student.constants(generator)
    inputs = student.inputs(9, generator)
    layer = layer_of(student, weights, constants)
    peer = QuadraticTwin(layer) if quadratic else layer
    torch.testing.assert_close(student.outputs(weights, constants, inputs, quadratic), peer(*inputs).squeeze(-1))


@pytest.mark.parametrize(("student", "layer_of"), STUDENTS)
def test_every_run_is_online_gradient_descent_of_a_layer_of_its_own(student, layer_of):
    rates, seeds, batch_size, test_samples, eps, scale = (0.05, 0.2), (3, 8), 7, 11, 0.4, 0.3
    settings = {"eps": eps, "batch_size": batch_size, "test_samples": test_samples, "teacher_scale": scale}
    runs = train(student, rates=rates, seeds=seeds, records=np.array([0, 6]), **settings)
    for i, rate in enumerate(rates):
        for j, seed in enumerate(seeds):
            generator = torch.Generator().manual_seed(seed)
            weights, constants = student.weights(1.0, generator), student.constants(generator)
            teacher = layer_of(student, weights, constants)
            test = student.inputs(test_samples, generator)
            layer = layer_of(student, student.weights(eps, generator), constants)
            form = QuadraticTwin(layer)
            for _ in range(6):
                batch = student.inputs(batch_size, generator)
                for module in (layer, form):
                    loss = (module(*batch) - scale * teacher(*batch)).square().mean()
                    slopes = torch.autograd.grad(loss, list(module.parameters()))
                    with torch.no_grad():
                        for w, slope in zip(module.parameters(), slopes, strict=True):
                            w.sub_(rate * slope)
            y = scale * teacher(*test)
            variance = y.var(correction=0)
            for losses, module in ((runs.layer, layer), (runs.form, form)):
                expected = ((module(*test) - y).square().mean() / variance).item()
                assert losses[1, i, j] == pytest.approx(expected, rel=1e-10)
            apart = ((layer(*test) - form(*test)).square().mean() / variance).item()
            assert runs.apart[1, i, j] == pytest.approx(apart, rel=1e-10)


def test_runs_part_at_the_first_record_above_the_level_or_never_and_a_lost_run_has_parted():
    layer = np.array([[1.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0.2, 0.4, 0.5]])[:, None]
    form = np.array([[1.0, 1.0, 1.0], [0.52, 0.5, np.nan], [0.5, 0.4, np.nan]])[:, None]
    runs = Runs(np.array([0, 10, 30]), layer, form, (layer - form) ** 2)
    assert runs.parting_steps(0.1).tolist() == [[30, np.inf, 10]]
    assert runs.parting_steps(0.01).tolist() == [[10, np.inf, 10]]


@pytest.mark.parametrize("records", [[], [-1, 2], [3, 3]])
def test_records_that_do_not_increase_are_refused(records):
    with pytest.raises(ValueError, match="records must be increasing"):
        train(Perceptron(dim=2, width=2), rates=[0.1], seeds=[0], eps=0.1, records=np.array(records))
