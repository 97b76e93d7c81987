"""Who takes part in a benchmark: drafters x vocabulary policies x length policies, or trees, by name and settings, with the cost table that
cost-aware policies and the hindsight need. The target that drafts for itself (sparse_self.py) is a drafter among others.

It knows nothing of prompts other than those that costs are measured on.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from specdraft.config import UserError, require_positive
from specdraft.data.chat import read_answers
from specdraft.data.tasks import builtin_prompts, split_held_out
from specdraft.data.vocab import VocabMap, count_tokens, required_ids
from specdraft.decoding.bench import Side
from specdraft.decoding.costs import CostTable
from specdraft.decoding.evospec import EvoSpecConfig, EvoSpecVocabulary, Pairs, count_pairs
from specdraft.decoding.length_policies import LENGTH_POLICIES
from specdraft.decoding.length_policy import LengthPolicy
from specdraft.decoding.libraspec import balance_from_costs
from specdraft.decoding.measure import Contender, measure_costs
from specdraft.decoding.vocab_policies import VOCAB_POLICIES, AllTokens, FrequencyList, NanoSpec, VocabPolicy
from specdraft.models.checkpoint import load_drafter, read_frequent, read_taps
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.heads import Head, HeadDtype
from specdraft.models.sparse_self import SparseSelfConfig, SparseSelfDrafter
from specdraft.models.target import TargetModel
from specdraft.models.tree import Eagle2Tree, SampledTree
from specdraft.provenance import hash_file, hash_json, machine, read_json, write_json

NEEDS_FREQUENCY = ("frequency", "evospec")
NEEDS_COSTS = ("entropy", "expected_speedup", "libraspec")
CHAIN, EAGLE2, SAMPLED = "chain", "eagle2", "sampled"
SPARSE_SELF = "sparse_self"  # where drafters are named: the target that drafts for itself

BenchDrafter = Eagle3Drafter | SparseSelfDrafter


@dataclass
class PolicyConfig:
    """frequency: answers (JSONL; those to held-out built-in prompts do not count), a vocabulary map (safetensors) or a drafter's
    frequent_tokens.json, which give the order of frequency.   frequency_size: rows of the
    frequency list.   nanospec_capacity, nanospec_kind: see NanoSpec.   evospec: see EvoSpecConfig.   drafted: of `fixed`, and where
    `heuristic` starts.   most: tokens a round at most, also the longest draft whose costs are measured.   libraspec_block;
    libraspec_a: None = from the measured costs.   eagle2, sampled: see Eagle2Tree, SampledTree.   sparse: of the target that drafts for
    itself; its `longest` must hold `most`."""

    frequency: Path | None = None
    frequency_size: int = 8192
    nanospec_capacity: int = 3072
    nanospec_kind: Literal["grow", "ring"] = "grow"
    evospec: EvoSpecConfig = field(default_factory=EvoSpecConfig)
    drafted: int = 4
    most: int = 8
    libraspec_block: int = 4
    libraspec_a: float | None = None
    eagle2: Eagle2Tree = field(default_factory=Eagle2Tree)
    sampled: SampledTree = field(default_factory=SampledTree)
    sparse: SparseSelfConfig = field(default_factory=SparseSelfConfig)


@dataclass(frozen=True)
class Frequency:
    """ids: all target ids that a list may hold, the required ones first, then by falling count.   pairs: see EvoSpecVocabulary."""

    ids: list[int]
    pairs: Pairs | None


def read_frequency(path: Path, target: TargetModel, core: int) -> Frequency:
    """Answers to held-out built-in prompts are not counted: they are what is measured on.

    Raises:
        UserError: a file of another tokenizer, or of another kind; no answers but those.
    """
    needed = required_ids(target.tokenizer, target.eos_token_ids, target.vocab_size)
    if path.suffix in (".safetensors", ".json"):
        vocab = VocabMap.load(path) if path.suffix == ".safetensors" else read_frequent(path, target.vocab_size)
        if vocab.vocab_size != target.vocab_size:
            raise UserError(
                f"policies.frequency {path}: made for {vocab.vocab_size} tokens, the target has {target.vocab_size}; build it again"
            )
        return Frequency(list(dict.fromkeys([*needed, *vocab.target_ids.tolist()])), None)
    held_out = {prompt.id for prompt in split_held_out(builtin_prompts())[1]}
    rows = [row for row in read_answers(path) if row.id not in held_out]
    if not rows:
        raise UserError(
            f"policies.frequency {path}: got answers to held-out prompts alone; give answers to others, too"
        )
    counts = count_tokens((row.example() for row in rows), target.vocab_size)
    order = VocabMap.from_counts(counts, target.vocab_size).target_ids.tolist()
    ids = list(dict.fromkeys([*needed, *order]))
    return Frequency(ids, count_pairs((row.input_ids for row in rows), target.vocab_size, ids[core:]))


def vocab_policy(
    name: str,
    head: Head,
    target: TargetModel,
    config: PolicyConfig,
    frequency: Frequency | None,
    like: VocabPolicy | None = None,
) -> VocabPolicy:
    """The policy of that name.   like: one of the same name and settings for another row of a batch: what can be shared is."""
    if like is not None and not like.is_per_request:
        return like
    if name == "all":
        return AllTokens(head)
    if name == "nanospec":
        return NanoSpec(head, **vocab_settings(name, config))
    assert frequency is not None
    if name == "frequency":
        return FrequencyList(head, frequency.ids, **vocab_settings(name, config))
    return EvoSpecVocabulary(
        head,
        frequency.ids,
        target.head_weight,
        target.norm,
        config.evospec,
        frequency.pairs,
        None if like is None else like.semantic,
    )


def vocab_settings(name: str, config: PolicyConfig) -> dict[str, Any]:
    """Of the policy of that name."""
    settings = {
        "nanospec": {"capacity": config.nanospec_capacity, "kind": config.nanospec_kind},
        "frequency": {"size": config.frequency_size},
        "evospec": asdict(config.evospec),
    }
    return settings.get(name, {})


def length_policy(
    name: str, config: PolicyConfig, costs: CostTable | None, acceptance: Sequence[float], temperature: float
) -> tuple[LengthPolicy, dict[str, Any]]:
    """The policy of that name, and its settings.   costs: None for a policy that is not in NEEDS_COSTS."""
    most = {"most": config.most}
    if name in ("entropy", "expected_speedup"):
        given = {"costs": costs} | ({} if name == "entropy" else {"acceptance": acceptance})
        decided_by = hash_json([asdict(costs), list(acceptance)])  # other costs are other decisions
        return LENGTH_POLICIES[name](**given), {**most, "costs": decided_by}
    if name == "libraspec":
        a = balance_from_costs(costs, config.libraspec_block) if config.libraspec_a is None else config.libraspec_a
        settings = {"a": a, "block": config.libraspec_block, **most, "retreats": temperature == 0}
    else:
        settings = {"fixed": {"tokens": config.drafted}, "heuristic": {"start": config.drafted, **most}}.get(name, most)
    return LENGTH_POLICIES[name](**settings), settings


@dataclass
class Entry:
    """One contender: how to run it, what it is (for the results), what its rounds cost by length (None for trees and in batches, whose
    rounds were not measured so), and the name of the one with the full head that its head is compared with; None = there is none."""

    side: Side
    what: dict[str, Any]
    costs: CostTable | None
    full_head: str | None = None


@dataclass
class CostConfig:
    """Where cost tables lie, and what they are measured on.   prompts: token ids.   max_new_tokens: of each."""

    folder: Path
    prompts: list[list[int]]
    max_new_tokens: int = 64
    seed: int = 0


@dataclass
class Lineup:
    """Everyone who takes part: every drafter with every vocabulary policy, chains of these with every length policy, and trees.
    hashes: of the drafters' weights.   vocab, length, trees: names.   known: vocabulary policies of each drafter, by row: cells run one
    by one, so that all of them can use the same ones."""

    target: TargetModel
    drafters: dict[str, BenchDrafter]
    hashes: dict[str, str]
    vocab: Sequence[str]
    length: Sequence[str]
    trees: Sequence[str]
    settings: PolicyConfig
    measuring: CostConfig
    known: dict[tuple[str, str], list[VocabPolicy]] = field(default_factory=dict)

    @functools.cached_property
    def frequency(self) -> Frequency:
        """Of the file that the policies in NEEDS_FREQUENCY read; once for all cells."""
        return read_frequency(self.settings.frequency, self.target, self.settings.evospec.core)


def make_entries(lineup: Lineup, temperature: float, batch: int) -> dict[str, Entry]:
    """Every contender at one temperature and batch size: chains named drafter/vocabulary/length, trees drafter/vocabulary/shape
    (as deep as they are set). Costs are those of a batch of one. The target that drafts for itself takes part with chains at a batch of
    one, and is not in the others.

    Raises:
        UserError: an unknown policy or tree, sizes that do not fit a head, no frequency list where one is needed, a draft longer
            than those that are measured.
    """
    drafters, settings = lineup.drafters, lineup.settings
    check_names(settings, lineup.vocab, lineup.length, lineup.trees)
    entries: dict[str, Entry] = {}
    for (place, drafter), name in itertools.product(drafters.items(), lineup.vocab):
        is_trained, trees = isinstance(drafter, Eagle3Drafter), lineup.trees
        shapes = trees if is_trained else [CHAIN] if CHAIN in trees and batch == 1 else []
        if not shapes:
            continue
        rows = vocab_policies(lineup, place, name, batch)
        vocabulary = {"policy": name, **vocab_settings(name, settings)}
        if name in NEEDS_FREQUENCY:
            vocabulary["frequency"] = hash_file(settings.frequency)
        what = {"drafter": place, "hash": lineup.hashes[place], **_made_of(drafter), "vocab": vocabulary}
        costs, acceptance = None, []
        if CHAIN in shapes and (batch == 1 or set(NEEDS_COSTS) & set(lineup.length)):
            costs, acceptance = costs_of(lineup, Contender(drafter, None, rows[0]), what, temperature)
        for stop in lineup.length if CHAIN in shapes else ():
            made = [length_policy(stop, settings, costs, acceptance, temperature) for _ in rows]
            side = Side([Contender(drafter, lengths, own) for (lengths, _), own in zip(made, rows, strict=True)])
            whole = {**what, "length": {"policy": stop, **made[0][1]}}
            own_costs = costs if batch == 1 else None
            entries[f"{place}/{name}/{stop}"] = Entry(side, whole, own_costs, _full_head(drafters, place, stop))
        for shape in (shape for shape in shapes if shape != CHAIN):
            tree = {EAGLE2: settings.eagle2, SAMPLED: settings.sampled}[shape]
            side = Side([Contender(drafter, None, own) for own in rows], tree)
            whole = {**what, "tree": {"shape": shape, **asdict(tree)}}
            entries[f"{place}/{name}/{shape}"] = Entry(side, whole, None, _full_head(drafters, place, shape))
    for entry in entries.values():
        entry.full_head = entry.full_head if entry.full_head in entries else None
    return entries


def vocab_policies(lineup: Lineup, place: str, name: str, batch: int) -> list[VocabPolicy]:
    """One for each row; those that are made are known from then on."""
    policies = lineup.known.setdefault((place, name), [])
    while len(policies) < batch:
        like, head = (policies[0] if policies else None), lineup.drafters[place].lm_head
        frequency = lineup.frequency if name in NEEDS_FREQUENCY else None
        policies.append(vocab_policy(name, head, lineup.target, lineup.settings, frequency, like))
    return policies[:batch]


def check_names(settings: PolicyConfig, vocab: Sequence[str], length: Sequence[str], trees: Sequence[str]) -> None:
    """Raises UserError for an unknown policy or tree, for a draft longer than those that are measured, and for sizes and files that
    cannot be: all that can be said before a target is there."""
    if not 0 <= settings.drafted <= settings.most or settings.most < 1:
        raise UserError(
            f"policies.drafted, policies.most: got {settings.drafted} and {settings.most}, allowed: drafted from 0 to most, the "
            "longest draft whose costs are measured"
        )
    for what, names, allowed in (
        ("vocab", vocab, VOCAB_POLICIES),
        ("length", length, LENGTH_POLICIES),
        ("trees", trees, (CHAIN, EAGLE2, SAMPLED)),
    ):
        if unknown := [name for name in names if name not in allowed]:
            raise UserError(f"{what}: got {unknown[0]!r}, allowed: {', '.join(allowed)}")
    sizes = ("frequency_size", "nanospec_capacity", "libraspec_block")
    require_positive({f"policies.{name}": getattr(settings, name) for name in sizes})
    if settings.libraspec_a is not None and not 0 <= settings.libraspec_a < math.inf:
        raise UserError(f"policies.libraspec_a: got {settings.libraspec_a}, allowed: 0 or more, or none")
    if set(vocab) & set(NEEDS_FREQUENCY) and not (settings.frequency and settings.frequency.is_file()):
        raise UserError(
            f"policies.frequency: got {settings.frequency or 'none'}, needed by the policies frequency and evospec; give one "
            "file of answers, such as runs/answers/<target>-<key>/part-00000.jsonl, a vocab.safetensors or a frequent_tokens.json"
        )


def check_drafters(
    places: Sequence[Path], settings: PolicyConfig, trees: Sequence[str], batches: Sequence[int]
) -> None:
    """Raises UserError for a folder that is no checkpoint, for two that read other layers of the target, and where the target that
    drafts for itself could take no part, or not draft what is measured."""
    taps_of(places)
    for place in places:
        if str(place) != SPARSE_SELF:
            continue
        if CHAIN not in trees or 1 not in batches:
            raise UserError(
                f"drafters: {SPARSE_SELF} drafts chains for one request at a time, got trees {', '.join(trees)} and batches "
                f"{', '.join(map(str, batches))}, allowed: {CHAIN} and 1 among them"
            )
        if settings.sparse.longest < settings.most:
            raise UserError(
                f"policies.sparse.longest: got {settings.sparse.longest}, allowed: {settings.most} or more: policies.most, the longest "
                "draft whose costs are measured"
            )


def taps_of(places: Sequence[Path]) -> tuple[int, ...] | None:
    """The target's layers that all checkpoint folders among `places` read; None = there are no folders. Raises UserError where two
    read different ones: a target gives the same to all."""
    taps = {place: read_taps(place) for place in places if str(place) != SPARSE_SELF}
    first = next(iter(taps), None)
    for place, own in taps.items():
        if own != taps[first]:
            raise UserError(
                f"drafters: {place} reads the target's layers {own}, allowed: {taps[first]}, those of {first}; run it by itself"
            )
    return None if first is None else taps[first]


def load_drafters(
    places: Sequence[Path], target: TargetModel, settings: PolicyConfig, head_dtypes: Sequence[HeadDtype]
) -> tuple[dict[str, BenchDrafter], dict[str, str]]:
    """By place, and dtype of the head's rows if it is not their own: the drafters, and the hashes of their weights."""
    drafters, hashes = {}, {}
    for place in places:
        if str(place) == SPARSE_SELF:
            drafters[SPARSE_SELF], hashes[SPARSE_SELF] = SparseSelfDrafter(target, settings.sparse), target.hash
            continue
        for dtype in head_dtypes:
            name = f"{place}{'' if dtype == 'own' else f' {dtype}'}"
            drafters[name] = load_drafter(place, target, head_dtype=dtype)
            hashes[name] = hash_file(place / "model.safetensors")
    return drafters, hashes


