"""What a run says about itself: the estimate before training, summary.json, the one-page summary, and the model card.

It knows nothing of how the figures were made.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from specdraft.data.chat import AnswerRow, Example
from specdraft.decoding.measure import Speedup
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel
from specdraft.provenance import atomic_path, provenance, write_json
from specdraft.training.loop import TrainResult
from specdraft.training.plan import TrainConfig

TRIED = (
    "median_speedup",
    "tau",
    "mean_drafted",
    "draft_ms",
    "verify_ms",
    "sample_ms",
    "tokens_per_second",
)  # kept of a trial


def training_estimate(
    target: TargetModel, drafter: Eagle3Drafter, train: Sequence[Example], config: TrainConfig, cache_gb: float | None
) -> str:
    """One line: sequences, tokens, and roughly what training takes in time, memory and disk. cache_gb: for states; None = they are on disk.

    The time is that of the matrix products, at the speed of one large product on this device, doubled for everything else.
    """
    tokens = sum(len(example.input_ids) for example in train)
    supervised = sum(int(example.loss_mask.sum()) for example in train)
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    target_parameters = sum(parameter.numel() for parameter in target.model.parameters())
    head = drafter.lm_head.weight
    sampled = min(1.0, config.objective.sampled_vocab / len(head)) or 1.0  # share of the head's rows in a step's loss
    per_row = 6 * (parameters - (1 - sampled) * head.numel()) * config.objective.steps
    asked = min(1.0, config.objective.sampled_vocab / target.vocab_size) or 1.0  # and of the target's
    epoch = (per_row + 2 * asked * target.head_weight.numel()) * supervised
    states_gb = tokens * (len(target.tap_layers) + 1) * target.hidden_size * target.dtype.itemsize / 1e9
    held_gb = min(states_gb, cache_gb) if cache_gb is not None else 0.0
    epochs = config.epochs or math.inf
    if config.max_steps is not None:
        epochs = min(epochs, config.max_steps * config.accumulation * config.tokens_per_batch / tokens)
    epochs = epochs if math.isfinite(epochs) else 1  # limited by minutes alone
    passes = 0 if cache_gb is None else epochs if states_gb > cache_gb else 1
    seconds = 2 * (epoch * epochs + 2 * target_parameters * tokens * passes) / product_speed(target)
    limits = f", at most {config.max_minutes:.3g}" if config.max_minutes else ""
    state_gb = 12 * parameters / 1e9
    return (
        f"training: {len(train):,} sequences, {tokens:,} tokens, {supervised:,} of them supervised; "
        f"roughly {seconds / 60:.0f} minutes{limits}, "
        f"{held_gb + 2 * state_gb + 2:.1f} GB of memory, {(config.keep + 1) * state_gb:.1f} GB of disk"
    )


def product_speed(target: TargetModel, size: int = 1024) -> float:
    """Floating-point operations a second of a square matrix product in the dtype that training multiplies in."""
    matrix = torch.randn(size, size, dtype=target.compute_dtype, device=target.device)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def results(
    drafter: Eagle3Drafter,
    rows: dict[str, AnswerRow],
    trained: TrainResult,
    measured: tuple[str, str, dict[str, Speedup], Speedup],
    minutes: float,
) -> dict[str, Any]:
    """Everything that summary.json holds. measured: the draft that was chosen, by name and as arguments of `speculative_generate`;
    those that were tried; the chosen one's speedup."""
    draft, arguments, tried, speedup = measured
    held_out = trained.best
    return {
        **speedup.to_dict(),
        "minutes": round(minutes, 2),
        **sizes(drafter),
        "answer_tokens": sum(end - start for row in rows.values() for start, end in row.spans),
        "training": {
            "steps": trained.steps,
            "epochs": trained.epochs,
            "tokens": trained.tokens,
            "minutes": trained.seconds / 60,
        },
        "held_out": held_out,
        "draft": draft,
        "draft_arguments": arguments,
        "tried": {name: {key: getattr(trial, key) for key in TRIED} for name, trial in tried.items()},
        "provenance": provenance(),
    }


