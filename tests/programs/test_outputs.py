"""Programs that replace a folder refuse one that holds anything else, before any work: it would be lost."""

import runpy
import sys
from pathlib import Path

import pytest

from specdraft.config import UserError
from specdraft.models.checkpoint import read_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("output", ["home", "drafter"])
def test_trim_head_loses_nobodys_files(tmp_path, monkeypatch, capsys, output):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trim_head.py", "--drafter=drafter", f"--output={output}"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "recipes" / "trim_head.py"), run_name="__main__")
    assert stop.value.code == 2
    assert output in capsys.readouterr().err
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "drafter" / "config.json").exists()


@pytest.mark.parametrize("target", ["{}", "null", '{"name": "a"}'])
def test_a_drafter_whose_config_lost_keys_is_refused(tmp_path, target):
    text = f'{{"format": "specdraft-eagle3-1", "target": {target}, "drafter": {{}}, "vocab_hash": null, "dtype": "float32"}}'
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json has no (hash|name); the checkpoint is corrupt"):
        read_config(tmp_path)
