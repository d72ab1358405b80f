"""Two processes that share every batch train the same model as one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_runs import contents, small_run, write_text

from nqflib.language_model import parallel
from nqflib.language_model.pretrain import pretrain

WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
import torch
from small_runs import small_run
from nqflib.language_model import parallel
from nqflib.language_model.corpus import OwnText
from nqflib.language_model.pretrain import pretrain
torch.set_num_threads(1)
folder = Path(sys.argv[2])
text = OwnText((str(folder / "text.txt"),))
with parallel.process_group(torch.device("cpu")):
    assert parallel.world_size() == 2
    double = small_run(text, tokens=200 * 64, precision="float64")
    pretrain(double, folder=folder / "two", until=0.5)  # stopped, and gone on with
    double = pretrain(double, folder=folder / "two")
    single = pretrain(small_run(text, tokens=20 * 64), folder=folder / "two")
    np.savez(folder / f"rank{parallel.rank()}.npz", double=double.train_loss, single=single.train_loss,
             loss=double.history.loss)
    try:
        pretrain(small_run(text, batch=1), folder=folder / "two")
    except ValueError as error:
        print(error)
"""


@pytest.mark.distributed
def test_two_processes_have_the_loss_curve_of_one(tmp_path):
    text = write_text(tmp_path)
    double = pretrain(small_run(text, tokens=200 * 64, precision="float64"), folder=tmp_path / "one")
    single = pretrain(small_run(text, tokens=20 * 64), folder=tmp_path / "one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(tmp_path)]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
        assert "batch must be a multiple of the 2 processes, got 1" in out
    for rank in range(2):
        found = np.load(tmp_path / f"rank{rank}.npz")
        np.testing.assert_allclose(found["double"], double.train_loss, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found["loss"], double.history.loss, rtol=0, atol=1e-9)
        np.testing.assert_allclose(found["single"], single.train_loss, rtol=0, atol=1e-5)
    one, two = (sorted(contents(tmp_path / n / "runs" / double.checkpoints[200].parent.name)) for n in ("one", "two"))
    assert one == two


def test_a_single_process_needs_no_group():
    assert (parallel.rank(), parallel.world_size()) == (0, 1)
    assert parallel.from_first("value") == "value"
