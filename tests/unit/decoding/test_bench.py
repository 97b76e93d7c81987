"""Requests, contenders and one cell of a benchmark, on tiny pairs; eval/bench.py itself is in tests/programs."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from scripted import ScriptedDrafter, ScriptedTarget

from specdraft.config import UserError
from specdraft.data.chat import AnswerRow, render_prompt
from specdraft.data.tasks import Prompt, builtin_prompts, split_held_out
from specdraft.data.vocab import VocabMap, required_ids
from specdraft.decoding import bench, contenders, evospec
from specdraft.decoding.contenders import CostConfig, Lineup, PolicyConfig, make_entries
from specdraft.decoding.costs import CostTable
from specdraft.decoding.evospec import EvoSpecConfig
from specdraft.decoding.generate import autoregressive_generate
from specdraft.decoding.length_policies import LENGTH_POLICIES, Fixed
from specdraft.decoding.measure import TARGET_ALONE, Contender
from specdraft.decoding.trace import tau
from specdraft.decoding.vocab_policies import VOCAB_POLICIES, NanoSpec
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.sparse_self import SparseSelfConfig
from specdraft.models.target import TargetModel
from specdraft.models.tree import Eagle2Tree
from specdraft.provenance import machine
from specdraft.testing import tiny_model, tiny_target, tiny_tokenizer

REQUESTS = [bench.Request(f"q{i}#1", "task", [i, 3, 1]) for i in range(5)]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def side(drafts_like, tokens):
    return bench.Side([Contender(ScriptedDrafter(drafts_like.logits), Fixed(tokens))])


def test_every_turn_of_a_conversation_is_a_request(target, tmp_path):
    prompts = [Prompt("a", "mt_bench", ("Hello.", "Why?")), Prompt("b", "qa", ("When?",), system="Be brief.")]
    path = tmp_path / "answers.jsonl"
    requests, left_out = bench.make_requests(target, prompts, 12, path)
    assert [(request.id, request.task) for request in requests] == [
        ("a#1", "mt_bench"),
        ("a#2", "mt_bench"),
        ("b#1", "qa"),
    ]
    assert left_out == 0
    first = autoregressive_generate(target, requests[0].input_ids, max_new_tokens=12).tokens
    answer = target.tokenizer.decode(first, skip_special_tokens=True)
    turns = [("user", "Hello."), ("assistant", answer), ("user", "Why?")]
    assert requests[1].input_ids == render_prompt(target.tokenizer, [{"role": r, "content": c} for r, c in turns])
    assert requests[2].input_ids == render_prompt(
        target.tokenizer, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "When?"}]
    )


def test_answers_to_earlier_turns_are_made_once(target, tmp_path, monkeypatch):
    prompts, path = [Prompt("a", "mt_bench", ("Hello.", "Why?"))], tmp_path / "answers.jsonl"
    requests, _ = bench.make_requests(target, prompts, 12, path)
    monkeypatch.setattr(bench, "autoregressive_generate", None)
    assert bench.make_requests(target, prompts, 12, path) == (requests, 0)
    assert len(path.read_text().splitlines()) == 1


def test_turns_that_do_not_fit_are_left_out_and_counted(target, tmp_path):
    """Fault 4: every turn is accounted for."""
    long = "wind " * 400
    prompts = [Prompt("a", "x", (long, "Why?")), Prompt("b", "x", ("Hello.", long)), Prompt("c", "x", ("Hello.",))]
    requests, left_out = bench.make_requests(target, prompts, 12, tmp_path / "answers.jsonl")
    assert [request.id for request in requests] == ["b#1", "c#1"]
    assert left_out == 3


def test_a_repeat_holds_the_target_alone_and_turns(monkeypatch):
    target = ScriptedTarget(8)
    order = []
    sides = {name: side(target, k) for name, k in (("two", 2), ("four", 4))}
    decode = bench._decode

    def noted(target, one, batch, first, how):
        order.append(next((name for name, own in sides.items() if own is one), "alone"))
        return decode(target, one, batch, first, how)

    monkeypatch.setattr(bench, "_decode", noted)
    repeat = json.loads(json.dumps(bench.run_repeat(target, sides, REQUESTS, bench.Decoding(16), turn=1)))
    assert order[3:9] == ["two", "four", "alone", "four", "alone", "two"]  # after the warm-up of each
    assert set(repeat["outputs"]) == {TARGET_ALONE, "two", "four"}
    assert repeat["divergences"] == {"two": [], "four": []}
    assert {name: tau(bench.traces_of([repeat], name)[0]) for name in sides} == {"two": 3, "four": 5}
    assert all(len(rows) == 5 for rows in repeat["outputs"].values())
    assert min(repeat["peak_memory_gb"].values()) > 0


def test_repeats_of_sampled_cells_are_the_same_computation():
    target = ScriptedTarget(8)
    sides = {"two": side(ScriptedTarget(8, seed=3), 2)}
    how = bench.Decoding(12, temperature=1.0, seed=5)
    one, two = (bench.run_repeat(target, sides, REQUESTS, how, turn) for turn in (0, 1))
    assert one["divergences"] == {}
    for name in (TARGET_ALONE, "two"):
        assert [row["tokens"] for row in one["outputs"][name]] == [row["tokens"] for row in two["outputs"][name]]
    other = bench.run_repeat(target, sides, REQUESTS, dataclasses.replace(how, seed=6))
    assert [row["tokens"] for row in other["outputs"]["two"]] != [row["tokens"] for row in one["outputs"]["two"]]


def test_divergences_come_with_their_margin():
    target = ScriptedTarget(8)
    truth = [autoregressive_generate(target, request.input_ids, max_new_tokens=9) for request in REQUESTS[:2]]
    own = [dataclasses.replace(output, tokens=list(output.tokens)) for output in truth]
    own[1].tokens[4] = (own[1].tokens[4] + 1) % 8
    (found,) = bench.find_divergences(target, REQUESTS[:2], own, truth)
    best, second = target.logits(REQUESTS[1].input_ids + truth[1].tokens[:4]).topk(2).values.tolist()
    assert found == {"request": "q1#1", "index": 4, "margin": pytest.approx(best - second)}


COSTS = CostTable([0.0, 0.1, 0.2, 0.3, 0.4], [1.0] * 5, [0.0] * 5, 1.0, "scripted", "float64", machine())


def test_a_cell_has_every_number_of_papers_10():
    target = ScriptedTarget(8)
    sides = {"two": side(target, 2)}
    repeats = [bench.run_repeat(target, sides, REQUESTS, bench.Decoding(16), turn) for turn in range(2)]
    found = json.loads(json.dumps(bench.cell_numbers(repeats, "two", COSTS, "two"), allow_nan=False))
    for name in (
        *("tau", "mean_request_tau", "tau_identity", "conditional_acceptance", "joint_acceptance"),
        *(
            "draft_ms",
            "verify_ms",
            "head_ms",
            "sample_ms",
            "target_ms",
            "live_rows",
            "coverage_draft",
            "coverage_committed",
        ),
        *("out_of_vocabulary", "peak_memory_gb", "tokens", "target_tokens", "speedup", "speedup_low", "speedup_high"),
        *("hindsight_length", "hindsight_distance", "best_fixed_length", "match_rate", "others_cpu_share"),
    ):
        assert name in found, name
    assert found["tau"] == found["tau_identity"] == 3
    assert found["match_rate"] == 1
    alone = bench.cell_numbers(repeats, TARGET_ALONE, None, None)
    assert alone["speedup"] == 1
    assert alone["draft_ms"] is None


def test_cells_are_pooled_request_by_request():
    target = ScriptedTarget(8)
    sides = {"two": side(target, 2)}
    cells = [
        [bench.run_repeat(target, sides, part, bench.Decoding(16)) for _ in range(2)]
        for part in (REQUESTS[:2], REQUESTS[2:])
    ]
    found = bench.cell_numbers(bench.pooled(cells), "two", None, None)
    assert (found["requests"], found["repeats"]) == (5, 2)
    assert found["tokens"] == 5 * 16
    cells[0][1]["provenance"] = [{"date": "2001-01-01"}]
    dates = [one["date"] for one in bench.cell_numbers(bench.pooled(cells), "two", None, None)["provenance"]]
    assert sorted(dates)[0] == "2001-01-01"
    assert len(dates) == 2, "every one that is different, once"


def test_a_line_that_a_killed_run_left_half_written_is_made_again(target, tmp_path):
    prompts, path = [Prompt(name, "mt_bench", ("Hello.", "Why?")) for name in "ab"], tmp_path / "answers.jsonl"
    requests, _ = bench.make_requests(target, prompts, 12, path)
    whole = path.read_text()
    path.write_text(whole[:-5])
    assert bench.make_requests(target, prompts, 12, path) == (requests, 0)
    assert path.read_text() == whole
    path.write_text("[]\n")
    with pytest.raises(UserError, match="is not what this program writes; remove it"):
        bench.make_requests(target, prompts, 12, path)


def test_answers_are_those_to_the_same_text(target, tmp_path):
    """Two files of prompts may use the same ids."""
    path = tmp_path / "answers.jsonl"
    one, two = (Prompt("a", "mt_bench", (text, "Why?")) for text in ("Hello.", "Write of the sea."))
    bench.make_requests(target, [one], 12, path)
    assert bench.make_requests(target, [two], 12, path) == bench.make_requests(target, [two], 12, tmp_path / "b.jsonl")


def test_a_task_named_twice_is_measured_once():
    prompts = [Prompt(name, task, ("Hello.",)) for name, task in (("a", "qa"), ("b", "qa"), ("c", "sums"))]
    chosen = bench.choose_prompts(prompts, ("sums", "qa", "qa"), 1)
    assert [prompt.id for prompt in chosen] == ["c", "a"]


def test_where_nothing_fits_it_says_so(target, tmp_path):
    with pytest.raises(UserError, match="max_new_tokens: got 512, which leaves room for none of 2 turns"):
        bench.make_requests(target, [Prompt("a", "x", ("Hello.", "Why?"))], 512, tmp_path / "answers.jsonl")


def test_costs_are_measured_on_prompts_as_long_as_the_requests():
    """Built-in prompts for short requests; documents for long ones, none of them a request."""
    model = tiny_model()
    model.config.max_position_embeddings = 4000
    target = TargetModel.from_model(model, tiny_tokenizer())
    short = bench.cost_prompts(target, REQUESTS, 3, 24)
    assert len(short) == 3
    requests = [bench.Request(f"q{i}", "x", [5] * length) for i, length in enumerate((40, 3000, 3500))]
    long = bench.cost_prompts(target, requests, 2, 24)
    assert [2000 < len(prompt) <= 3000 for prompt in long] == [True, True]
    assert long[0] not in bench.documents(target, 2, 3000, seed=0)


# --- contenders ---


def drafter_of(target, kind):
    torch.manual_seed(0)
    vocab_map = VocabMap(torch.randperm(target.vocab_size)[:200], target.vocab_size) if kind == "trimmed" else None
    head = HeadConfig(kind, rank=8, init="random")
    return new_drafter(target, DrafterConfig(), head, vocab_map).to(target.dtype).eval().requires_grad_(False)


def write_answers(path, count=6):
    rows = [AnswerRow(f"a{i}", "x", [40, 50, 60 + i, 70, 71, 70, 2], [[3, 7]], [True]) for i in range(count)]
    path.write_text("".join(row.to_json() + "\n" for row in rows))
    return path


def test_every_policy_can_be_had_by_name(target, tmp_path, monkeypatch):
    monkeypatch.setattr(contenders, "measure_costs", lambda *args, **options: (COSTS, [0.5, 0.4]))
    settings = PolicyConfig(
        write_answers(tmp_path / "answers.jsonl"), 50, most=4, evospec=EvoSpecConfig(core=30, tail=10)
    )
    drafters = {"full": drafter_of(target, "full"), "cut": drafter_of(target, "trimmed")}
    made = []
    index = evospec.SemanticIndex
    monkeypatch.setattr(evospec, "SemanticIndex", lambda rows: made.append(1) or index(rows))
    names = (tuple(VOCAB_POLICIES), tuple(LENGTH_POLICIES), ("chain", "eagle2", "sampled"))
    measuring = CostConfig(tmp_path / "costs", [[1, 2, 3]])
    lineup = Lineup(target, drafters, {"full": "1", "cut": "2"}, *names, settings, measuring)
    for temperature in (0.0, 1.0):
        entries = make_entries(lineup, temperature, 3)
        assert len(entries) == 2 * len(VOCAB_POLICIES) * (len(LENGTH_POLICIES) + 2)
        for entry in entries.values():
            assert entry.costs is None, "nobody measured rounds of three requests"
            assert len(entry.side.rows) == 3
            policies = [row.vocab_policy for row in entry.side.rows]
            assert len(set(map(id, policies))) == (3 if policies[0].is_per_request else 1)
            lengths = [row.length_policy for row in entry.side.rows]
            assert len(set(map(id, lengths))) == 3 or entry.side.tree is not None
            assert temperature == 0 or not any(length and length.bias for length in lengths)
        assert entries["full/nanospec/eagle2"].full_head == "full/all/eagle2"
        assert entries["cut/all/sampled"].side.tree == settings.sampled
        assert entries["cut/nanospec/svip"].full_head == "full/all/svip"
        assert entries["full/nanospec/svip"].full_head == "full/all/svip"
        json.dumps([entry.what for entry in entries.values()])
        assert entries["full/nanospec/fixed"].what["vocab"] == {"policy": "nanospec", "capacity": 3072, "kind": "grow"}
        assert entries["full/all/libraspec"].what["length"]["retreats"] == (temperature == 0)
    assert len(made) == 2, "one semantic index for a head, whatever the cells"


@pytest.mark.parametrize(
    ("change", "changed"),
    [("frequency", {"frequency/fixed", "frequency/entropy"}), ("costs", {"all/entropy", "frequency/entropy"})],
)
def test_a_contender_is_named_by_the_files_that_it_decides_by(target, tmp_path, monkeypatch, change, changed):
    """What lies on disk for it is then not taken for that of another file, or of costs that were measured again."""
    costs, path = [COSTS], write_answers(tmp_path / "answers.jsonl")
    monkeypatch.setattr(contenders, "measure_costs", lambda *args, **options: (costs[0], [0.5]))

    def found(folder):
        drafter, measuring = {"a": drafter_of(target, "full")}, CostConfig(tmp_path / folder, [[1, 2]])
        names = (["all", "frequency"], ["fixed", "entropy"], ["chain"])
        return make_entries(
            Lineup(target, drafter, {"a": "1"}, *names, PolicyConfig(path, 50, most=4), measuring), 0.0, 1
        )

    before, again = found("one"), found("two")
    assert [entry.what for entry in before.values()] == [entry.what for entry in again.values()]
    if change == "frequency":
        write_answers(path, count=7)
    else:
        costs[0] = dataclasses.replace(COSTS, alone=2.0)
    after = found("three")
    assert {name for name in before if before[name].what != after[name].what} == {f"a/{name}" for name in changed}


def test_the_target_that_drafts_for_itself_is_a_contender(tmp_path, monkeypatch):
    """Chains of one request; no trained drafter is compared with its head, but its own live vocabularies are."""
    monkeypatch.setattr(contenders, "measure_costs", lambda *args, **options: (COSTS, [0.5]))
    target = tiny_target()
    settings = PolicyConfig(most=4, sparse=SparseSelfConfig(budget=0.2, recent=8, longest=4))
    places = (Path(contenders.SPARSE_SELF),)
    drafters, hashes = contenders.load_drafters(places, target, settings, ("own",))
    names = (("all", "nanospec"), tuple(LENGTH_POLICIES), ("chain", "eagle2"))
    both = {**drafters, "low": drafter_of(target, "lowrank")}
    options = (*names, settings, CostConfig(tmp_path / "costs", [[1, 2, 3]]))
    entries = make_entries(Lineup(target, both, {**hashes, "low": "1"}, *options), 0.0, 1)
    own = {name: entry for name, entry in entries.items() if name.startswith("sparse_self/")}
    assert [name for name, entry in entries.items() if entry.costs is None] == ["low/all/eagle2", "low/nanospec/eagle2"]
    assert set(own) == {f"sparse_self/{vocab}/{length}" for vocab in names[0] for length in LENGTH_POLICIES}
    assert own["sparse_self/nanospec/svip"].full_head == "sparse_self/all/svip"
    assert entries["low/all/fixed"].full_head is None
    what = own["sparse_self/all/fixed"].what
    assert (what["hash"], what["head"], what["sparse"]["budget"]) == (target.hash, "full", 0.2)
    assert make_entries(Lineup(target, drafters, hashes, *options), 0.0, 2) == {}


def test_costs_that_nobody_reads_are_not_measured(target, tmp_path, monkeypatch):
    """Trees, and batches with a fixed length: neither a policy nor the hindsight takes a table."""
    monkeypatch.setattr(contenders, "measure_costs", lambda *args, **options: pytest.fail("measured"))
    drafters, rest = {"a": drafter_of(target, "full")}, (PolicyConfig(most=4), CostConfig(tmp_path, [[1, 2, 3]]))
    trees = make_entries(Lineup(target, drafters, {"a": "1"}, ["all"], ["entropy"], ["eagle2"], *rest), 0.0, 1)
    chains = make_entries(Lineup(target, drafters, {"a": "1"}, ["all"], ["fixed", "svip"], ["chain"], *rest), 0.0, 4)
    assert list(trees) == ["a/all/eagle2"]
    assert list(chains) == ["a/all/fixed", "a/all/svip"]


@pytest.mark.parametrize("length", ["fixed", "entropy"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_numbers_of_the_target_that_drafts_for_itself(tmp_path, length, temperature):
    """On all positions every draft is accepted, so that tau, hindsight and match rate are known."""
    target = tiny_target(dtype=torch.float64)
    target.eos_token_ids = ()
    settings = PolicyConfig(drafted=3, most=4, sparse=SparseSelfConfig(budget=1.0, longest=4))
    places = (Path(contenders.SPARSE_SELF),)
    measuring = CostConfig(tmp_path / "costs", [list(range(40, 60)), list(range(50, 80))], 120)
    drafters, hashes = contenders.load_drafters(places, target, settings, ("own",))
    lineup = Lineup(target, drafters, hashes, ["all"], [length], ["chain"], settings, measuring)
    entries = make_entries(lineup, temperature, 1)
    ((name, entry),) = entries.items()
    assert len(entry.costs.draft) == 5
    assert entry.costs.draft[4] > entry.costs.draft[1] > 0
    requests = [bench.Request(f"q{i}", "task", list(range(40, 60 + i))) for i in range(3)]
    how = bench.Decoding(33, temperature)
    repeats = [bench.run_repeat(target, {name: entry.side}, requests, how, turn) for turn in range(2)]
    found = bench.cell_numbers(repeats, name, COSTS, entry.full_head)
    assert found["tau"] == pytest.approx(found["tau_identity"])
    assert found["coverage_draft"] == found["hindsight_lower_bounds"] == found["nu"] == found["rho_tau"] == 1
    assert found.get("match_rate") == (1 if temperature == 0 else None)
    if length == "fixed":
        assert found["tau"] == 4  # 32 tokens after the first in 8 rounds
        assert (found["hindsight_length"], found["hindsight_distance"], found["best_fixed_length"]) == (3, 0, 3)
    assert found["head_ms"] > 0


def test_costs_are_measured_once_for_a_contender(target, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(contenders, "measure_costs", lambda *a, **o: measured.append(o) or (COSTS, [0.5]))
    lineup = Lineup(target, {}, {}, (), (), (), PolicyConfig(most=4), CostConfig(tmp_path, [[1, 2, 3]]))
    side = Contender(drafter_of(target, "full"))
    for what in ({"drafter": "a"}, {"drafter": "a"}, {"drafter": "b"}):
        costs, acceptance = contenders.costs_of(lineup, side, what, 0.0)
        assert (costs, acceptance) == (COSTS, [0.5])
    assert len(measured) == 2
    contenders.costs_of(lineup, side, {"drafter": "a"}, 1.0)
    assert [options["temperature"] for options in measured] == [0.0, 0.0, 1.0]
    lineup.target = copy.copy(target)
    lineup.target.device = torch.device("meta")
    contenders.costs_of(lineup, side, {"drafter": "a"}, 1.0)
    assert len(measured) == 4


def of_one(target, tmp_path, vocab="all", length="fixed", tree="chain", settings=None):
    """A drafter with a low-rank head, and one policy of each kind."""
    names, measuring = ([vocab], [length], [tree]), CostConfig(tmp_path, [[1, 2, 3]])
    drafter = {"low": drafter_of(target, "lowrank")}
    return Lineup(target, drafter, {"low": "1"}, *names, settings or PolicyConfig(), measuring)


def test_without_a_full_head_nothing_is_compared_with_one(target, tmp_path, monkeypatch):
    monkeypatch.setattr(contenders, "measure_costs", lambda *args, **options: (COSTS, [0.5]))
    entries = make_entries(of_one(target, tmp_path), 0.0, 1)
    assert [entry.full_head for entry in entries.values()] == [None]


def test_the_frequency_order_starts_with_what_must_never_be_missing(target, tmp_path):
    """Fault 16."""
    needed = required_ids(target.tokenizer, target.eos_token_ids)
    frequency = contenders.read_frequency(write_answers(tmp_path / "answers.jsonl"), target, core=8)
    assert frequency.ids[: len(needed)] == needed
    assert sorted(frequency.ids) == list(range(target.vocab_size))
    rest = [token for token in (70, 71) if token not in needed]
    assert frequency.ids[len(needed) : len(needed) + len(rest)] == rest
    vocab = VocabMap(torch.tensor([5, 3, 9]), target.vocab_size)
    vocab.save(tmp_path / "vocab.safetensors")
    (tmp_path / "frequent_tokens.json").write_text("[5, 3, 9]")
    for name in ("vocab.safetensors", "frequent_tokens.json"):
        ids = contenders.read_frequency(tmp_path / name, target, core=1).ids
        assert ids == [*needed, *(token for token in (5, 3, 9) if token not in needed)]


def test_answers_that_are_measured_on_are_not_counted(target, tmp_path):
    needed = required_ids(target.tokenizer, target.eos_token_ids)
    counted, left_out = [token for token in range(target.vocab_size) if token not in needed][-2:]
    held_out = split_held_out(builtin_prompts())[1][0].id
    rows = [
        AnswerRow(name, "x", [40, 50, 60, *[token] * 3, 2], [[3, 7]], [True])
        for name, token in ((held_out, left_out), ("a", counted))
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(row.to_json() + "\n" for row in rows))
    ids = contenders.read_frequency(path, target, core=8).ids
    assert ids[len(needed)] == counted
    assert ids[-1] == left_out  # as if it had not been said
    path.write_text(rows[0].to_json() + "\n")
    with pytest.raises(UserError, match="answers to held-out prompts alone"):
        contenders.read_frequency(path, target, core=8)


@pytest.mark.parametrize(
    ("vocab", "length", "tree", "message"),
    [
        ("all", "fixed", "some", "trees: got 'some', allowed: chain, eagle2, sampled"),
        ("some", "fixed", "chain", "vocab: got 'some', allowed: all, frequency, nanospec, evospec"),
        ("all", "some", "chain", "length: got 'some', allowed: fixed"),
        ("frequency", "fixed", "chain", "policies.frequency: got none, needed by"),
    ],
)
def test_bad_names_get_one_clear_line(target, tmp_path, monkeypatch, vocab, length, tree, message):
    monkeypatch.setattr(contenders, "measure_costs", lambda *args, **options: (COSTS, [0.5]))
    with pytest.raises(UserError, match=message):
        make_entries(of_one(target, tmp_path, vocab, length, tree), 0.0, 1)


def test_drafts_longer_than_those_measured_are_refused_before_anything_runs(target, tmp_path):
    with pytest.raises(UserError, match=r"policies.drafted, policies.most: got 9 and 8"):
        make_entries(of_one(target, tmp_path, settings=PolicyConfig(drafted=9)), 0.0, 1)


@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize("tree", [None, Eagle2Tree(6, 2, 2)])
def test_a_batch_gives_what_its_requests_give_alone(target, batch, tree):
    """Ragged prompts, the last batch smaller; every row has its own live set. Times of a batch are shared out."""
    requests = [bench.Request(f"q{i}", "task", list(range(40, 44 + i))) for i in range(5)]
    drafter = drafter_of(target, "full")
    repeats = {}
    for size in (1, batch):
        rows = [
            Contender(drafter, None if tree else Fixed(2), NanoSpec(drafter.lm_head, 40, "ring")) for _ in range(size)
        ]
        repeats[size] = bench.run_repeat(
            target, {"a": bench.Side(rows, tree)}, requests, bench.Decoding(10, batch=size)
        )
    assert repeats[1]["outputs"]["a"] != repeats[batch]["outputs"]["a"]  # times differ
    for name in ("a", TARGET_ALONE):
        own, together = ([row["tokens"] for row in repeats[size]["outputs"][name]] for size in (1, batch))
        assert own == together
        assert len(own) == 5
    found = bench.cell_numbers([repeats[batch]], "a", None, None)
    assert found["hindsight_length"] is found["best_fixed_length"] is None
    assert found["tau"] == pytest.approx(found["tau_identity"])
