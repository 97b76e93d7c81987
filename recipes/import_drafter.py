"""Makes a checkpoint of ours from a drafter that somebody published, in EAGLE-3's format (SafeAILab, SpecForge, ...) or speculators'.

python recipes/import_drafter.py --source org/drafter --target org/model --output runs/imported/drafter
python recipes/import_drafter.py --source some/folder --layer-ids sglang

Then it can be measured, published in another format, or trained further, like any other.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from specdraft.config import UserError, config_to_dict, run_program
from specdraft.export.formats import folder_taps, import_drafter
from specdraft.export.hub import fetch
from specdraft.models.checkpoint import save_drafter
from specdraft.models.target import TargetModel


@dataclass
class ImportConfig:
    """source: a folder, or owner/name on the Hub, at `revision`.   target: as the recipes take it.   layer_ids: how an EAGLE-3 folder
    counts the target's layers: `vllm` (hidden_states[k]), `sglang` (one less); `auto` recognises the default ones.   output: the
    checkpoint folder."""

    source: str = ""
    revision: str | None = None
    target: str = "default"
    layer_ids: Literal["auto", "vllm", "sglang"] = "auto"
    output: Path = Path("runs/imported/drafter")
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"


def main(config: ImportConfig) -> None:
    if not config.source:
        raise UserError("source: got none; give a folder, or owner/name of a Hub repository")
    if config.output.exists():
        raise UserError(f"output {config.output}: exists; give a new folder")
    folder = fetch(config.source, config.revision)
    target = TargetModel.load(config.target, tap_layers=(0,))
    taps = folder_taps(folder, target.num_layers, config.layer_ids)
    target = TargetModel(target.model, target.tokenizer, target.name, taps)
    drafter = import_drafter(folder, target, layer_ids=config.layer_ids, dtype=torch.float32)
    card = f"# EAGLE-3 drafter for {target.name}\n\nImported from `{config.source}`; not measured here.\n"
    save_drafter(
        config.output, drafter, target, card, {"imported": config_to_dict(config)}, getattr(torch, config.dtype)
    )
    head = drafter.lm_head.weight.shape
    print(
        f"{config.output}: {drafter.config.head.kind} head of {head[0]:,} x {head[1]}, reads the target's layers {taps}"
    )


if __name__ == "__main__":
    run_program(main, ImportConfig)
