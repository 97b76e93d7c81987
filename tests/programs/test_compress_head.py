"""recipes/compress_head.py as users run it, on a tiny target. In this process, since starting many is slow; it runs the same file as
the main program."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from specdraft.data.vocab import VocabMap
from specdraft.decoding.generate import autoregressive_generate, speculative_generate
from specdraft.export.eagle3 import export_eagle3, import_eagle3
from specdraft.models.checkpoint import load_drafter, read_config, save_drafter
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.testing import TINY_VOCAB, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
TOPICS = ["the sea", "a boat", "the wind", "two and three", "a short story", "an answer", "a question", "an assistant"]
TAPS = (1, 3, 6)  # not the default ones: an imported drafter may read any
KEPT = VocabMap(torch.arange(TINY_VOCAB - 20).flip(0), TINY_VOCAB)
COMPRESS = [
    "--threads=1",
    "--prompts=prompts.jsonl",
    "--target=target",
    "--held-out=4",
    "--answers.max-new-tokens=16",
    "--train.objective.steps=2",
    "--train.epochs=2",
    "--train.mixed-precision=no",
    "--train.eval-every=0",
    "--train.optim.lr=0.004",
]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A target, 120 prompts, and drafters whose weights are the target's: nothing needs to be trained before."""
    folder = tmp_path_factory.mktemp("compress")
    for name, seed in (("target", 0), ("other", 1)):
        tiny_model(seed=seed).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    rows = [{"id": f"p{i}", "turns": [f"Write {i} words about {TOPICS[i % 8]}."]} for i in range(120)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "empty.jsonl").write_text("")
    target = load_target(folder)
    for kind in ("full", "trimmed", "lowrank"):
        torch.manual_seed(0)
        head = HeadConfig(kind, rank=8, init="svd")
        drafter = new_drafter(target, DrafterConfig(), head, KEPT if kind == "trimmed" else None)
        save_drafter(folder / kind, drafter, target, "# card", {}, torch.float32)
    shutil.copytree(folder / "full", folder / "corrupt")
    weights = (folder / "corrupt" / "model.safetensors").read_bytes()
    (folder / "corrupt" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return folder


def load_target(folder):
    return TargetModel.load(str(folder / "target"), dtype=torch.float32, tap_layers=TAPS)


@pytest.fixture
def run(workdir, monkeypatch, capfd):
    """Runs the recipe in the folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(workdir)

    def call(*flags):
        program = str(ROOT / "recipes" / "compress_head.py")
        monkeypatch.setattr(sys, "argv", [program, *COMPRESS, *flags])
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            runpy.run_path(program, run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = stop.code
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
        return code, *capfd.readouterr()

    return call


@pytest.mark.parametrize(("kind", "distil"), [("full", "head"), ("trimmed", "all")])
def test_factored_and_distilled(workdir, run, kind, distil):
    """Three simulated stages, the last one's loss below the second's; a trimmed head keeps its map; only what is distilled changes; the
    drafter decodes losslessly and is exported."""
    code, out, error = run(f"--name={kind}-low", f"--drafter={kind}", f"--distil={distil}", "--rank=6")
    assert code == 0, error
    folder = workdir / "runs" / f"{kind}-low"
    found = json.loads((folder / "compression.json").read_text())
    stages, rows = found["stages"], TINY_VOCAB if kind == "full" else len(KEPT)
    assert list(stages) == ["before", "factored", "distilled"]
    assert [stage["weights"] for stage in stages.values()] == [rows * 32, rows * 6 + 6 * 32, rows * 6 + 6 * 32]
    assert stages["before"]["row_loss"] != stages["factored"]["row_loss"]
    assert stages["distilled"]["row_loss"][0] < stages["factored"]["row_loss"][0]
    assert all(stage["tau"] >= 1 for stage in stages.values())
    assert 0 < found["energy"] < 1
    page = (folder / "compression.md").read_text()
    assert page in out
    assert f"| factored | lowrank, {rows} x 6 |" in page
    assert page == (folder / "drafter" / "README.md").read_text()

    before, after = (load_file(place / "model.safetensors") for place in (workdir / kind, folder / "drafter"))
    body = [name for name in before if not name.startswith(("lm_head", "d2t", "t2d"))]
    changed = [name for name in body if not torch.equal(before[name], after[name])]
    assert bool(changed) == (distil == "all")
    target = load_target(workdir)
    drafter = load_drafter(folder / "drafter", target)
    assert drafter.lm_head.vocab_map == (KEPT if kind == "trimmed" else None)
    prompt = [1, 40, 77, 90]
    alone = autoregressive_generate(target, prompt, max_new_tokens=20).tokens
    assert speculative_generate(target, drafter, prompt, max_new_tokens=20).tokens == alone
    export_eagle3(drafter, target, folder / "exported", factors=True)
    assert import_eagle3(folder / "exported", target, layer_ids="vllm").config.head.rank == 6


def test_the_rank_by_energy(workdir, run):
    """The smallest that keeps the share; without distilling only factors are made, and the answers are there already."""
    flags = ["--choose=energy", "--energy=0.95", "--distil=none"]
    code, _, error = run("--name=energy", "--drafter=full", *flags)
    assert code == 0, error
    found = json.loads((workdir / "runs" / "energy" / "compression.json").read_text())
    rank = found["stages"]["factored"]["width"]
    assert list(found["stages"]) == ["before", "factored"]
    assert found["energy"] >= 0.95
    assert run("--name=less", "--drafter=full", "--distil=none", f"--rank={rank - 1}")[0] == 0
    assert json.loads((workdir / "runs" / "less" / "compression.json").read_text())["energy"] < 0.95
    assert not (workdir / "runs" / "energy" / "training").exists()


def test_more_energy_than_two_factors_can_keep(workdir, run):
    """The largest rank that saves weights is taken, and said; the work before it is not lost."""
    code, out, error = run("--name=most", "--drafter=full", "--choose=energy", "--energy=1.0", "--distil=none")
    assert code == 0, error
    assert "warning: energy: 1.0 needs rank 32, whose factors are no smaller than the head; rank 29 is taken" in out
    found = json.loads((workdir / "runs" / "most" / "compression.json").read_text())
    assert found["stages"]["factored"]["width"] == 29
    assert 0.9 < found["energy"] < 1


def test_the_rank_by_predicted_throughput(workdir, run):
    code, out, error = run("--name=fast", "--drafter=full", "--choose=throughput", "--distil=none")
    assert code == 0, error
    found = json.loads((workdir / "runs" / "fast" / "compression.json").read_text())
    predicted = {int(rank): ratio for rank, ratio in found["predicted"].items()}
    assert list(predicted) == [2, 4, 8]
    assert found["stages"]["factored"]["width"] == max(predicted, key=predicted.get)
    assert "Predicted tokens per second over the dense head's" in out
    assert read_config(workdir / "runs" / "fast" / "drafter")["drafter"]["head"]["kind"] == "lowrank"


BAD = {
    "low-rank already": (["--drafter=lowrank"], "got one that is low-rank already (rank 8)"),
    "rank too large": (["--drafter=full", "--rank=30"], "rank: got 30, allowed: 1 to 29"),
    "rank zero": (["--drafter=full", "--rank=0"], "rank: got 0, allowed: 1 to 29"),
    "rank and energy": (["--drafter=full", "--rank=4", "--choose=energy"], "rank: got 4 with choose energy"),
    "energy": (["--drafter=full", "--choose=energy", "--energy=0"], "energy: got 0.0, allowed: above 0"),
    "other target": (["--drafter=full", "--target=other"], "drafter full: trained for the target"),
    "corrupt": (["--drafter=corrupt"], "the checkpoint is corrupt"),
    "no drafter": (["--drafter=nowhere"], "drafter nowhere: has no config.json"),
    "no prompts": (["--drafter=full", "--prompts=empty.jsonl"], "empty.jsonl: got no prompts"),
    "too few prompts": (["--drafter=full", "--max-prompts=1"], "prompts: got"),
    "unknown choice": (["--drafter=full", "--distil=body"], "distil"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(workdir, run, case):
    flags, message = BAD[case]
    code, _, error = run("--name=bad", *flags)
    assert code == 2, error
    line = error.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert not (workdir / "runs" / "bad" / "drafter").exists()


def test_a_drafter_is_not_written_over(workdir, run):
    shutil.copytree(workdir / "full", workdir / "runs" / "own" / "drafter")
    code, _, error = run("--name=own", "--drafter=runs/own/drafter")
    assert code == 2
    assert "holds the drafter itself; give another" in error
