"""Replaces the head of a trained EAGLE-3 drafter by a low-rank one, and distils it for a short while.

python recipes/compress_head.py --drafter runs/eagle3-full/drafter                                  # rank H/8, five minutes
python recipes/compress_head.py --drafter runs/imported/drafter --choose energy --energy 0.9
python recipes/compress_head.py --drafter runs/imported/drafter --choose throughput --distil all

A dense head W [S, H], full or trimmed, becomes z = W_up (W_down h) over the same tokens: the truncated SVD of D^1/2 W C^1/2
(models/heads.py: components). C [H, H] is the second moment of what this drafter's head reads on the target's answers, D how often
the target says each of the S tokens. What that costs on held-out answers, and what distilling gives back, is in
output/name/compression.md beside the drafter.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list

from specdraft import summary
from specdraft.config import UserError, config_to_dict, require_positive, run_program
from specdraft.decoding.head_times import rank_throughput, timed_ranks
from specdraft.decoding.measure import BUSY, OthersCpu
from specdraft.export.folder import require_replaceable
from specdraft.job import Job, JobConfig, head_features, head_inputs, make_trainer, prepare, start
from specdraft.models.checkpoint import load_drafter, read_config, read_taps, save_drafter
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.heads import Components, check_factoring, components, energy_rank, largest_rank
from specdraft.models.initialise import factored_copy, token_frequency
from specdraft.models.target import TargetModel
from specdraft.provenance import atomic_path, hash_file, provenance, sole_writer, write_json
from specdraft.training.loop import simulate, supervised
from specdraft.training.objective import Objective, ObjectiveConfig
from specdraft.training.optim import OptimConfig
from specdraft.training.plan import TrainConfig


def a_short_while() -> TrainConfig:
    objective = ObjectiveConfig(steps=3, sampled_vocab=8192)
    return TrainConfig(epochs=2, max_minutes=5, tokens_per_batch=512, optim=OptimConfig(lr=4e-4), objective=objective)


@dataclass
class CompressConfig(JobConfig):
    """drafter: a checkpoint folder with a full or trimmed head.   choose: what settles R: `rank` (None = H/8); `energy`, the smallest
    that keeps this share of the squared singular values, or the largest that saves weights; `throughput`, the largest predicted
    tokens per second of H/16, H/8 and H/4, papers (1.1), with tau after factoring and head times measured now.   init:
    `whitened_svd` weighs by C and D, `svd` is W's own.   distil: what is trained.   held_out: answers simulated on.   Others: JobConfig."""

    name: str = "compressed"
    drafter: Path = Path("runs/eagle3-full/drafter")
    choose: Literal["rank", "energy", "throughput"] = "rank"
    rank: int | None = None
    energy: float = 0.9
    init: Literal["svd", "whitened_svd"] = "whitened_svd"
    distil: Literal["head", "all", "none"] = "head"
    held_out: int = 40
    train: TrainConfig = field(default_factory=a_short_while)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.energy <= 1:
            raise UserError(f"energy: got {self.energy}, allowed: above 0, to 1")
        require_positive({"held_out": self.held_out})
        if self.rank is not None and self.choose != "rank":
            raise UserError(f"rank: got {self.rank} with choose {self.choose}, which finds one; leave one of them out")


