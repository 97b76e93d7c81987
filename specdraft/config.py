"""Configuration: nested dataclasses, read as defaults < YAML < dotted flags; and the one error type that users see.

It knows nothing of what is configured: each config dataclass stands beside the thing that it configures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

Config = TypeVar("Config")
FILE_ERRORS = (  # of a path or a disk that the user gave
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


class UserError(ValueError):
    """A fault in what the user gave us. One line: what, got, allowed, what to do."""


def require_positive(values: dict[str, int | None]) -> None:
    """Raises UserError for the first of the named numbers that is below 1; None, where a setting allows it, is none."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise UserError(f"{name}: got {value}, allowed: 1 or more")


def require_some(values: dict[str, Sequence]) -> None:
    """Raises UserError for the first of the named lists that is empty."""
    for name, value in values.items():
        if not value:
            raise UserError(f"{name}: got none, allowed: one or more")


def require_seed(seed: int) -> None:
    """Raises UserError for a seed that torch, to which requests are added, does not take."""
    if not 0 <= seed < 2**62:
        raise UserError(f"seed: got {seed}, allowed: 0 to 2**62 - 1")


def config_to_dict(config: Any) -> dict[str, Any]:
    """Nested dataclasses -> plain values that JSON and YAML can hold (tuples become lists, paths become text)."""
    return _plain(dataclasses.asdict(config))


def config_from_dict(cls: type[Config], values: dict[str, Any], where: str = "config") -> Config:
    """Build `cls` from nested plain values; keys that are left out, at any depth, keep the defaults that `cls` gives them.

    Raises:
        UserError: an unknown key, or a value that does not fit the field's type.
    """
    fields = _checked_fields(cls, values, where)
    factories = {key: field.default_factory for key, field in fields.items() if key in values}
    nested = {
        key: _update(factory(), values[key], f"{where}.{key}")
        for key, factory in factories.items()
        if factory is not dataclasses.MISSING and dataclasses.is_dataclass(factory())
    }
    hints = typing.get_type_hints(cls)
    unset = (dataclasses.MISSING, dataclasses.MISSING)
    needed = [key for key, field in fields.items() if (field.default, field.default_factory) == unset]
    if missing := [key for key in needed if key not in values]:
        raise UserError(f"{where}: has no {missing[0]}; needed: {', '.join(needed)}")
    plain = {key: _convert(hints[key], value, f"{where}.{key}") for key, value in values.items() if key not in nested}
    return cls(**plain, **nested)


def _update(config: Config, values: dict[str, Any], where: str) -> Config:
    """`config` with some of its fields replaced."""
    _checked_fields(type(config), values, where)
    hints = typing.get_type_hints(type(config))
    changed = {}
    for key, value in values.items():
        current = getattr(config, key)
        is_nested = dataclasses.is_dataclass(current)
        changed[key] = (
            _update(current, value, f"{where}.{key}") if is_nested else _convert(hints[key], value, f"{where}.{key}")
        )
    return dataclasses.replace(config, **changed)


def _checked_fields(cls: type, values: Any, where: str) -> dict[str, dataclasses.Field]:
    if not isinstance(values, dict):
        raise UserError(f"{where}: got {values!r}, expected a mapping with the keys {_names(cls)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise UserError(f"{where}: unknown key {key!r}; allowed: {_names(cls)}")
    return fields


def parse_config(cls: type[Config], argv: Sequence[str] | None = None) -> Config:
    """Defaults of `cls` < `--config file.yaml` < dotted flags such as `--head.rank 72`.

    Raises:
        UserError: an unreadable file, an unknown key or flag, a value of the wrong type.
    """
    argv = [re.sub(r"(^|=)null$", r"\1None", word) for word in (sys.argv[1:] if argv is None else argv)]  # as in YAML
    path, argv = _take_config_flag(_complete_switches(cls, argv))
    default = config_from_dict(cls, _read_yaml(path), str(path)) if path else cls()
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(cls, default=default, args=argv, config=(tyro.conf.FlagConversionOff,))
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        raise UserError(_one_line(messages.getvalue())) from None


def run_program(main: Callable[[Any], Any], cls: type) -> None:
    """The `__main__` of every program: parse, run, and turn a UserError, or a file that the system does not let us read or
    write, into one line and exit code 2; Ctrl-C into one line and 130, with the words of the KeyboardInterrupt if it has any. SIGTERM ends
    it with 143, what is finished put on disk first."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main(parse_config(cls))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in FILE_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; free some space, or give another path", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(
            f"stopped by Ctrl-C; {str(stop) or 'what is finished stays on disk: run again to go on'}", file=sys.stderr
        )
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def _complete_switches(cls: type, argv: list[str]) -> list[str]:
    """`--json` alone means `--json True`, for every boolean field."""
    switches = {f"--{name}" for name in _boolean_fields(cls)}
    completed = []
    for word, after in zip(argv, [*argv, "--"][1:], strict=True):
        completed.append(word)
        if word.replace("-", "_").replace("__", "--", 1) in switches and after.startswith("--"):
            completed.append("True")
    return completed


def _boolean_fields(cls: type, prefix: str = "") -> list[str]:
    hints = typing.get_type_hints(cls)
    names = []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            names += _boolean_fields(hints[field.name], f"{prefix}{field.name}.")
        elif hints[field.name] is bool:
            names.append(prefix + field.name)
    return names


def _take_config_flag(argv: list[str]) -> tuple[Path | None, list[str]]:
    for i, word in enumerate(argv):
        if word == "--config":
            if i + 1 == len(argv):
                raise UserError("--config: got nothing, expected the path of a YAML file")
            return Path(argv[i + 1]), argv[:i] + argv[i + 2 :]
        if word.startswith("--config="):
            return Path(word.removeprefix("--config=")), argv[:i] + argv[i + 1 :]
    return None, argv


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not valid YAML ({' '.join(str(error).split())})") from None
    return {} if values is None else values


def _convert(hint: Any, value: Any, where: str) -> Any:
    """One YAML value -> the field's type. Only what config dataclasses use: scalars, optionals, literals, dicts, tuples, lists."""
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return config_from_dict(hint, value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(arg for arg in args if arg is not type(None)), value, where)
    if origin is typing.Literal and value in args:
        return value
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-3 as text
            return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    allowed = " | ".join(map(repr, args)) if origin is typing.Literal else str(getattr(hint, "__name__", hint))
    raise UserError(f"{where}: got {value!r}, allowed: {allowed}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _names(cls: type) -> str:
    return ", ".join(field.name for field in dataclasses.fields(cls))


def _one_line(boxed: str) -> str:
    """tyro frames its messages and adds a hint; keep the words."""
    words = "".join(c if c not in "╭╮╰╯│─├┤" else " " for c in boxed).split()
    text = " ".join(word for word in words if word.strip("-"))
    text = text.split(" For full helptext")[0].split(" Argument helptext:")[0]
    text = text.removeprefix("Unrecognized options ")  # the frame's title, which the text says again
    return re.sub(r"^(Value error )?Error parsing (?!--)[\w.-]+: |^Value error Error parsing (?=--)", "", text)
