"""What a run needs before it is started: memory, bytes moved, arithmetic, hours.

    basis      b m N bytes                              b bytes an entry, m steps, N parameters
    reads      (2 delayed, 4 twice) x b N m (m - 1)/2   and one write of the basis
    products   m x (12 Gauss-Newton, 18 Hessian) N FLOP a token, a gradient being 6 N
    exchange   per step and device: an all-gather of the vector and a reduce-scatter of the product, 2 x 4 N bytes

The paper's run, m = 1200 at N = 167,772,160 in float32, is a basis of 750 GiB:

    >>> plan(167_772_160, 1200).basis_bytes / 2**30
    750.0

Rates of devices are sustained ones, assumed from data sheets and not measured here; they are parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
ENTRY_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
PASSES = {"delayed": 2, "twice": 4}  # reads of the basis a step
GRADIENTS = {"gauss_newton": 2, "hessian": 3}  # cost of a product in gradients of 6 N FLOP a token
RESERVE = 0.85  # share of a device's memory that a run may fill; weights, activations and the context take the rest
# Vectors of length N in the work format besides the basis. The pair and the last vector are split as the basis is; the
# block that the operator gets, its product, and one vector of scratch are whole on every device.
SPLIT, WHOLE = 3, 3


@dataclass(frozen=True)
class Device:
    """A device: memory in bytes, bytes a second, sustained FLOP a second in float32, bytes a second to its peers."""

    memory: float
    bandwidth: float
    flops: float
    link: float


DEVICES = {
    "h100": Device(80e9, 2.9e12, 50e12, 200e9),
    "h200": Device(139 * GIB, 4.3e12, 50e12, 200e9),
    "a100": Device(80e9, 1.7e12, 17e12, 150e9),
    "cpu": Device(16 * GIB, 8e9, 60e9, 1e9),
}


@dataclass(frozen=True)
class Plan:
    """The cost of a run; bytes are of all devices together unless they say otherwise."""

    basis_bytes: int
    memory_bytes_per_device: float  # basis and work vectors
    read_bytes: int  # of the basis
    written_bytes: int
    product_flop: float
    exchange_bytes_per_device: float
    reorthogonalisation_hours: float
    product_hours: float
    exchange_hours: float
    fits: bool
    deepest: int  # largest depth that fits on these devices

    @property
    def hours(self) -> float:
        return self.reorthogonalisation_hours + self.product_hours + self.exchange_hours


def run_memory(parameters: int, depth: int, *, basis: str = "fp32", work_bytes: int = 4, count: int = 1) -> float:
    """Bytes of a run on each of `count` devices without the operator's own: its part of the basis, and the vectors."""
    vectors = (SPLIT / count + WHOLE) * work_bytes * parameters
    return ENTRY_BYTES[basis] * depth * parameters / count + vectors


def plan(
    parameters: int,
    depth: int,
    *,
    device: str = "h100",
    count: int = 1,
    basis: str = "fp32",
    method: str | None = None,
    product: str = "gauss_newton",
    tokens: int = 10_000_000,
) -> Plan:
    """Plan one start of `depth` steps on `count` devices, the basis split evenly along the parameters.

    Args:
        parameters, depth: N and m.
        device: one of `DEVICES`.
        basis: "fp64", "fp32", "bf16" or "fp16".
        method: "delayed" or "twice"; as in `lockstep` delayed unless the basis is of half width.
        product: "gauss_newton" or "hessian".
        tokens: read by every product.

    Raises:
        ValueError: for numbers below 1 and unknown names.
    """
    method = method or ("delayed" if ENTRY_BYTES.get(basis, 0) > 2 else "twice")
    for name, value, valid in (
        ("device", device, DEVICES),
        ("basis", basis, ENTRY_BYTES),
        ("method", method, PASSES),
        ("product", product, GRADIENTS),
    ):
        if value not in valid:
            raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")
    for name, value in (("parameters", parameters), ("depth", depth), ("count", count), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    kind, row = DEVICES[device], ENTRY_BYTES[basis] * parameters
    work = 8 if basis == "fp64" else 4
    of = {"basis": basis, "work_bytes": work, "count": count}
    held, room = run_memory(parameters, depth, **of), RESERVE * kind.memory
    read = PASSES[method] * row * depth * (depth - 1) // 2
    flop = 6.0 * GRADIENTS[product] * parameters * tokens * depth
    exchange = 0.0 if count == 1 else depth * 2 * work * parameters * (count - 1) / count
    return Plan(
        basis_bytes=row * depth,
        memory_bytes_per_device=held,
        read_bytes=read,
        written_bytes=row * depth,
        product_flop=flop,
        exchange_bytes_per_device=exchange,
        reorthogonalisation_hours=(read + row * depth) / (count * kind.bandwidth) / 3600,
        product_hours=flop / (count * kind.flops) / 3600,
        exchange_hours=exchange / kind.link / 3600,
        fits=held <= room,
        deepest=max(0, int((room - run_memory(parameters, 0, **of)) * count // row)),
    )


def describe(found: Plan, count: int, device: str) -> str:
    """The plan as a few lines of text."""
    verdict = "fits" if found.fits else f"does not fit; the deepest run that does has {found.deepest} steps"
    lines = [
        ("basis", f"{found.basis_bytes / GIB:,.1f} GiB"),
        ("memory", f"{found.memory_bytes_per_device / GIB:,.1f} GiB on each of {count} {device}: {verdict}"),
        ("basis traffic", f"{(found.read_bytes + found.written_bytes) / 1e12:,.1f} TB"),
        ("products", f"{found.product_flop / 1e15:,.1f} PFLOP"),
        ("exchange", f"{found.exchange_bytes_per_device / 1e12:,.2f} TB through each device"),
        ("hours", f"{found.hours:,.2f}: reorthogonalisation {found.reorthogonalisation_hours:,.2f}, products "),
    ]
    text = "\n".join(f"{name:<14}{value}" for name, value in lines)
    return text + f"{found.product_hours:,.2f}, exchange {found.exchange_hours:,.2f}"
