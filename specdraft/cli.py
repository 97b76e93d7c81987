"""`specdraft <program> [flags]`: every program of recipes/, data_prep/ and eval/ under one command.

`specdraft train-slimspec --head.rank 72` runs the same file as `python recipes/train_slimspec.py --head.rank 72`. It knows
only where programs lie.
"""

from __future__ import annotations

import importlib
import pkgutil
import runpy
import sys

PACKAGES = ("specdraft.data_prep", "specdraft.recipes", "specdraft.eval")


def programs() -> dict[str, str]:
    """Command name -> module."""
    found = {}
    for package in PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if not module.ispkg:
                found[module.name.replace("_", "-")] = f"{package}.{module.name}"
    return found


def main() -> None:
    """Entry point of the `specdraft` command. Exit code 2 for an unknown program."""
    found = programs()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(
            "usage: specdraft <program> [flags]\n\nprograms:\n  "
            + "\n  ".join(found)
            + "\n\n`specdraft <program> --help` lists its flags."
        )
        return
    if name not in found:
        print(f"error: specdraft {name}: no such program; allowed: {', '.join(found)}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"specdraft {name}", *sys.argv[2:]]
    runpy.run_module(found[name], run_name="__main__")
