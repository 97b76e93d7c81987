import json
from dataclasses import replace

import pytest
import torch

from specdraft.config import UserError
from specdraft.data import shards
from specdraft.data.chat import Example
from specdraft.data.shards import ShardConfig, Shards, extract, read_index
from specdraft.data.source import Online
from specdraft.testing import tiny_target

MAX_LENGTH = 64
SMALL = ShardConfig(shard_mb=0)  # every example in a file of its own


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def examples():
    generator = torch.Generator().manual_seed(0)
    result = []
    for i, length in enumerate([9, 17, 5, 30, 12]):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[3:] = True
        result.append(Example(f"e{i}", torch.randint(3, 320, (length,), generator=generator), mask))
    return result


def assert_same(first, second):
    for name in ("input_ids", "loss_mask", "lengths", "taps", "last"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("config", [SMALL, ShardConfig(), ShardConfig(tokens_per_batch=40)])
def test_shards_and_online_give_the_same_batch(tmp_path, target, examples, config):
    """Fault 6: what is read is unpadded; company and order do not matter."""
    account = extract(target, examples, tmp_path, MAX_LENGTH, config)
    assert (account.kept, account.total) == (5, 5)
    source, online = Shards(tmp_path, target), Online(target)
    for order in ([0, 1, 2, 3, 4], [3, 1], [4, 4, 0]):
        chosen = [examples[i] for i in order]
        assert_same(source.batch(chosen), online.batch(chosen))
    index = read_index(tmp_path)
    assert index["counts"] == {"examples": 5, "bad": 0, "tokens": 73}
    assert index["key"]["tap_layers"] == [2, 4, 5]


def test_masks_and_names_change_without_new_states(tmp_path, target, examples):
    """Fault 17."""
    extract(target, examples, tmp_path, MAX_LENGTH, SMALL)
    other = Example("renamed", examples[0].input_ids, ~examples[0].loss_mask)
    assert_same(Shards(tmp_path, target).batch([other]), Online(target).batch([other]))


def test_interrupted_and_finished_by_two_ranks(tmp_path, target, examples, monkeypatch):
    """Fault 6: each rank its own files, whole files are not made again, a partial one is not taken as done."""
    calls = []
    run = shards.run_target

    def failing_run(target, together):
        calls.append([example.id for example in together])
        if examples[3].id in calls[-1] and len(calls) < 8:
            raise KeyboardInterrupt
        return run(target, together)

    monkeypatch.setattr(shards, "TIMED_TOKENS", 1)
    monkeypatch.setattr(shards, "run_target", failing_run)
    with pytest.raises(KeyboardInterrupt):
        extract(target, examples, tmp_path, MAX_LENGTH, SMALL)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"shard-0000{i}.safetensors" for i in range(3)
    ]
    with pytest.raises(UserError, match="not all shards are there"):
        Shards(tmp_path, target)
    (tmp_path / ".shard-00003.safetensors.99.tmp").write_bytes(b"partial")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    calls.extend([[]] * 8)
    assert extract(target, examples, tmp_path, MAX_LENGTH, SMALL, rank=1, world=2).kept == 2
    with pytest.raises(UserError, match="not all shards are there"):
        Shards(tmp_path, target)
    assert extract(target, examples, tmp_path, MAX_LENGTH, SMALL, rank=0, world=2).kept == 3
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert_same(Shards(tmp_path, target).batch(examples), Online(target).batch(examples))
    count = len(calls)
    extract(target, examples, tmp_path, MAX_LENGTH, SMALL)  # all there: nothing runs
    assert len(calls) == count


@pytest.mark.parametrize("change", ["target", "dtype", "taps", "template", "max_length", "data", "shard_mb"])
def test_folder_of_another_extraction_is_refused(tmp_path, target, examples, change):
    """Fault 5: the key holds target, tokenizer, template, maximal length and data."""
    extract(target, examples, tmp_path, MAX_LENGTH, SMALL)
    other = {
        "target": lambda: tiny_target(seed=1, dtype=torch.bfloat16),
        "dtype": lambda: tiny_target(),
        "taps": lambda: tiny_target(dtype=torch.bfloat16, tap_layers=(1, 4, 5)),
        "template": lambda: with_template(tiny_target(dtype=torch.bfloat16)),
    }.get(change, lambda: target)()
    changed = examples[:-1] if change == "data" else examples
    config = ShardConfig() if change == "shard_mb" else SMALL
    with pytest.raises(UserError, match="made with"):
        extract(other, changed, tmp_path, MAX_LENGTH + (change == "max_length"), config)
    if other is not target:
        with pytest.raises(UserError, match="made with"):
            Shards(tmp_path, other)


def with_template(target):
    target.tokenizer.chat_template += " "
    return target


def test_example_that_was_not_extracted_is_refused(tmp_path, target, examples):
    """Fault 5."""
    extract(target, examples[:4], tmp_path, MAX_LENGTH, SMALL)
    source = Shards(tmp_path, target)
    with pytest.raises(UserError, match="none for example 'e4'"):
        source.batch(examples)
    shorter = replace(examples[0], input_ids=examples[0].input_ids[:-1], loss_mask=examples[0].loss_mask[:-1])
    with pytest.raises(UserError, match="none for example 'e0'"):
        source.batch([shorter])