def costs_of(
    lineup: Lineup, contender: Contender, what: dict[str, Any], temperature: float
) -> tuple[CostTable, list[float]]:
    """T_draft(k) and T_verify(k+1), and the acceptance that was seen: from disk if they were measured before (same contender,
    target, dtype, device, machine, threads), or measured now."""
    target, measuring, most = lineup.target, lineup.measuring, lineup.settings.most
    identity = [what, target.hash, target.precision, str(target.device), machine(), temperature, most]
    identity += [measuring.prompts, measuring.max_new_tokens, measuring.seed]
    folder = measuring.folder / hash_json(identity)
    if not (folder / "acceptance.json").exists():
        costs, acceptance = measure_costs(
            target,
            contender.drafter,
            measuring.prompts,
            max_length=most,
            max_new_tokens=measuring.max_new_tokens,
            vocab_policy=contender.vocab_policy,
            temperature=temperature,
            seed=measuring.seed,
        )
        costs.save(folder / "costs.json")
        write_json(folder / "acceptance.json", acceptance)
    advice = "remove the folder, and it is measured again"
    return CostTable.load(folder / "costs.json"), read_json(folder / "acceptance.json", "acceptance", advice)


def _made_of(drafter: BenchDrafter) -> dict[str, Any]:
    """Its head, and the settings that are not in its weights."""
    if isinstance(drafter, SparseSelfDrafter):
        return {"head": "full", "head_dtype": "own", "sparse": asdict(drafter.config)}
    return {"head": drafter.config.head.kind, "head_dtype": drafter.head_dtype}


def _full_head(drafters: dict[str, BenchDrafter], place: str, length: str) -> str | None:
    """A drafter with a full head is compared with itself over all rows, and so is the target that drafts for itself; others,
    and those in INT8, with the first trained one that has a full head."""
    trained = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, Eagle3Drafter)}
    full = [
        name for name, drafter in trained.items() if drafter.config.head.kind == "full" and drafter.head_dtype == "own"
    ]
    if place in full or place not in trained:
        return f"{place}/all/{length}"
    return f"{full[0]}/all/{length}" if full else None
