"""Loads a folder with speculators and compares its logits with ours. Runs in .venv-speculators, so it imports nothing of ours.

speculators_logits.py FOLDER PROBE      PROBE: taps [1, T, A*H], ids [1, T], logits [K, T - 1, D] of ours, all rows and steps, in fp32
Prints the largest difference and the size of the logits; ends with code 1 where it is more than rounding.
"""

import sys

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel
from speculators.losses import resolve_loss_config
from transformers import AutoConfig  # noqa: F401  (registers what speculators looks up)

ALLOWED = 1e-4  # of the largest logit, fp32


def main(folder: str, probe_path: str) -> None:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    probe = load_file(probe_path)
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).float().eval()
    taps, ids, ours = probe["taps"], probe["ids"], probe["logits"]
    steps, rows = ours.shape[:2]
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    with torch.no_grad():
        model(
            hidden_states=taps[:, :-1],
            input_ids=ids[:, 1:],
            document_ids=torch.zeros(1, rows, dtype=torch.long),
            ttt_steps=steps,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    worst = 0.0
    for k in range(steps):  # row i reads the token i + 1 + k: the last k rows read past the end
        worst = max(worst, float((seen[k][: rows - k] - ours[k, : rows - k]).abs().max()))
    size = float(ours.abs().max())
    print(
        f"speculators: largest difference {worst:.2g}, largest logit {size:.3g}, {steps} steps, {rows} rows, {ours.shape[-1]:,} tokens"
    )
    sys.exit(int(not worst <= ALLOWED * size))


if __name__ == "__main__":
    main(*sys.argv[1:])