def main(config: CompressConfig) -> None:
    folder = config.output / config.name
    if (folder / "drafter").absolute() == config.drafter.absolute():
        raise UserError(f"name: got {config.name}, whose folder {folder} holds the drafter itself; give another")
    require_replaceable(folder / "drafter")
    dtype = getattr(torch, read_config(config.drafter)["dtype"])
    accelerator, target = start(config, read_taps(config.drafter))
    dense = load_drafter(config.drafter, target, torch.float32)
    rank = max(1, target.hidden_size // 8) if config.rank is None else config.rank
    check_factoring(dense.lm_head, rank)
    job = prepare(accelerator, target, config, 1, config.held_out)
    job.held_out = supervised(job.held_out, config.train.objective.steps, "held-out data")
    with sole_writer(folder) if accelerator.is_main_process else contextlib.nullcontext():
        found, predicted = {"before": simulated(job, config, dense)}, {}
        parts = take_apart(job, config, dense)
        if config.choose == "energy":
            rank = rank_by_energy(job, config, dense, parts)
        elif config.choose == "throughput":
            predicted = predict(job, config, dense, parts, found["before"]["tau"])
            rank = max(predicted, key=lambda rank: predicted[rank])
        drafter = factored_copy(dense, rank, parts)
        found["factored"] = simulated(job, config, drafter)
        if config.distil != "none":
            found["distilled"] = distil(job, config, drafter)
        if accelerator.is_main_process:
            page = write_report(
                job.target, config, found, float(parts.energy[:rank].sum() / parts.energy.sum()), predicted
            )
            save_drafter(folder / "drafter", drafter, target, page, config_to_dict(config), dtype)
            load_drafter(folder / "drafter", target)  # what was written can be read
            print(f"\n{page}\nDrafter: {folder / 'drafter'}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def simulated(job: Job, config: CompressConfig, drafter: Eagle3Drafter) -> dict[str, Any]:
    """The head, and simulated decoding of the held-out answers (training/metrics.py: Report) over the whole vocabulary."""
    train = config.train
    model = Objective(drafter, job.target, replace(train.objective, sampled_vocab=0))
    with job.accelerator.autocast():
        report = simulate(job.accelerator, model, job.states, job.held_out, train)
    return {**shape(drafter), **report.as_dict()}


def shape(drafter: Eagle3Drafter) -> dict[str, Any]:
    rows, width = drafter.lm_head.weight.shape
    weights = sum(parameter.numel() for parameter in drafter.lm_head.parameters())
    return {"kind": drafter.config.head.kind, "head_rows": rows, "width": width, "weights": weights}


def take_apart(job: Job, config: CompressConfig, dense: Eagle3Drafter) -> Components:
    """The components of the dense head, weighed by features and tokens of the training answers unless `svd` is asked for."""
    head = dense.lm_head
    if config.init == "svd":
        return components(head.weight)
    with job.accelerator.autocast():
        inputs = head_inputs(dense, job, config.train.objective.steps).double()
    frequency = token_frequency(job.target, head_features(job.states, job.train))
    if head.vocab_map is not None:
        frequency = frequency[head.ids]
    return components(head.weight, inputs.T @ inputs / len(inputs), frequency)


def rank_by_energy(job: Job, config: CompressConfig, dense: Eagle3Drafter, parts: Components) -> int:
    """The smallest rank that keeps the energy asked for; at most the largest whose factors are smaller than the head."""
    rank, most = energy_rank(parts.energy, config.energy), largest_rank(dense.lm_head)
    if rank > most:
        kept = float(parts.energy[:most].sum() / parts.energy.sum())
        job.accelerator.print(
            f"warning: energy: {config.energy} needs rank {rank}, whose factors are no smaller than the head; rank {most} is taken, "
            f"which keeps {kept:.4f}"
        )
    return min(rank, most)


def predict(job: Job, config: CompressConfig, dense: Eagle3Drafter, parts: Components, tau: float) -> dict[int, float]:
    """By rank, the predicted tokens per second over those of the dense head, whose tau is `tau`; times as of the first process."""
    rows, width = dense.lm_head.weight.shape
    ranks = [rank for rank in timed_ranks(width) if rank <= largest_rank(dense.lm_head)]
    taus = {rank: simulated(job, config, factored_copy(dense, rank, parts))["tau"] for rank in ranks}
    others = OthersCpu()
    predicted = rank_throughput(job.target, rows, tau, taus, config.train.objective.steps)
    if (share := others.share()) > BUSY:
        job.accelerator.print(f"warning: other processes used {share:.0%} of the machine: time heads when it is idle")
    return broadcast_object_list([predicted])[0]


def distil(job: Job, config: CompressConfig, drafter: Eagle3Drafter) -> dict[str, Any]:
    """Train the head alone, or everything, on the target's answers; the best weights are left in `drafter`. As `simulated`."""
    drafter.requires_grad_(config.distil == "all")
    drafter.lm_head.requires_grad_(True)
    vocab_map = drafter.lm_head.vocab_map
    identity = {
        "target": job.target.hash,
        "vocabulary map": vocab_map.hash if vocab_map else "none",
        "drafter": hash_file(config.drafter / "model.safetensors"),
        "rank": str(drafter.lm_head.weight.shape[1]),
        "init": config.init,
        "distil": config.distil,
    }
    trained = make_trainer(job, drafter, config, identity).run()
    return {**shape(drafter), **trained.best, "steps": trained.steps, "minutes": trained.seconds / 60}


def write_report(
    target: TargetModel, config: CompressConfig, found: dict[str, Any], kept: float, predicted: dict[int, float]
) -> str:
    """Writes compression.json and compression.md; returns the page, which is the drafter's card too. kept: share of the energy."""
    folder = config.output / config.name
    record = {"stages": found, "energy": kept, "predicted": predicted, "config": config_to_dict(config)}
    write_json(folder / "compression.json", {**record, "provenance": provenance()})
    page = (
        f"# EAGLE-3 drafter for {target.name}\n\nThe drafter {config.drafter} with a low-rank head. Its speed was not measured.\n\n"
        f"{summary.stages_table(found)}\n\nSimulated on {found['before']['rows'][0]:,} positions of held-out answers: tau is the tokens of "
        f"a round at T = 0 with {config.train.objective.steps} drafted, alpha the acceptance at T = 1. {config.init} at rank "
        f"{found['factored']['width']} keeps {100 * kept:.1f} % of the energy.\n"
    )
    if predicted:
        ratios = ", ".join(f"{ratio:.2f} at rank {rank}" for rank, ratio in predicted.items())
        page += (
            f"\nPredicted tokens per second over the dense head's, with tau after factoring, papers (1.1): {ratios}.\n"
        )
    with atomic_path(folder / "compression.md") as temporary:
        temporary.write_text(page)
    return page


if __name__ == "__main__":
    run_program(main, CompressConfig)
