import sys
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

sys.path.insert(0, str(Path(__file__).parents[2] / "programs"))  # tiny_training


@pytest.fixture
def accelerator(tmp_path):
    """A fresh Accelerator on the CPU; its state is one for the whole process, so it is wiped around each test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, project_dir=str(tmp_path))
    AcceleratorState._reset_state(reset_partial_state=True)
