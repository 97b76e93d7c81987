"""Defaults < YAML < flags, at any depth; what does not fit is one clear line."""

import errno
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from specdraft.config import UserError, config_from_dict, config_to_dict, parse_config, run_program


@dataclass
class Inner:
    rank: int | None = None
    kind: Literal["full", "lowrank"] = "full"
    lr: float = 1e-3
    layers: tuple[int, ...] = (1, 2)
    terms: dict[str, float] = field(default_factory=dict)


@dataclass
class Outer:
    name: str = "a"
    output: Path = Path("runs")
    flag: bool = False
    inner: Inner = field(default_factory=lambda: Inner(rank=7, kind="lowrank"))

    def __post_init__(self):
        if self.name == "bad":
            raise UserError("name: got bad, allowed: another")


def from_yaml(tmp_path, text, *flags):
    (tmp_path / "c.yaml").write_text(text)
    return parse_config(Outer, ["--config", str(tmp_path / "c.yaml"), *flags])


def test_defaults_then_yaml_then_flags(tmp_path):
    assert parse_config(Outer, []).inner.rank == 7
    config = from_yaml(tmp_path, "name: b\ninner:\n  rank: 8\n  lr: 2e-4\n", "--inner.rank", "9")
    assert (config.name, config.inner.rank, config.inner.lr) == ("b", 9, 2e-4)


@pytest.mark.parametrize("flags", [["--inner.rank", "null"], ["--inner.rank=null"], ["--inner.rank", "None"]])
def test_nothing_is_said_in_a_flag_as_in_yaml(tmp_path, flags):
    assert parse_config(Outer, flags).inner.rank is None
    assert from_yaml(tmp_path, "inner:\n  rank: null\n").inner.rank is None


def test_yaml_keeps_the_outer_class_s_own_defaults(tmp_path):
    """A recipe's nested defaults survive a file that names only some of the nested keys."""
    assert from_yaml(tmp_path, "inner:\n  lr: 0.5\n").inner == Inner(rank=7, kind="lowrank", lr=0.5)


def test_round_trip_through_plain_values():
    config = Outer(inner=Inner(rank=None, layers=(4, 5, 6), terms={"kl": 0.5}), output=Path("x/y"))
    assert config_from_dict(Outer, config_to_dict(config)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nme: b", "unknown key 'nme'; allowed: name, output, flag, inner"),
        ("inner:\n  rnk: 1", "inner: unknown key 'rnk'"),
        ("inner:\n  rank: many", "inner.rank: got 'many', allowed: int"),
        ("inner:\n  kind: fat", "inner.kind: got 'fat', allowed: 'full' | 'lowrank'"),
        ("inner: 3", "inner: got 3, expected a mapping"),
        ("flag: 1", "flag: got 1, allowed: bool"),
        ("name: [", "not valid YAML"),
        ("name: bad", "name: got bad"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, text, message):
    with pytest.raises(UserError) as caught:
        from_yaml(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags", [["--nme", "b"], ["--inner.rank", "many"], ["--config"], ["--config", "nowhere.yaml"], ["--name", "bad"]]
)
def test_bad_flags_are_one_line(flags):
    with pytest.raises(UserError) as caught:
        parse_config(Outer, flags)
    assert "\n" not in str(caught.value)


def test_the_words_of_a_bad_flag_come_once():
    with pytest.raises(UserError, match=r"^Unrecognized options: --nme, b") as caught:
        parse_config(Outer, ["--nme", "b"])
    with pytest.raises(UserError, match=r"^--inner.rank: .*'many'") as caught:
        parse_config(Outer, ["--inner.rank", "many"])
    assert "helptext" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "file/x"), 2, "error: file/x: Not a directory; "),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: No space left on device; "),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C; what is finished stays"),
        (KeyboardInterrupt("give --sessions"), 130, "stopped by Ctrl-C; give --sessions"),
    ],
)
def test_a_full_disk_and_ctrl_c_are_one_line(monkeypatch, capsys, error, code, line):
    def main(config):
        raise error

    monkeypatch.setattr("sys.argv", ["program"])
    with pytest.raises(SystemExit) as stop:
        run_program(main, Outer)
    assert stop.value.code == code
    assert capsys.readouterr().err.startswith(line)


def test_sigterm_ends_what_runs_in_order(monkeypatch):
    """By an exception, so that `finally` writes what is finished."""
    ended, handler = [], signal.getsignal(signal.SIGTERM)

    def main(config):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            ended.append(True)

    monkeypatch.setattr("sys.argv", ["program"])
    with pytest.raises(SystemExit) as stop:
        run_program(main, Outer)
    assert stop.value.code == 143
    assert ended
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_program_ends_with_code_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["program", "--name", "bad"])
    with pytest.raises(SystemExit) as stop:
        run_program(print, Outer)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: name: got bad, allowed: another\n"


@dataclass
class Shape:
    width: int
    depth: int = 1


def test_what_has_no_default_is_needed():
    assert config_from_dict(Shape, {"width": 3}) == Shape(3)
    with pytest.raises(UserError, match="shape: has no width; needed: width"):
        config_from_dict(Shape, {"depth": 2}, "shape")
