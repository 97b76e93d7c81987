"""The loop in one process on a tiny target: exact resume, signals, broken checkpoints, budgets, logs."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_training import Config, make_trainer, small_run, tiny_examples

from specdraft.config import UserError
from specdraft.data.chat import Example
from specdraft.training import checkpoint, metrics
from specdraft.training.loop import Trainer, forward
from specdraft.training.metrics import make_report
from specdraft.training.optim import OptimConfig, schedule
from specdraft.training.plan import Plan, TrainConfig
from specdraft.training.processes import make_accelerator

FINAL = "state/step-00000010"


def run(accelerator, output: Path, train: TrainConfig | None = None, cache_bytes: int = 0, change=None):
    """One run in `output`; `change(trainer)` may break it first. The accelerator forgets what it prepared for the last one."""
    accelerator.free_memory()
    trainer = make_trainer(Config(output, cache_bytes, train=train or small_run()), accelerator)
    if change is not None:
        change(trainer)
    return trainer, trainer.run()


def at_step(number: int, act):
    """In the middle of step `number`, act()."""

    def change(trainer):
        step = trainer._train_step

        def train_step(batches):
            if trainer.step == number - 1:
                act()
            step(batches)

        trainer._train_step = train_step

    return change


def add_noise(trainer):
    """A forward pass that consumes random numbers."""
    forward = trainer._forward

    def noisy(examples, share):
        loss, sums = forward(examples, share)
        return loss * (1 + 0.1 * torch.rand(())), sums

    trainer._forward = noisy


def crash():
    raise ZeroDivisionError


def assert_same_files(
    one: Path, other: Path, names=("best.safetensors", f"{FINAL}/model.safetensors", f"{FINAL}/optimizer.bin")
):
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def logged(output: Path) -> list[dict]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in ("seconds", "tokens_per_second")}
        for record in records
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The output of a run that nothing interrupted. Copy it before changing it."""
    output = tmp_path_factory.mktemp("finished") / "run"
    AcceleratorState._reset_state(reset_partial_state=True)
    run(make_accelerator("no", None, "none", output), output)
    return output


