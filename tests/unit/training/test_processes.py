"""Launches that accelerate accepts and that would train wrongly in silence."""

import datetime
import os
import signal
import socket
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from specdraft.config import UserError
from specdraft.training.optim import OptimConfig
from specdraft.training.processes import Interrupt, check_processes, choose_optimizer, make_accelerator


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_fsdp_on_a_cpu_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="FSDP on a CPU"):
        make_accelerator("no", None, "none", tmp_path)


def test_wrong_number_of_processes_is_refused(tmp_path):
    with pytest.raises(UserError, match="wanted 2, got 1; launch with torchrun"):
        make_accelerator("no", 2, "none", tmp_path)


def test_processes_that_train_alone_are_refused(monkeypatch, tmp_path):
    """torchrun without `cpu=True` gives each process an Accelerator of its own."""
    accelerator = make_accelerator("no", None, "none", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes were started but each trains alone"):
        check_processes(accelerator, None)


def test_processes_wait_while_one_measures(monkeypatch, tmp_path):
    """The default group of a launched process, as torch made it: its collectives wait for hours, not for ten minutes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launched = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    launched["OMP_NUM_THREADS"] = "1"  # as every launcher sets it
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    make_accelerator("no", 1, "none", tmp_path)
    group = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    assert group.options._timeout >= datetime.timedelta(hours=6)


def test_missing_tracker_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb is not installed; pip install wandb"):
        make_accelerator("no", None, "wandb", tmp_path)


def test_second_signal_acts_at_once(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("has_products", "precision"), [(True, "bf16"), (False, "no")])
def test_bf16_only_where_the_processor_has_it(has_products, precision, tmp_path, monkeypatch):
    """Emulated, a step on an AVX2 processor took five times as long as in fp32."""
    monkeypatch.setattr("specdraft.training.processes.has_bf16_products", lambda device: has_products)
    assert make_accelerator("bf16", None, "none", tmp_path).mixed_precision == precision


@pytest.mark.parametrize(
    ("scheme", "name", "lr"), [("NO", "muon", 2e-3), ("MULTI_CPU", "muon", 2e-3), ("FSDP", "adamw", 1e-3)]
)
def test_the_optimizer_is_muon_where_every_process_has_whole_matrices(scheme, name, lr):
    accelerator = SimpleNamespace(distributed_type=DistributedType[scheme])
    chosen = choose_optimizer(accelerator, OptimConfig("auto", lr=2e-3, head_lr=1e-3))
    assert (chosen.name, chosen.lr, chosen.head_lr) == (name, lr, 1e-3)
    if scheme == "FSDP":
        with pytest.raises(UserError, match="give adamw or auto"):
            choose_optimizer(accelerator, OptimConfig("muon"))
