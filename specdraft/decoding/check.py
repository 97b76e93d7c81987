"""Whether a pair decodes losslessly at T = 0, under every policy: the sides to run, and what was seen of them.

It knows nothing of files. What a length policy needs of costs is made up here: a length must not change an output, whatever it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdraft.decoding.bench import Request, Side, find_divergences
from specdraft.decoding.contenders import EAGLE2, SAMPLED, Frequency, PolicyConfig, length_policy, vocab_policy
from specdraft.decoding.costs import CostTable
from specdraft.decoding.evospec import EvoSpecConfig
from specdraft.decoding.generate import autoregressive_generate, speculative_generate
from specdraft.decoding.length_policies import LENGTH_POLICIES
from specdraft.decoding.measure import Contender
from specdraft.decoding.trace import acceptance_counts, tau
from specdraft.decoding.vocab_policies import VOCAB_POLICIES
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.target import TargetModel
from specdraft.models.tree import Eagle2Tree, SampledTree

ACCEPTANCE = 0.6  # conditional, made up


@dataclass
class GreedyCheck:
    """One side.   match_rate: share of prompts whose output equals the target's own.   divergences: see bench.find_divergences.
    accepted, tried: first drafted tokens.   is_plain: all rows, a fixed length."""

    prompts: int
    match_rate: float
    divergences: list[dict[str, Any]]
    tau: float
    accepted: int
    tried: int
    is_plain: bool


def policies_to_check(
    target: TargetModel, drafter: Eagle3Drafter, drafted: int, every_pair: bool, with_evospec: bool
) -> dict[str, Side]:
    """Sides named vocabulary/length or vocabulary/tree, the plain one (all rows, `drafted` tokens) first: every policy of one
    kind with the plain one of the other, or every pair; trees with every vocabulary. Frequency lists are in the order of ids,
    sized so that they fit the head."""
    rows = len(drafter.lm_head.weight)
    core, tail = max(1, min(8192, rows // 4)), max(1, min(1024, rows // 8))
    settings = PolicyConfig(
        frequency_size=core,
        nanospec_kind="ring",
        evospec=EvoSpecConfig(core=core, tail=tail),
        drafted=drafted,
        most=drafted,
        libraspec_block=2,
    )
    lengths = range(drafted + 1)
    costs = CostTable(
        [0.1 * k for k in lengths], [1.0 + 0.02 * k for k in lengths], [0.0] * (drafted + 1), 1.0, "", "", {}
    )
    vocabularies = [name for name in VOCAB_POLICIES if name != "evospec" or with_evospec]
    frequency = Frequency(list(range(target.vocab_size)), None)
    made = {name: vocab_policy(name, drafter.lm_head, target, settings, frequency) for name in vocabularies}
    sides = {}
    for vocab in vocabularies:
        for length in LENGTH_POLICIES:
            if every_pair or vocab == "all" or length == "fixed":
                policy, _ = length_policy(length, settings, costs, [ACCEPTANCE] * drafted, temperature=0.0)
                sides[f"{vocab}/{length}"] = Side([Contender(drafter, policy, made[vocab])])
        for shape, tree in ((EAGLE2, Eagle2Tree(24, drafted, 4)), (SAMPLED, SampledTree(24, drafted, 4))):
            sides[f"{vocab}/{shape}"] = Side([Contender(drafter, None, made[vocab])], tree)
    return sides


def check_greedy(
    target: TargetModel, sides: dict[str, Side], requests: Sequence[Request], max_new_tokens: int
) -> dict[str, GreedyCheck]:
    """Every side on every request, against the target alone."""
    alone = [autoregressive_generate(target, request.input_ids, max_new_tokens=max_new_tokens) for request in requests]
    found = {}
    for number, (name, side) in enumerate(sides.items()):
        own = [
            speculative_generate(
                target,
                side.rows[0].drafter,
                request.input_ids,
                max_new_tokens=max_new_tokens,
                tree=side.tree,
                length_policy=side.rows[0].length_policy,
                vocab_policy=side.rows[0].vocab_policy,
            )
            for request in requests
        ]
        traces = [output.trace for output in own]
        divergences = find_divergences(target, requests, own, alone)
        accepted, tried = next(iter(acceptance_counts(traces)), (0, 0))
        match_rate = 1 - len(divergences) / len(requests)
        found[name] = GreedyCheck(len(requests), match_rate, divergences, tau(traces), accepted, tried, number == 0)
    return found