@pytest.mark.parametrize(("optimizer", "cache_bytes", "sampled"), [("adamw", 0, 0), ("muon", 1 << 20, 160)])
def test_crash_and_resume_is_exact(accelerator, tmp_path, optimizer, cache_bytes, sampled):
    """Fault 26: weights, optimiser state, random numbers, place in the data, schedule, best so far and log are, bit for bit,
    those of a run that was not interrupted; across an epoch's end, with accumulation, and with a sample of the columns in every step."""
    train = replace(small_run(), accumulation=2, epochs=None, optim=OptimConfig(name=optimizer, warmup=0.3))
    train.objective.sampled_vocab = sampled  # fewer than a configuration may ask for
    names = ["best.safetensors", f"{FINAL}/model.safetensors", f"{FINAL}/optimizer.bin"]
    names += [f"{FINAL}/optimizer_1.bin"] if optimizer == "muon" else []
    _, whole = run(accelerator, tmp_path / "whole", train, cache_bytes, add_noise)
    assert whole.epochs > 1

    def crash_noisily(trainer):
        add_noise(trainer)
        at_step(6, crash)(trainer)

    with pytest.raises(ZeroDivisionError):
        run(accelerator, tmp_path / "parts", train, cache_bytes, crash_noisily)
    assert not (tmp_path / "parts" / FINAL).exists()
    torch.manual_seed(99)
    _, parts = run(accelerator, tmp_path / "parts", train, cache_bytes, add_noise)
    assert_same_files(tmp_path / "whole", tmp_path / "parts", names)
    assert logged(tmp_path / "whole") == logged(tmp_path / "parts")
    assert ("sampled_tau" if sampled else "tau") in logged(tmp_path / "whole")[1], "what is of a sample says so"
    assert replace(parts, seconds=0) == replace(whole, seconds=0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_stops(finished, accelerator, tmp_path, number, code):
    """The step that was running is finished and saved; the same command goes on to the same end."""
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as stop:
        run(accelerator, tmp_path / "parts", change=at_step(5, lambda: os.kill(os.getpid(), number)))
    assert stop.value.code == code
    assert signal.getsignal(number) is handler
    assert checkpoint.newest_state(tmp_path / "parts")[0].name == "step-00000005"
    run(accelerator, tmp_path / "parts")
    assert_same_files(finished, tmp_path / "parts")


def test_a_signal_in_the_last_evaluation_is_heard(finished, accelerator, tmp_path):
    """Nothing more is done after it; the same command finds the training finished."""

    def interrupted(trainer):
        evaluate = trainer._evaluate
        trainer._evaluate = lambda: (evaluate(), trainer.step == 10 and os.kill(os.getpid(), signal.SIGTERM))

    with pytest.raises(SystemExit) as stop:
        run(accelerator, tmp_path / "run", change=interrupted)
    assert stop.value.code == 143
    _, again = run(accelerator, tmp_path / "run")
    assert again.steps == 10
    assert_same_files(finished, tmp_path / "run")


def damage_mark(folder):
    (folder / "complete.json").unlink()


def damage_half_mark(folder):
    (folder / "complete.json").write_text('{"files": {')


def damage_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def damage_file(folder):
    (folder / "optimizer.bin").unlink()


@pytest.mark.parametrize("damage", [damage_mark, damage_half_mark, damage_weights, damage_file])
def test_broken_newest_is_skipped(finished, accelerator, tmp_path, damage):
    """Fault 27."""
    output = shutil.copytree(finished, tmp_path / "run")
    damage(output / FINAL)
    with pytest.warns(UserWarning, match="step-00000010: not complete, skipped"):
        trainer, _ = run(accelerator, output)
    assert trainer.saved_at == 10
    assert_same_files(finished, output)


def test_crash_while_saving(accelerator, tmp_path, monkeypatch):
    """Fault 27: nothing half-written is taken for a state, and the next save removes it."""
    monkeypatch.setattr(checkpoint, "_mark", lambda *_: crash())
    with pytest.raises(ZeroDivisionError):
        run(accelerator, tmp_path)
    assert [path.name for path in (tmp_path / "state").iterdir()] == [".writing-step-00000003"]
    assert checkpoint.newest_state(tmp_path) is None
    monkeypatch.undo()
    run(accelerator, tmp_path)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["step-00000009", "step-00000010"]


def test_files_hold_the_drafter_and_fp32_moments_only(tmp_path):
    """Faults 13, 26: no frozen target weights in any file; weights and optimiser state are not rounded under bf16 autocast."""
    AcceleratorState._reset_state(reset_partial_state=True)
    train = replace(small_run(), mixed_precision="bf16", max_steps=2)
    trainer, _ = run(make_accelerator("bf16", None, "none", tmp_path), tmp_path, train)
    AcceleratorState._reset_state(reset_partial_state=True)
    own = set(trainer.drafter.state_dict())
    folder = tmp_path / "state" / "step-00000002"
    saved = load_file(folder / "model.safetensors")
    assert {name.removeprefix("drafter.") for name in saved} == own == set(checkpoint.best_weights(tmp_path))
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    moments = torch.load(folder / "optimizer.bin")["state"]
    assert len(moments) == len(list(trainer.drafter.parameters()))
    for state in moments.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        assert (state["exp_avg"].bfloat16().float() != state["exp_avg"]).any()


def test_target_stays_as_it_was(accelerator, tmp_path):
    trainer, _ = run(accelerator, tmp_path, replace(small_run(), max_steps=2))
    before = make_trainer(Config(tmp_path / "other"), accelerator).model.target.model.state_dict()
    for name, tensor in trainer.model.target.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_best_weights_are_chosen_and_loaded(accelerator, tmp_path, monkeypatch):
    """The drafter ends with the weights of the evaluation with the greatest tau, not with the last ones."""
    taus = iter([1.1, 1.4, 1.2, 1.3])  # after steps 0, 4, 8, 10

    def pretend(trainer):
        evaluate = trainer._evaluate

        def evaluate_with_tau():
            with monkeypatch.context() as patch:
                patch.setattr(metrics, "make_report", lambda sums: replace(make_report(sums), tau=next(taus)))
                evaluate()

        trainer._evaluate = evaluate_with_tau

    trainer, result = run(accelerator, tmp_path, replace(small_run(), save_every=4, keep=9), change=pretend)
    assert (result.best["step"], result.best["tau"]) == (4, 1.4)
    weights = load_file(tmp_path / "state" / "step-00000004" / "model.safetensors")
    for name, tensor in trainer.drafter.state_dict().items():
        assert torch.equal(tensor, weights[f"drafter.{name}"]), name


@pytest.mark.parametrize(("mixed_precision", "optimizer"), [("no", "muon"), ("bf16", "adamw")])
def test_it_learns(tmp_path, mixed_precision, optimizer):
    """Fault 32's other half: a drafter that trains on what it is evaluated on drafts better and better, in fp32 and in bf16."""
    AcceleratorState._reset_state(reset_partial_state=True)
    train = replace(
        small_run(),
        max_steps=40,
        epochs=None,
        tokens_per_batch=512,
        mixed_precision=mixed_precision,
        log_every=10,
        optim=OptimConfig(name=optimizer, lr=1e-2),
    )

    def same_examples(trainer):
        trainer.held_out = trainer.train

    accelerator = make_accelerator(mixed_precision, None, "none", tmp_path)
    run(accelerator, tmp_path, train, cache_bytes=1 << 24, change=same_examples)
    AcceleratorState._reset_state(reset_partial_state=True)
    alphas = [record["eval_alpha"] for record in logged(tmp_path) if "eval_alpha" in record]
    assert all(last > first + 0.05 for first, last in zip(alphas[0], alphas[-1], strict=True))


def test_steps_and_schedule(accelerator, tmp_path):
    """Fault 26: max_steps stops; the logged rate is the schedule's at the middle of each step, across a resume too."""
    train = replace(small_run(), optim=OptimConfig(lr=1e-3, warmup=0.3, floor=0.1))
    with pytest.raises(ZeroDivisionError):
        run(accelerator, tmp_path, train, change=at_step(8, crash))
    _, result = run(accelerator, tmp_path, train)
    assert (result.steps, result.stopped_by) == (10, "steps")
    rates = [record["lr"] for record in logged(tmp_path) if "lr" in record]
    assert rates == pytest.approx([1e-3 * schedule((step + 0.5) / 10, 0.3, 0.1) for step in range(10)])


def test_finished_run_is_left_alone(finished, accelerator):
    before = (finished / FINAL / "complete.json").stat().st_mtime_ns
    _, again = run(accelerator, finished)
    assert (finished / FINAL / "complete.json").stat().st_mtime_ns == before
    assert again.best == checkpoint.best_state(finished)
    assert len(logged(finished)) == 10 + 4


def test_time_budget(accelerator, tmp_path, monkeypatch):
    """The rate follows the share of the budget; the last evaluation has its time; a resumed run has only what is left."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def costs(trainer):
        step, evaluate = trainer._train_step, trainer.states.batch
        trainer._train_step = lambda batches: (step(batches), now.__setitem__(0, now[0] + 3.0))
        trainer.states.batch = lambda examples: (
            now.__setitem__(0, now[0] + (0 if trainer.model.training else 1.0)),
            evaluate(examples),
        )[1]

    train = replace(
        small_run(), max_steps=None, epochs=None, max_minutes=1.0, eval_every=1000, optim=OptimConfig(warmup=0.5)
    )
    _, result = run(accelerator, tmp_path, train, change=costs)
    assert result.stopped_by == "minutes"
    assert 54 < result.seconds <= 60
    rates = [record["lr"] for record in logged(tmp_path) if "lr" in record]
    assert max(rates) == pytest.approx(1e-3, rel=0.1)
    assert 0.35 < rates.index(max(rates)) / len(rates) < 0.65
    assert rates[-1] < 1e-4
    now[0] = 1000.0
    _, again = run(accelerator, tmp_path, train, change=costs)
    assert again.steps == result.steps


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens_per_batch": 256}, "train.tokens_per_batch = 128, got 256"),
        ({"optim": OptimConfig(lr=2e-3)}, "train.optim.lr = 0.001, got 0.002"),
        ({"resume": False}, "holds a run already"),
    ],
)
def test_resume_of_another_run_is_refused(finished, accelerator, change, says):
    """Settings that would silently not take effect, or break the schedule."""
    with pytest.raises(UserError, match=says):
        run(accelerator, finished, replace(small_run(), **change))


def test_a_finished_run_that_lost_its_best_weights_evaluates_again(finished, accelerator, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "best.safetensors").write_bytes(b"not a checkpoint")
    _, again = run(accelerator, tmp_path / "run", small_run())
    assert again.best["tau"] >= 1
    assert (tmp_path / "run" / "best.safetensors").stat().st_size > 1000


def test_a_damaged_training_state_is_one_line(finished, accelerator, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / FINAL / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))  # a file of another size is not taken for complete
    with pytest.raises(UserError, match="cannot be resumed from"):
        run(accelerator, tmp_path / "run", small_run())


def test_resume_with_another_map_is_refused(finished, accelerator):
    """Fault 18."""

    def other_target(trainer):
        trainer.identity["target"] = "0" * 16

    with pytest.raises(UserError, match="was made with target = "):
        run(accelerator, finished, change=other_target)


def test_not_finite_loss_stops(accelerator, tmp_path):
    def poison(trainer):
        torch.nn.init.constant_(trainer.drafter.fc.weight, math.nan)

    with pytest.raises(UserError, match="the loss is nan at step 1"):
        run(accelerator, tmp_path, replace(small_run(), eval_every=0), change=poison)


def test_weights_of_a_broken_loss_are_not_saved(accelerator, tmp_path):
    """Between two logs too: the state before them stays the newest, and is worth going on from."""

    def poison(trainer):
        at_step(5, lambda: torch.nn.init.constant_(trainer.drafter.fc.weight, math.nan))(trainer)

    train = replace(small_run(), eval_every=0, log_every=100)
    with pytest.raises(UserError, match="the loss is nan at step 6"):
        run(accelerator, tmp_path, train, change=poison)
    assert checkpoint.newest_state(tmp_path)[0].name == "step-00000003"
    _, result = run(accelerator, tmp_path, train)
    assert result.steps == 10
    steps = [record["step"] for record in logged(tmp_path) if "loss" in record]
    assert steps == [3, 6, 9, 10], "no step is in no record"


def test_a_state_that_cannot_be_written_is_one_line(accelerator, tmp_path):
    """torch says RuntimeError where a disk is full, and safetensors has an error of its own."""

    def full(trainer):
        def save_state(folder):
            (Path(folder) / "half").write_text("x")
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

        trainer.accelerator.save_state, before = save_state, trainer.accelerator.save_state
        restore.append(before)

    restore = []
    with pytest.raises(UserError, match=r"step-00000003: cannot be saved .*free some space"):
        run(accelerator, tmp_path, change=full)
    accelerator.save_state = restore[0]
    assert list((tmp_path / "state").iterdir()) == []


def test_examples_without_finite_states_are_left_out(accelerator, tmp_path):
    """Fault 7: neither trained on nor counted, though their own masks say otherwise."""
    trainer = make_trainer(Config(tmp_path), accelerator)
    device, examples = accelerator.device, trainer.train[:3]
    features = trainer.states.target.features

    def broken(input_ids, lengths):
        found = features(input_ids, lengths)
        if torch.equal(input_ids[0], examples[1].input_ids):
            found.last[0, 3] = math.nan
        return found

    trainer.states.target.features = broken
    share = torch.ones(3)
    loss, sums = forward(trainer.model, trainer.states, examples, share, 3, device)
    others = [forward(trainer.model, trainer.states, [examples[i]], share, 3, device) for i in (0, 2)]
    torch.testing.assert_close(loss, others[0][0] + others[1][0])
    torch.testing.assert_close(sums, others[0][1] + others[1][1])
    assert len(trainer.states.bad) == 1


def test_tracker_gets_the_figures(accelerator, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    tracked = make_accelerator("no", None, "tensorboard", tmp_path)
    run(tracked, tmp_path, replace(small_run(), tracker="tensorboard"))
    events = EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent))
    events.Reload()
    assert {"loss", "lr", "tau", "eval_tau", "alpha.0", "hit.2", "tokens_per_second"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("eval_tau")] == [0, 4, 8, 10]


def test_plan_covers_every_example_once():
    """Fault 28: whatever the split over processes and micro-batches, an epoch's steps are the same sets of examples, each
    example comes once, and no process is ever without a batch."""
    lengths = [len(example.input_ids) for example in tiny_examples(37, seed=1)]
    config = TrainConfig(tokens_per_batch=128, accumulation=1, epochs=2)
    by_split = []
    for processes, accumulation in ((4, 1), (2, 2), (1, 4)):
        plan = Plan(lengths, replace(config, accumulation=accumulation), processes)
        steps = plan.epoch(0)
        assert all(len(step) == 4 and all(step) for step in steps)
        assert sorted(i for step in steps for batch in step for i in batch) == list(range(37))
        by_split.append(steps)
        assert plan.total_steps == len(plan.epoch(0)) + len(plan.epoch(1))
        assert plan.epoch(0) != plan.epoch(1)
        resumed = next(plan.steps(len(steps) + 1))[1]
        assert resumed == plan.epoch(1)[1]
    assert by_split[0] == by_split[1] == by_split[2]


def test_nothing_to_learn_is_refused(accelerator, tmp_path, monkeypatch):
    """Fault 1, at the last gate."""
    config = Config(tmp_path)
    trainer = make_trainer(config, accelerator)
    empty = [Example("x", torch.arange(8), torch.zeros(8, dtype=torch.bool))]
    arguments = (trainer.drafter, trainer.model.target, trainer.states)
    with pytest.raises(UserError, match="training data: none of 1 examples"):
        Trainer(accelerator, *arguments, empty, trainer.held_out, config.train, tmp_path, {})
    with pytest.raises(UserError, match="held-out data: none of 0 examples"):
        Trainer(accelerator, *arguments, trainer.train, [], config.train, tmp_path, {})
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(type(accelerator), "num_processes", 2)
    with pytest.raises(UserError, match="held-out data: got 1 examples for 2 processes"):
        Trainer(accelerator, *arguments, trainer.train, trainer.held_out[:1], config.train, tmp_path, {})
    monkeypatch.undo()
    with pytest.raises(UserError, match="a step needs at least 64"):
        Trainer(
            accelerator,
            *arguments,
            trainer.train,
            trainer.held_out,
            replace(config.train, accumulation=64),
            tmp_path,
            {},
        )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"epochs": None}, "got no limit"),
        ({"epochs": 0}, "train.epochs: got 0"),
        ({"max_minutes": -1.0}, "train.max_minutes"),
        ({"keep": 0}, "train.keep"),
        ({"tokens_per_batch": 0}, "train.tokens_per_batch"),
        ({"seed": -1}, "train.seed: got -1"),
        ({"seed": 5_000_000_000}, "train.seed: got 5000000000"),
    ],
)
def test_bad_values(values, says):
    with pytest.raises(UserError, match=says):
        TrainConfig(**values)