def sizes(drafter: Eagle3Drafter) -> dict[str, Any]:
    head = drafter.lm_head
    return {
        "head": {"kind": drafter.config.head.kind, "rows": head.weight.shape[0], "width": head.weight.shape[1]},
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "head_parameters": sum(parameter.numel() for parameter in head.parameters()),
    }


def is_of(found: dict[str, Any], drafter: Eagle3Drafter) -> bool:
    """Whether a summary.json can be that of this drafter, by its sizes."""
    return all(found[key] == value for key, value in sizes(drafter).items())


def write(folder: Path, name: str, target: TargetModel, found: dict[str, Any]) -> str:
    """Write summary.json and summary.md into `folder`; returns the page."""
    write_json(folder / "summary.json", found)
    page = (
        f"# {name}\n\n{describe(target, found)}\n\n{table(found)}\n\n{trials(found)}Drafter: `{folder / 'drafter'}`\n"
    )
    if found["warning"]:
        page += f"\n**Warning:** {found['warning']}\n"
    with atomic_path(folder / "summary.md") as temporary:
        temporary.write_text(page)
    return "\n" + page


def describe(target: TargetModel, found: dict[str, Any]) -> str:
    """The result in two sentences, and why."""
    head = found["head"]
    shape = f"{head['kind']} head of {head['rows']:,} x {head['width']}"
    part = f"with a {shape}" if found["head_ms"] is None else f"the {shape} takes {found['head_ms']:.1f} of them"
    return (
        f"**{found['speedup']:.2f}x** over {target.name} alone (95 % interval {found['speedup_low']:.2f} to {found['speedup_high']:.2f}) "
        f"on {found['prompts']} held-out prompts at T = {found['temperature']:g} in {found['dtype']}: "
        f"{found['tokens_per_second']:.1f} against {found['target_tokens_per_second']:.1f} tokens/s.\n\n"
        f"Why: a round drafts a {found['draft']} in {found['draft_ms']:.1f} ms ({part}), the target checks "
        f"them in {found['verify_ms']:.1f} ms where one token alone takes {found['target_ms']:.1f}, "
        f"and the round gives {found['tau']:.2f} tokens."
    )


