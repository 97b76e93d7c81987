"""What can be known of the plugin without vLLM: how it is found, what it registers, what it costs. `make test-engines` runs it."""

import ast
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from specdraft.export import vllm_plugin

ROOT = Path(__file__).parents[3]


class Registry:
    def __init__(self):
        self.models = {}

    def get_supported_archs(self):
        return self.models.keys()

    def register_model(self, name, model):
        assert name not in self.models, "vLLM warns of a second registration"
        self.models[name] = model


@pytest.fixture
def registry(monkeypatch):
    vllm = ModuleType("vllm")
    vllm.ModelRegistry = Registry()
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return vllm.ModelRegistry


def test_the_entry_point_is_declared():
    text = (ROOT / "pyproject.toml").read_text()
    group = re.search(r'\[project.entry-points."vllm.general_plugins"\]\n(.*)\n', text)
    assert group[1] == 'specdraft = "specdraft.export.vllm_plugin:register"'


def test_it_registers_once_however_often_it_is_called(registry):
    vllm_plugin.register()
    vllm_plugin.register()
    assert registry.models == {vllm_plugin.FACTORS_ARCHITECTURE: vllm_plugin.MODEL}
    assert vllm_plugin.FACTORS_ARCHITECTURE.endswith("Eagle3"), "vLLM renames any other"


def test_the_model_is_where_it_is_said_to_be():
    module, name = vllm_plugin.MODEL.split(":")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_its_head_has_the_weight_that_newer_versions_look_at():
    """Without it they fail on `draft_model.lm_head.weight`."""
    tree = ast.parse((ROOT / "specdraft" / "export" / "vllm_model.py").read_text())
    (head,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LowRankLMHead"]
    (weight,) = [node for node in head.body if isinstance(node, ast.FunctionDef) and node.name == "weight"]
    assert [ast.unparse(mark) for mark in weight.decorator_list] == ["property"]
    assert ast.unparse(weight.body[-1]) == "return self.up.weight"


def test_nothing_is_imported_before_vllm_asks():
    """vLLM loads every plugin in every process."""
    tree = ast.parse(inspect.getsource(vllm_plugin))
    assert not [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
