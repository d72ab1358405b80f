"""The planner against the paper's run and counts by hand."""

import doctest
import os
import subprocess
import sys

import pytest

from nqflib.lanczos import __main__ as command
from nqflib.lanczos import plan as planning
from nqflib.lanczos.plan import DEVICES, GIB, plan, run_memory

RUN = """
import torch
from nqflib.lanczos import lanczos
n, depth, method, kind = 1_000_000, 20, "{method}", torch.{kind}
def resident(field):
    with open("/proc/self/status") as file:
        return 1024 * int(file.read().split(field + ":")[1].split()[0])
eigenvalues, start = torch.linspace(0, 1, n), torch.randn(n, generator=torch.Generator().manual_seed(0))
lanczos(lambda q: eigenvalues[:1000] * q, start[:1000], 3, method=method, basis_dtype=kind)  # what is loaded lazily
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts from here; that of getrusage would be the parent's if it is larger
assert lanczos(lambda q: eigenvalues * q, start, depth, method=method, basis_dtype=kind).step == depth
print(resident("VmHWM") - before)
"""


def test_examples_in_the_module_run():
    assert doctest.testmod(planning).failed == 0


def test_the_papers_run_is_750_gib_and_49_on_each_of_16():
    found = plan(167_772_160, 1200, device="h100", count=16)
    assert found.basis_bytes == 750 * GIB
    vector = 4 * 167_772_160 / GIB
    assert found.memory_bytes_per_device / GIB == pytest.approx(750 / 16 + (3 / 16 + 3) * vector)
    assert found.fits
    half = plan(167_772_160, 1200, device="h200", basis="bf16")
    assert half.basis_bytes == 375 * GIB
    assert not half.fits
    again = plan(167_772_160, half.deepest, device="h200", basis="bf16")
    assert again.fits
    assert not plan(167_772_160, half.deepest + 1, device="h200", basis="bf16").fits


def test_traffic_arithmetic_and_hours_are_those_counted_by_hand():
    found = plan(1000, 5, device="h100", count=2, tokens=7, product="hessian")
    # at step j = 0 ... 4 the delayed sweep reads the j vectors before twice
    assert found.read_bytes == 2 * 4 * 1000 * (0 + 1 + 2 + 3 + 4)
    assert plan(1000, 5, method="twice").read_bytes == 2 * found.read_bytes
    assert plan(1000, 5, basis="fp16").read_bytes == found.read_bytes  # half the bytes, twice the reads
    assert found.product_flop == 5 * 18 * 1000 * 7
    assert found.exchange_bytes_per_device == 5 * 2 * 4 * 1000 / 2
    kind = DEVICES["h100"]
    seconds = (found.read_bytes + 4 * 5000) / (2 * kind.bandwidth) + found.product_flop / (2 * kind.flops)
    assert found.hours * 3600 == pytest.approx(seconds + found.exchange_bytes_per_device / kind.link)


def test_the_command_prints_the_plan_and_refuses_nonsense(capsys):
    arguments = ["plan", "--parameters", "167772160", "--depth", "1200", "--device", "h100", "--count", "16"]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "basis         750.0 GiB" in printed
    assert "on each of 16 h100: fits" in printed
    command.main(["plan", "--parameters", "167772160", "--depth", "1200", "--device", "h200", "--basis", "bf16"])
    assert "does not fit; the deepest run that does has" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["plan", "--parameters", "0", "--depth", "10"])
    assert "parameters must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its peak memory, in /proc")
@pytest.mark.parametrize(
    ("method", "kind", "name"),
    [("delayed", "float32", "fp32"), ("twice", "bfloat16", "bf16")],
)
def test_the_peak_of_a_run_is_the_planned_one_within_a_tenth(method, kind, name, tmp_path):
    """'It ran out of memory in the last steps'; tracemalloc, with which tools test this, does not see torch's."""
    # glibc keeps freed blocks of up to 32 MiB, which vectors of this length are and those of a large model are not.
    environment = {**os.environ, "NQF_PROGRESS": str(tmp_path / "progress"), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", RUN.format(method=method, kind=kind)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    planned = run_memory(1_000_000, 20, basis=name)
    assert int(result.stdout) == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize("wrong", [{"device": "h300"}, {"basis": "fp8"}, {"method": "once"}, {"product": "fisher"}])
def test_bad_input_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be one of"):
        plan(10, 2, **wrong)