def table(found: dict[str, Any]) -> str:
    """The measured figures as a Markdown table, and where they were measured."""
    acceptance = " / ".join("-" if alpha is None else f"{alpha:.2f}" for alpha in found["conditional_acceptance"])
    equal = "not compared at T > 0" if found["match_rate"] is None else f"{100 * found['match_rate']:.0f} %"
    simulated = " / ".join(f"{hit:.2f}" for hit in found["held_out"]["hit"])
    machine = found["provenance"]["machine"]
    versions = ", ".join(f"{key} {value}" for key, value in found["provenance"]["versions"].items() if value)
    round_parts = [found[key] for key in ("draft_ms", "head_ms", "verify_ms", "sample_ms")]
    rows = [
        ("speedup", f"{found['speedup']:.2f}x ({found['speedup_low']:.2f} to {found['speedup_high']:.2f})"),
        (
            "tokens/s, with drafter / target alone",
            f"{found['tokens_per_second']:.1f} / {found['target_tokens_per_second']:.1f}",
        ),
        ("tau, tokens per verify round (bonus included)", f"{found['tau']:.2f}"),
        *without_loops(found),
        ("conditional acceptance by position", acceptance),
        ("held-out top-1 agreement by step, simulated", simulated),
        (
            "draft / of it head / verify / sample, ms a round",
            " / ".join("-" if part is None else f"{part:.1f}" for part in round_parts),
        ),
        ("target alone, ms a token", f"{found['target_ms']:.1f}"),
        ("outputs equal to the target's own", equal),
        ("answers, tokens", f"{found['answer_tokens']:,}"),
        (
            "training",
            f"{found['training']['epochs']:.1f} epochs, {found['training']['tokens']:,} tokens, {found['training']['minutes']:.1f} min",
        ),
        (
            "parameters, of them in the head",
            f"{found['parameters'] / 1e6:.1f} M, {found['head_parameters'] / 1e6:.1f} M",
        ),
        ("whole run", f"{found['minutes']:.1f} min"),
        (
            "machine",
            f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads"
            + "".join(f", {gpu}" for gpu in machine["gpus"]),
        ),
        ("versions, date", f"{versions}, {found['provenance']['date']}"),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def trials(found: dict[str, Any]) -> str:
    """What was tried before, on prompts of its own, as a Markdown table; empty where nothing was."""
    if not found["tried"]:
        return ""
    lines = [
        f"| {name} | {t['tau']:.2f} | {t['draft_ms']:.1f} | {t['verify_ms']:.1f} | {t['median_speedup']:.2f}x |"
        for name, t in found["tried"].items()
    ]
    title = "Drafts tried first, on a few other prompts (medians of a round):"
    header = f"{title}\n\n| | tau | draft ms | verify ms | speedup |\n|---|---|---|---|---|\n"
    return header + "\n".join(lines) + "\n\n"


def without_loops(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The row about prompts whose answer ends in a loop; none for a summary.json of before it was measured."""
    if "looping_prompts" not in found:
        return []
    name = f"tau and speedup without the {found['looping_prompts']} of {found['prompts']} prompts on which the target ends in a loop"
    tau, speedup = found["tau_without_loops"], found["speedup_without_loops"]
    return [(name, "-" if tau is None else f"{tau:.2f}, {speedup:.2f}x")]


USE = """\
from specdraft.data.chat import render_prompt
from specdraft.decoding.generate import speculative_generate
from specdraft.models.checkpoint import load_drafter, read_taps
from specdraft.models.target import TargetModel
%(imports)s
folder = "<this folder>"
target = TargetModel.load("%(target)s", tap_layers=read_taps(folder))
drafter = load_drafter(folder, target)
prompt = render_prompt(target.tokenizer, [{"role": "user", "content": "Why is the sky blue?"}])
output = speculative_generate(target, drafter, prompt, max_new_tokens=128%(draft)s)
print(target.tokenizer.decode(output.tokens))
"""
IMPORTS = {
    "Fixed": "specdraft.decoding.length_policies",
    "FrequencyList": "specdraft.decoding.vocab_policies",
    "Eagle2Tree": "specdraft.models.tree",
}


def use(name: str, arguments: str) -> str:
    """Python that decodes with a drafter as it was measured. name: of the target; arguments: see `results`, empty = not known."""
    imports = "".join(f"from {module} import {what}\n" for what, module in IMPORTS.items() if what in arguments)
    return USE % {"target": name, "imports": imports, "draft": f", {arguments}" if arguments else ""}


def model_card(config: dict[str, Any], target: TargetModel, found: dict[str, Any]) -> str:
    """README.md of the checkpoint folder."""
    header = yaml.safe_dump(
        {
            "base_model": target.name,
            "library_name": "specdraft",
            "tags": ["speculative-decoding", "eagle3", found["head"]["kind"]],
        }
    )
    settings = json.dumps(config, indent=2)
    return (
        f"---\n{header}---\n# EAGLE-3 drafter for {target.name}\n\n{describe(target, found)}\n\n## Measured\n\n{table(found)}\n\n"
        f"## Use\n\n```python\n{use(config['target'], found.get('draft_arguments', ''))}```\n\n"
        f"Trained on the target's own answers to {config['prompts']} prompts. The target's weights (hash {target.hash}) are not in it.\n\n"
        f"## Configuration\n\n```json\n{settings}\n```\n"
    )


def stages_table(found: dict[str, Any]) -> str:
    """A drafter before its head was compressed, factored and distilled (recipes/compress_head.py), as Markdown."""
    lines = [
        "| | head | weights | tau | alpha by step | top-1 by step | loss of step 0 |\n|---|---|---|---|---|---|---|"
    ]
    for name, s in found.items():
        alpha, hit = (" / ".join(f"{share:.3f}" for share in s[key]) for key in ("alpha", "hit"))
        head = f"{s['kind']}, {s['head_rows']:,} x {s['width']} | {s['weights'] / 1e6:.2f} M"
        lines.append(f"| {name} | {head} | {s['tau']:.3f} | {alpha} | {hit} | {s['row_loss'][0]:.3f} |")
    return "\n".join(lines)
