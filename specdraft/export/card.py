"""The model card of a published drafter: what it is, how to use it, what was measured, how it was trained, and the target's licence.

It knows nothing of how the figures were made (they come as text) or of the Hub.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import yaml

from specdraft.export.origin import Origin
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel


@dataclass
class Publication:
    """What a card says that neither drafter nor target know. repo: owner/name; origin: of the target; measured: Markdown, with the
    hardware; run: the resolved configuration of the training run."""

    repo: str
    revision: str
    format: str
    factors: bool
    origin: Origin
    measured: str
    run: dict[str, Any]
    provenance: dict[str, Any]


def model_card(publication: Publication, drafter: Eagle3Drafter, target: TargetModel) -> str:
    """README.md."""
    p, origin, head = publication, publication.origin, drafter.config.head.kind
    header = {
        "base_model": origin.base_model,
        **origin.license,
        "library_name": "specdraft",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", head],
    }
    versions = ", ".join(f"{name} {version}" for name, version in p.provenance.get("versions", {}).items() if version)
    revision = f", revision `{origin.base_revision}`" if origin.base_revision else ""
    terms = " ".join(f"`{entry}`" for entry in origin.license.values())
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n# EAGLE-3 drafter for {origin.base_model}",
        f"A drafter for speculative decoding: it guesses several tokens, which its target "
        f"[{origin.base_model}](https://huggingface.co/{origin.base_model}) checks in one pass. "
        "The output law stays the target's; only the speed changes. It is of no use without that target.",
        "## What it is\n\n" + shape_table(drafter, target),
        f"Target: `{origin.base_model}`{revision}, of which {'only the embedding' if p.format == 'speculators' else 'nothing'} is in it "
        f"(hash of its weights `{target.hash}`). {origin.note}".strip(),
        "## Use\n\n" + usage(p, drafter),
        "## Measured\n\n" + p.measured,
        "## Training\n\n" + training(p.run),
        f"Made {p.provenance.get('date', 'on an unknown date')} with {versions or 'unknown versions'}.",
        f"## Licence\n\nThat of the target, whose answers it was trained on and whose weights it may start from: {terms}.",
    ]
    return "\n\n".join(parts) + "\n"


def shape_table(drafter: Eagle3Drafter, target: TargetModel) -> str:
    config, head = drafter.config, drafter.lm_head
    rows, width = head.weight.shape
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    kinds = {
        "full": f"full: all {rows:,} tokens",
        "trimmed": f"trimmed: {rows:,} of {target.vocab_size:,} tokens",
        "lowrank": f"low rank (SlimSpec, arXiv 2605.10453): {rows:,} x {width} and {width} x {config.hidden_size}",
    }
    flags = [
        name for name in ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc") if getattr(config, name)
    ]
    lines = {
        "architecture": "EAGLE-3 (arXiv 2503.01840), one layer",
        "head": kinds[config.head.kind],
        "parameters": f"{parameters / 1e6:.1f} M, of them {sum(p.numel() for p in head.parameters()) / 1e6:.1f} M in the head",
        "reads the target's layers (Hugging Face `hidden_states[k]`)": ", ".join(map(str, config.tap_layers)),
        "positions": f"{config.max_position_embeddings:,}",
        "norm flags": ", ".join(flags) or "none",
    }
    return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in lines.items())


def usage(p: Publication, drafter: Eagle3Drafter) -> str:
    """For each engine: the command, where this format is the engine's; else how to get the engine's own."""
    is_main, base_model, option = p.revision == "main", p.origin.base_model, p.origin.option
    branch = "" if is_main else f', "revision": "{p.revision}"'
    vllm = (
        f"vllm serve {base_model} --speculative-config '"
        f'{{"method": "eagle3", "model": "{p.repo}"{branch}, "num_speculative_tokens": 3}}\''
    )
    commands = {
        "vLLM": ("bash", vllm, p.format in ("eagle3", "speculators")),
        "SGLang": (
            "bash",
            f"python -m sglang.launch_server --model-path {base_model} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {p.repo}{'' if is_main else f' --speculative-draft-model-revision {p.revision}'} "
            "--speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4",
            p.format == "sglang",
        ),
        "speculators": (
            "python",
            f'from speculators import SpeculatorModel\n\nmodel = SpeculatorModel.from_pretrained("{p.repo}", revision="{p.revision}")',
            p.format == "speculators",
        ),
        "specdraft": (
            "bash",
            f"specdraft import-drafter --source {p.repo} --revision {p.revision} --target {option}{LAYER_IDS[p.format]} --output drafter",
            True,
        ),
    }
    formats = {"vLLM": "eagle3", "SGLang": "sglang", "speculators": "speculators"}
    parts = []
    for name, (language, command, fits) in commands.items():
        if name == "vLLM" and p.factors:
            command = f"pip install specdraft   # beside vLLM: its plugin knows the low-rank head\n{command}"
        if not fits:
            language = "bash"
            command = f"{commands['specdraft'][1]}\n"
            command += f"specdraft publish --drafter drafter --target {option} --format {formats[name]} --output folder"
        parts.append(f"**{name}**\n\n```{language}\n{command}\n```")
    return "\n\n".join(parts)


LAYER_IDS = {"eagle3": " --layer-ids vllm", "sglang": " --layer-ids sglang", "speculators": "", "specdraft": ""}


def training(run: dict[str, Any]) -> str:
    """Data and configuration, as the run resolved them."""
    if not run:
        return "Not known here: the drafter was not trained by this library."
    data = run.get("prompts")
    told = "" if data is None else f"On the target's own answers to prompts (`{data}`).\n\n"
    return f"{told}```json\n{json.dumps(run, indent=2)}\n```"
