"""Launches that accelerate accepts and that would train wrongly in silence."""

import os
import signal

import pytest
import torch
from accelerate.state import AcceleratorState

from specdraft.config import UserError
from specdraft.training.processes import Interrupt, check_processes, make_accelerator


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without a GPU")
def test_fsdp_on_a_cpu_is_refused(monkeypatch, tmp_path):
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


def test_missing_tracker_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb is not installed; pip install wandb"):
        make_accelerator("no", None, "wandb", tmp_path)


def test_second_signal_acts_at_once():
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