class Poisoned:
    """A target whose states are NaN for one example."""

    def __init__(self, target, example):
        self._target, self._ids = target, example.input_ids

    def __getattr__(self, name):
        return getattr(self._target, name)

    def features(self, input_ids, lengths):
        features = self._target.features(input_ids, lengths)
        if torch.equal(input_ids[0], self._ids):
            features.last[0, 2] = float("nan")
        return features


def test_states_that_are_not_finite_are_counted_and_stop_the_run(tmp_path, target, examples):
    """Fault 7."""
    poisoned = Poisoned(target, examples[1])
    account = extract(poisoned, examples, tmp_path / "a", MAX_LENGTH, replace(SMALL, max_bad=0.2))
    assert str(account) == "4 of 5 rows kept, skipped: 1 x NaN or infinite states"
    assert_same(Shards(tmp_path / "a", poisoned).batch(examples), Online(poisoned).batch(examples))
    with pytest.raises(UserError, match=r"1 examples have NaN or infinite states, allowed: 1.0% of 5"):
        extract(poisoned, examples, tmp_path / "b", MAX_LENGTH, SMALL)


def test_estimate_is_printed_and_the_disk_checked_before_the_work(tmp_path, target, examples, capsys, monkeypatch):
    """Fault 8. 73 tokens of 4 * 32 bf16 numbers: 18,688 bytes."""
    asked = []
    monkeypatch.setattr(shards, "require_disk", lambda path, needed, what: asked.append(needed))
    extract(target, examples, tmp_path, MAX_LENGTH, ShardConfig())
    assert asked == [73 * 4 * 32 * 2]
    assert "5 examples, 73 tokens, 0.00 GB, about" in capsys.readouterr().out
    stored = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    assert asked[0] <= stored < asked[0] + 2000

    def no_space(path, needed, what):
        raise UserError(f"{what}: no space")

    monkeypatch.setattr(shards, "require_disk", no_space)
    with pytest.raises(UserError, match="no space"):
        extract(target, examples, tmp_path / "b", MAX_LENGTH, ShardConfig())
    assert not list((tmp_path / "b").glob("shard-*"))


def test_examples_of_the_same_ids_share_their_states(tmp_path, target, examples):
    twin = replace(examples[0], id="twin", loss_mask=~examples[0].loss_mask)
    assert extract(target, [*examples, twin], tmp_path, MAX_LENGTH, SMALL).kept == 5
    assert_same(Shards(tmp_path, target).batch([twin]), Online(target).batch([twin]))


def test_corrupt_or_missing_files_are_refused(tmp_path, target, examples):
    extract(target, examples, tmp_path, MAX_LENGTH, ShardConfig())
    path = tmp_path / "shard-00000.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + bytes(byte ^ 255 for byte in whole[-3:]))
    with pytest.raises(UserError, match="checksum does not match"):
        Shards(tmp_path, target).batch(examples)
    path.write_bytes(whole[:-3])
    with pytest.raises(UserError, match="corrupt"):
        Shards(tmp_path, target)
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        Shards(tmp_path, target)  # at once, not where training comes to it


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no index.json"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not of the format"),
        ('{"key": []}', "not of the format"),
        (json.dumps({"key": {"format": "other"}}), "not of the format"),
        (json.dumps({"key": {"format": shards.FORMAT}, "complete": True}), "lost a part of itself"),
    ],
)
def test_bad_index_is_refused(tmp_path, target, content, message):
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(UserError, match=message):
        Shards(tmp_path, target)


@pytest.mark.parametrize(
    "change",
    [
        {"complete": None},
        {"shards": None},
        {"shards": ["a"]},
        {"shards": [{"file": "a", "rows": [["key"]], "bad": []}]},
        {"shards": [{"file": "a", "rows": [["key", "3"]], "bad": []}]},
        {"complete": False, "planned_shards": None},
    ],
)
def test_an_index_that_lost_a_part_is_refused(tmp_path, target, examples, change):
    extract(target, examples, tmp_path, MAX_LENGTH, SMALL)
    index = json.loads((tmp_path / "index.json").read_text())
    assert read_index(tmp_path) == index
    (tmp_path / "index.json").write_text(json.dumps(index | change))
    with pytest.raises(UserError, match="lost a part of itself; remove the folder and extract again"):
        read_index(tmp_path)


def test_bad_data_is_refused_before_anything_is_written(tmp_path, target, examples):
    foreign = Example("f", torch.tensor([5, 320]), torch.ones(2, dtype=torch.bool))
    with pytest.raises(UserError, match="got token id 320, allowed: 0 to 319"):
        extract(target, [*examples, foreign], tmp_path, MAX_LENGTH, SMALL)
    with pytest.raises(UserError, match="got 0 examples"):
        extract(target, [], tmp_path, MAX_LENGTH, SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("setting", "value"), [("shard_mb", -1), ("tokens_per_batch", 0), ("max_bad", 1.5)])
def test_settings_that_cannot_work_are_refused(setting, value):
    with pytest.raises(UserError, match=f"shards.{setting}: got "):
        ShardConfig(**{setting: value})
