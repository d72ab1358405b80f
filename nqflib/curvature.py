"""Products with the curvature of a loss, for any model and data, without forming a matrix.

With outputs f(theta, x), a loss l(f, y) of one output each, and C outputs (tokens, or samples) in all batches together,

    L = (1/C) sum l,      Gauss-Newton G = (1/C) sum J^T l'' J,      Hessian H = G + (1/C) sum l' . d2f,

J = df/dtheta. Batches may differ in size: sums are divided once, by C. What an optimizer sees of it is in
`nqflib.geometry`.

    >>> model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x, y = torch.tensor([[1.0, 2.0], [3.0, 1.0]]).double(), torch.zeros(2, 1).double()
    >>> curvature = Curvature(model, [(x, y)], loss=SQUARED_ERROR)
    >>> torch.stack([curvature.hessian(v) for v in torch.eye(2).double()])    # 2/C sum x x^T
    tensor([[10.,  5.],
            [ 5.,  5.]], dtype=torch.float64)

Second derivatives are taken as reverse over reverse or forward over reverse. The other two orders give wrong second
derivatives of `layer_norm` in torch, silently (two of four compositions, by up to 68 %), and are not offered. Attention
is computed by torch's unfused kernel, since the fused ones have no second derivative.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Parameters = dict[str, Tensor]
Product = Callable[[Tensor], Tensor]
Batch = tuple[Any, Tensor]
Plan = Literal["auto", "retain", "recompute"]
Way = Literal["reverse", "forward", "timed"]
Sums = Literal["float64", "compensated"]
IGNORED = -100  # target of a position that does not count, as in torch's cross_entropy


class OutputLoss(NamedTuple):
    """A loss of the outputs, summed, with what Gauss-Newton needs of it in closed form."""

    value: Callable[[Tensor, Tensor], Tensor]  # (f, y) -> sum of l
    gradient: Callable[[Tensor, Tensor], Tensor]  # (f, y) -> l', in f's shape
    hessian: Callable[[Tensor, Tensor, Tensor], Tensor]  # (f, y, u) -> l'' u
    terms: Callable[[Tensor, Tensor], int]  # (f, y) -> the number that the sum is divided by


def _cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=IGNORED)


def _cross_entropy_gradient(f: Tensor, y: Tensor) -> Tensor:
    counts = (y != IGNORED).unsqueeze(-1)
    return (f.softmax(-1) - F.one_hot(y.clamp_min(0), f.shape[-1])) * counts


def _cross_entropy_hessian(f: Tensor, y: Tensor, u: Tensor) -> Tensor:
    p = f.softmax(-1) * (y != IGNORED).unsqueeze(-1)
    return p * (u - (p * u).sum(-1, keepdim=True))


# Mean over tokens (or samples) of -ln softmax(f)_y; f (..., V), y (...) int64, positions with y = -100 not counted.
CROSS_ENTROPY = OutputLoss(
    _cross_entropy,
    _cross_entropy_gradient,
    _cross_entropy_hessian,
    lambda f, y: int((y != IGNORED).sum()),
)
# Mean over samples, sum over outputs, of (f - y)^2, as in paper 1: no factor 1/2.
SQUARED_ERROR = OutputLoss(
    lambda f, y: (f - y).square().sum(),
    lambda f, y: 2 * (f - y),
    lambda f, y, u: 2 * u,
    lambda f, y: len(f),
)


class Curvature:
    """Products with the Gauss-Newton matrix and the Hessian of a mean loss at fixed parameters.

    Args:
        model: a module, at its present parameters; or a function f(parameters, inputs) with `parameters` given. One
            with `linearize(parameters, inputs) -> (logits, jvp, vjp)` is differentiated by it in `gauss_newton`.
        batches: (inputs, targets) pairs, the same at every pass: a list, not a generator. Each is a micro-batch.
        loss: of the outputs, `CROSS_ENTROPY` or `SQUARED_ERROR` or your own.
        parameters: by name. Those of a module that do not require gradients are frozen, unless named here.
        names: the parameters to differentiate in, all if not given; the others are frozen.
        plan: "retain" keeps what every micro-batch's derivatives need between products, "recompute" nothing; "auto"
            retains if that is estimated to fit in `memory` bytes. `retained_bytes` holds the estimate.
        way: "reverse" (over reverse) or "forward" (over reverse, which retains nothing for the Hessian), or "timed" to
            take the faster of both Hessian products on the first micro-batch; `trial` holds the seconds.
        sums: over micro-batches, in "float64" or "compensated" in the parameters' format.

    Vectors are (n,) or several at once (k, n), which share the primal pass; n sums the sizes of `shapes`, in its order.

    Raises:
        ValueError: for batches that can be read only once or differ between two passes (shuffling, augmentation),
            unknown names, and a model that gives different outputs when called twice (dropout).
        RuntimeError: by the products, within `torch.inference_mode()`; `torch.no_grad()` does not matter.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[Parameters, Any], Tensor],
        batches: Iterable[Batch],
        *,
        loss: OutputLoss = CROSS_ENTROPY,
        parameters: Mapping[str, Tensor] | None = None,
        names: Sequence[str] | None = None,
        plan: Plan = "auto",
        way: Way = "reverse",
        sums: Sums = "float64",
        memory: int = 2 << 30,
    ) -> None:
        if iter(batches) is batches:
            raise ValueError("batches must give the same pairs at every pass, such as a list; got an iterator")
        for name, value, kind in (("plan", plan, Plan), ("way", way, Way), ("sums", sums, Sums)):
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        given = _parameters(model, parameters)
        unknown = [name for name in names or () if name not in given]
        if unknown:
            raise ValueError(f"names must be among {', '.join(given)}, got {', '.join(unknown)}")
        chosen = names if names is not None else [n for n, p in given.items() if parameters or p.requires_grad]
        if not chosen:
            raise ValueError("no parameter requires a gradient; name some in `names`")
        self.model, self.batches, self.loss, self.sums = model, batches, loss, sums
        self.parameters = {name: given[name].detach() for name in chosen}
        self.frozen = {name: p.detach() for name, p in given.items() if name not in self.parameters}
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        first = next(iter(self.parameters.values()))
        self.n, self.dtype, self.device = sum(self.sizes), first.dtype, first.device
        self.linearizes = callable(getattr(model, "linearize", None))
        self.retained_bytes = self._check_and_estimate()
        self.plan = plan if plan != "auto" else ("retain" if self.retained_bytes <= memory else "recompute")
        self._kept: dict[tuple[str, int], Callable[[Tensor], list[Tensor]]] = {}
        self.trial: dict[str, float] = {}
        self.way = self._trial() if way == "timed" else way

    def value(self) -> float:
        """L."""
        total, terms = 0.0, 0
        with torch.no_grad():
            for x, y in self._data():
                f = self._outputs(self.parameters, x)
                total, terms = total + self.loss.value(f, y).item(), terms + self.loss.terms(f, y)
        return total / terms

    def gradient(self) -> Tensor:
        """dL/dtheta, (n,)."""

        def of(batch: Batch) -> Callable[[Tensor], list[Tensor]]:
            def product(_: Tensor) -> list[Tensor]:
                leaves, f = self._graph(batch[0])
                value = self.loss.value(f, batch[1])
                return [torch.cat([g.reshape(-1) for g in _grad(value, leaves)])]

            return product

        return self._sum("gradient", of, torch.zeros(1, self.n, dtype=self.dtype, device=self.device), False)[0]

    def gauss_newton(self, vectors: Tensor) -> Tensor:
        """G v in the shape of `vectors`, (n,) or (k, n)."""
        if self.linearizes:
            of = self._linearized
        else:
            of = self._gauss_newton_reverse if self.way == "reverse" else self._gauss_newton_forward
        return self._shaped("gauss_newton", of, vectors)

    def hessian(self, vectors: Tensor) -> Tensor:
        """H v in the shape of `vectors`, (n,) or (k, n)."""
        return self._shaped("hessian", self._hessians[self.way], vectors, self.way == "reverse")

    # ------------------------------------------------------------------------ one micro-batch

    def _linearized(self, batch: Batch) -> Callable[[Tensor], list[Tensor]]:
        model: Any = self.model
        f, jvp, vjp = model.linearize(self.parameters | self.frozen, batch[0])
        still = {name: torch.zeros_like(p) for name, p in self.frozen.items()}
        return self._through((f, lambda v: jvp(v | still), vjp), batch[1])

    def _through(self, linearized: Any, y: Tensor) -> Callable[[Tensor], list[Tensor]]:
        """v -> J^T l'' J v from the outputs, v -> J v and u -> J^T u."""
        f, jvp, vjp = linearized

        def product(vectors: Tensor) -> list[Tensor]:
            results = []
            for v in vectors:
                pulled = vjp(self.loss.hessian(f, y, jvp(self._by_name(v))))
                results.append(torch.cat([pulled[name].reshape(-1) for name in self.shapes]))
            return results

        return product

    def _gauss_newton_reverse(self, batch: Batch) -> Callable[[Tensor], list[Tensor]]:
        return self._through(linearize(lambda p: self._outputs(p, batch[0]), self.parameters), batch[1])

    def _gauss_newton_forward(self, batch: Batch) -> Callable[[Tensor], list[Tensor]]:
        leaves, f = self._graph(batch[0])

        def push(v: Parameters) -> Tensor:
            with torch.no_grad():
                return torch.func.jvp(lambda p: self._outputs(p, batch[0]), (self.parameters,), (v,))[1]

        def pull(u: Tensor) -> Parameters:
            return dict(zip(self.shapes, _grad(f, leaves, u, retain_graph=True), strict=True))

        return self._through((f.detach(), push, pull), batch[1])

    def _hessian_reverse(self, batch: Batch) -> Callable[[Tensor], list[Tensor]]:
        leaves, f = self._graph(batch[0])
        gradients = _grad(self.loss.value(f, batch[1]), leaves, create_graph=True)

        def product(vectors: Tensor) -> list[Tensor]:
            results = []
            for v in vectors:
                used = [(g, d) for g, d in zip(gradients, self._by_name(v).values(), strict=True) if g.requires_grad]
                second = _grad([g for g, _ in used], leaves, [d for _, d in used], retain_graph=True)
                results.append(torch.cat([g.reshape(-1) for g in second]))
            return results

        return product

    def _hessian_forward(self, batch: Batch) -> Callable[[Tensor], list[Tensor]]:
        gradient = torch.func.grad(lambda p: self.loss.value(self._outputs(p, batch[0]), batch[1]))

        def product(vectors: Tensor) -> list[Tensor]:
            tangents = (torch.func.jvp(gradient, (self.parameters,), (self._by_name(v),))[1] for v in vectors)
            return [torch.cat([t[name].reshape(-1) for name in self.shapes]) for t in tangents]

        return product

    @property
    def _hessians(self) -> dict[str, Callable[[Batch], Callable[[Tensor], list[Tensor]]]]:
        return {"reverse": self._hessian_reverse, "forward": self._hessian_forward}

    # --------------------------------------------------------------------------- all batches

    def _shaped(self, name: str, of: Callable, vectors: Tensor, retainable: bool = True) -> Tensor:
        if vectors.ndim not in (1, 2) or vectors.shape[-1] != self.n:
            raise ValueError(f"vectors must have shape ({self.n},) or (k, {self.n}), got {tuple(vectors.shape)}")
        rows = vectors.detach().reshape(-1, self.n).to(device=self.device, dtype=self.dtype)
        return self._sum(name, of, rows, retainable and self.plan == "retain").view(vectors.shape)

    @torch.enable_grad()  # within no_grad() the derivatives of an evaluation loop would be zeros, silently
    def _sum(self, name: str, of: Callable, rows: Tensor, retain: bool) -> Tensor:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("products need derivatives, which torch.inference_mode() switches off; leave it first")
        total = _Sum(rows, self.sums)
        for i, batch in enumerate(self._data()):
            product = self._kept.get((name, i)) or of(batch)
            if retain:
                self._kept[name, i] = product
            total.add(product(rows))
            del product  # its graph goes before the next one is built
        return total.divided(self.terms)

    def _data(self) -> Iterable[Batch]:
        for x, y in self.batches:
            yield (x.to(self.device) if isinstance(x, Tensor) else x), y.to(self.device)

    def _graph(self, inputs: Any) -> tuple[list[Tensor], Tensor]:
        """Leaves and the outputs computed from them."""
        leaves = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}
        with torch.enable_grad():
            return list(leaves.values()), self._outputs(leaves, inputs)

    def _outputs(self, parameters: Mapping[str, Tensor], inputs: Any) -> Tensor:
        every = {**parameters, **self.frozen}
        with sdpa_kernel(SDPBackend.MATH):
            if isinstance(self.model, nn.Module):
                return functional_call(self.model, every, (inputs,))
            return self.model(every, inputs)

    def _by_name(self, v: Tensor) -> Parameters:
        pieces = v.split(self.sizes)
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def _check_and_estimate(self) -> int:
        """Bytes that the graphs of all micro-batches' outputs keep, from the first one's; refuse a random model."""
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        inputs = [x for x, _ in self._data()]
        if not inputs:
            raise ValueError("batches must hold at least one pair")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _, f = self._graph(inputs[0])
        with torch.no_grad():
            again = self._outputs(self.parameters, inputs[0])
            if not torch.equal(f, again):
                raise ValueError("model must give the same outputs when called twice; switch dropout off by .eval()")
            second = list(self._data())
            if not _same(inputs, [x for x, _ in second]):
                raise ValueError(
                    "batches must give the same pairs at every pass; shuffling or augmentation changes them"
                )
            # The outputs of the other batches are not needed for their number: it depends on the shapes and targets.
            self.terms = sum(self.loss.terms(f[:1].expand(len(y), *f.shape[1:]), y) for _, y in second)
        own = {p.untyped_storage().data_ptr() for p in (*self.parameters.values(), *self.frozen.values())}
        activations = sum(size for address, size in kept.items() if address not in own)
        share = sum(map(len, inputs)) / len(inputs[0]) if isinstance(inputs[0], Tensor) else len(inputs)
        return int(2 * share * activations)  # the graph of the gradient keeps about as much again

    def _trial(self) -> Literal["reverse", "forward"]:
        batch = next(iter(self._data()))
        rows = torch.ones(1, self.n, dtype=self.dtype, device=self.device)
        for way, of in self._hessians.items():
            of(batch)(rows)
            begin = time.perf_counter()
            of(batch)(rows)[0].sum().item()
            self.trial[way] = time.perf_counter() - begin
        return "reverse" if self.trial["reverse"] <= self.trial["forward"] else "forward"


