"""Every command of the README and of the how-tos names a program that is there, with flags that it takes."""

import importlib.util
import inspect
import re
import shlex
import sys
from pathlib import Path

import pytest

from specdraft.config import parse_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
HOW_TOS = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("vocabulary", "how-to-bench", "engines")]
TEXT = "\n".join([README, *HOW_TOS]).replace("\\\n", " ")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
BLOCKS += re.findall(r"^    python .*$", TEXT, flags=re.MULTILINE)
COMMANDS = [line.split(" #")[0].strip() for block in BLOCKS for line in block.splitlines() if ".py" in line]


def test_the_readme_has_commands():
    assert len(COMMANDS) >= 25
    assert {"eval/bench.py", "eval/stream.py", "recipes/import_drafter.py"} <= {
        command.split()[1] for command in COMMANDS
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_its_flags_are_taken(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    for word in words[1:at]:
        assert word in ("launch", "--config_file") or (ROOT / word).exists(), word
    spec = importlib.util.spec_from_file_location("read_program", ROOT / words[at])
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "read_program", module)
    spec.loader.exec_module(module)
    (name,) = re.findall(r"^    run_program\(\w+, (\w+)\)", inspect.getsource(module), flags=re.MULTILINE)
    parse_config(getattr(module, name), words[at + 1 :])


def test_the_oldest_python_is_that_of_make():
    (oldest,) = re.findall(r"version_info < \(3, (\d+)\)", (ROOT / "Makefile").read_text())
    assert f"Python 3.{oldest} or newer" in README
    assert (ROOT / "Makefile").read_text().count(f"older than 3.{oldest};") == 1


def test_every_page_is_linked():
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", README))
    assert linked == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("target", re.findall(r"^make ([\w-]+)", README, flags=re.MULTILINE))
def test_its_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
