"""`python -m nqflib.lanczos plan --parameters 167772160 --depth 1200 --device h100 --count 16 --basis bf16`."""

from __future__ import annotations

import argparse
import sys

from nqflib.lanczos.plan import DEVICES, ENTRY_BYTES, GRADIENTS, PASSES, describe, plan


def main(arguments: list[str] | None = None) -> int:
    """Print the plan; exit with 2 for an argument that makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m nqflib.lanczos", description=__doc__)
    commands = parser.add_subparsers(required=True)
    planner = commands.add_parser("plan", help="memory, traffic, arithmetic and hours of a run")
    planner.add_argument("--parameters", type=int, required=True, help="N")
    planner.add_argument("--depth", type=int, required=True, help="steps, one product each")
    planner.add_argument("--device", choices=list(DEVICES), default="h100")
    planner.add_argument("--count", type=int, default=1, help="devices; the basis is split evenly")
    planner.add_argument("--basis", choices=list(ENTRY_BYTES), default="fp32")
    planner.add_argument("--method", choices=list(PASSES), help="delayed, or twice for a basis of half width")
    planner.add_argument("--product", choices=list(GRADIENTS), default="gauss_newton")
    planner.add_argument("--tokens", type=int, default=10_000_000, help="tokens that a product reads")
    given = vars(parser.parse_args(arguments))
    parameters, depth = given.pop("parameters"), given.pop("depth")
    try:
        found = plan(parameters, depth, **given)
    except ValueError as error:
        planner.error(str(error))
    print(describe(found, given["count"], given["device"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