def linearize(
    outputs: Callable[[Parameters], Tensor], parameters: Parameters
) -> tuple[Tensor, Callable[[Parameters], Tensor], Callable[[Tensor], Parameters]]:
    """f(theta) of any differentiable function, v -> J v and u -> J^T u, v and J^T u by name; reverse mode alone.

    J^T u is linear in u, and its derivative in u along v is J v. The graph serves any number of products.
    """
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad():
        f = outputs(leaves)
    u = torch.zeros_like(f, requires_grad=True)
    pulled = dict(zip(leaves, _grad(f, list(leaves.values()), u, create_graph=True), strict=True))

    def jvp(v: Parameters) -> Tensor:
        used = [(g, v[name]) for name, g in pulled.items() if g.requires_grad]
        return _grad([g for g, _ in used], [u], [d for _, d in used], retain_graph=True)[0]

    def vjp(w: Tensor) -> Parameters:
        return dict(zip(leaves, _grad(f, list(leaves.values()), w, retain_graph=True), strict=True))

    return f.detach(), jvp, vjp


class _Sum:
    """A sum over micro-batches that does not round away what the last ones add."""

    def __init__(self, like: Tensor, sums: str) -> None:
        self.dtype, self.compensated = like.dtype, sums == "compensated"
        self.total = torch.zeros_like(like, dtype=like.dtype if self.compensated else torch.float64)
        self.lost = torch.zeros_like(self.total) if self.compensated else None

    def add(self, rows: list[Tensor]) -> None:
        for k, row in enumerate(rows):
            total = self.total[k]
            if self.lost is None:
                total += row
                continue
            new = total + row  # Neumaier: keep what falls off the smaller of the two
            self.lost[k] += torch.where(total.abs() >= row.abs(), (total - new) + row, (row - new) + total)
            total.copy_(new)

    def divided(self, count: int) -> Tensor:
        total = self.total if self.lost is None else self.total + self.lost
        return (total / count).to(self.dtype)


def _grad(outputs: Any, inputs: Any, cotangents: Any = None, **options: Any) -> tuple[Tensor, ...]:
    """`torch.autograd.grad` with zeros for what is unused, and without outputs. Never `backward`, which fills .grad."""
    if isinstance(outputs, list) and not outputs:
        return tuple(torch.zeros_like(x) for x in inputs)
    if isinstance(outputs, Tensor) and not outputs.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, materialize_grads=True, **options)


def _same(inputs: list[Any], again: list[Any]) -> bool:
    """Whether two passes gave the same; inputs that are no tensors are taken on trust."""
    alike = (torch.equal(x, z) for x, z in zip(inputs, again, strict=False) if isinstance(x, Tensor))
    return len(inputs) == len(again) and all(alike)


def _parameters(model: Any, parameters: Mapping[str, Tensor] | None) -> Parameters:
    if isinstance(model, nn.Module):
        own: Parameters = dict(model.named_parameters())
        return own if parameters is None else own | dict(parameters)
    if not parameters:
        raise ValueError("parameters must be given by name for a model that is a function")
    return dict(parameters)


def as_linear_operator(product: Product, n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A product as a `scipy.sparse.linalg.LinearOperator` (n, n), symmetric, for `eigsh` and its like."""

    def matmat(X: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(np.ascontiguousarray(X.reshape(n, -1).T)).to(device=device, dtype=dtype)
        return product(rows).cpu().numpy().T.reshape(X.shape)

    kind: Any = LinearOperator
    of = torch.empty(0, dtype=dtype).numpy().dtype
    return kind((n, n), matvec=matmat, rmatvec=matmat, matmat=matmat, dtype=of)
