"""The decode loop: one prefill, then rounds of draft, one target forward, verify, and dropping what was rejected.

The target alone is the same loop without a drafter, so that both sides of a comparison share cache, sampling and
counting; a chain is a tree, and one text a batch of one. It knows nothing of how drafters draft or targets compute.

Letters: B rows, T prompt tokens, N drafted tokens, n = 1 + N tokens of a pass, V vocabulary, A taps, H width, a accepted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdraft.config import UserError
from specdraft.decoding.ending import Ending
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.length_policy import DraftLaw, LengthPolicy
from specdraft.decoding.live_rows import Verified
from specdraft.decoding.sampling import Sampling, draw, greedy
from specdraft.decoding.trace import DecodeTrace, Round
from specdraft.decoding.verify import Verdict, spread, verify, verify_greedy
from specdraft.decoding.vocab_policies import AllTokens, VocabPolicy
from specdraft.models.drafter import Ask, BatchDrafter, Drafter, Drawn, LiveRows, OneRow, Proposal, nothing
from specdraft.models.observer import Begun, Observed, Observer
from specdraft.models.target import Step, TargetModel
from specdraft.models.tree import Chain, Shape, depths, is_chain, place_trees


@dataclass
class GenerateOutput:
    """tokens: the new tokens, an end-of-sequence token included.   reason: why they end: `eos`, `stop` (a stop string
    or id), `length` (max_new_tokens) or `context` (the target's last position)."""

    tokens: list[int]
    reason: str
    trace: DecodeTrace


def speculative_generate(
    target: TargetModel,
    drafter: Drafter | BatchDrafter | None,
    input_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    tree: Shape | None = None,
    vocab_policy: VocabPolicy | None = None,
    length_policy: LengthPolicy | None = None,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
    synchronize: bool = False,
    observer: Observer | None = None,
) -> GenerateOutput:
    """Decode with a drafter. The output law is the target's own (papers 9): at T = 0 its greedy tokens, up to rounding.

    Args:
        drafter: None = the target alone.
        input_ids: the prompt, [T] or [1, T] token ids.
        max_new_tokens: never exceeded; neither is the target's context.
        temperature, top_k, top_p: see Sampling; one processor for drafted, verified and bonus tokens.
        tree: how a draft branches (models/tree.py); None = a chain.
        vocab_policy: live rows of the draft head; default all.
        length_policy: how deep to draft: tokens of a chain (default 4), levels of a tree (default its own depth, which it
            never passes). What a policy makes of single tokens is asked for chains only.
        stop: strings; the output ends with the token that completes one.   stop_ids: end it as the target's EOS ids do.
        generator: the only source of randomness; None = torch's global one.
        synchronize: wait for the device at every clock reading: right parts of the trace on a GPU, and a slower run.
        observer: is told of every round, and may change the drafter's weights between two; needs a drafter. Its time is part of the
            trace's `seconds`, and of no round's.

    Raises:
        UserError: an empty prompt, one longer than the context, ids outside the vocabulary; values outside their
            ranges; a length policy that would bias sampling at T > 0; a tree for a drafter that drafts chains only.
    """
    (output,) = speculative_generate_batch(
        target,
        drafter,
        [input_ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        tree=tree,
        vocab_policies=None if vocab_policy is None else [vocab_policy],
        length_policies=None if length_policy is None else [length_policy],
        stop=stop,
        stop_ids=stop_ids,
        generators=None if generator is None else [generator],
        synchronize=synchronize,
        observer=observer,
    )
    return output


def speculative_generate_batch(
    target: TargetModel,
    drafter: Drafter | BatchDrafter | None,
    prompts: Sequence[Sequence[int] | Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    tree: Shape | None = None,
    vocab_policies: Sequence[VocabPolicy] | None = None,
    length_policies: Sequence[LengthPolicy] | None = None,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    generators: Sequence[torch.Generator] | None = None,
    synchronize: bool = False,
    observer: Observer | None = None,
) -> list[GenerateOutput]:
    """Decode several prompts together: B outputs, each what `speculative_generate` would give its prompt alone, up to
    rounding. Rows differ in length and in what is accepted; those that have ended leave the batch.

    Args, as for `speculative_generate`, but for:
        vocab_policies, length_policies, generators: one for every prompt. A policy that learns from its request cannot
            serve two rows; two rows with one generator do not draw what each would draw alone.

    Raises:
        UserError: as for `speculative_generate`; no prompts; policies or generators that are not as many as the prompts, or
            shared where they must not be; several prompts for a drafter that serves one.
    """
    sampling, shape, count = Sampling(temperature, top_k, top_p), Chain() if tree is None else tree, len(prompts)
    if not prompts:
        raise UserError("prompts: got none, at least one is needed")
    lengths = length_policies or [Fixed(shape.depth) for _ in prompts]
    vocabs = vocab_policies or [AllTokens()] * count
    generators = generators or [None] * count
    _check_rows("length_policies", lengths, count, lengths)
    _check_rows("vocab_policies", vocabs, count, [policy for policy in vocabs if policy.is_per_request])
    _check_rows("generators", generators, count, [])
    rows = []
    for number, (input_ids, length, vocab, generator) in enumerate(
        zip(prompts, lengths, vocabs, generators, strict=True)
    ):
        _check_bias(length, sampling)
        prompt = check_prompt(input_ids, target)
        ending = Ending(target, len(prompt), max_new_tokens, stop, stop_ids)
        rows.append(Row(prompt, ending, sampling, isinstance(shape, Chain), length, vocab, generator, number))
    batch_drafter = drafter if drafter is None or isinstance(drafter, BatchDrafter) else OneRow(drafter)
    if count > 1 and isinstance(batch_drafter, OneRow):
        name = type(drafter).__name__
        raise UserError(f"drafter {name}: got a batch of {count} prompts, allowed: 1; decode them one by one")
    Batch(target, batch_drafter, rows, sampling, shape, _clock(target, synchronize), observer).decode()
    return [GenerateOutput(row.tokens, row.ending.reason, row.trace) for row in rows]


def autoregressive_generate(
    target: TargetModel,
    input_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
    synchronize: bool = False,
) -> GenerateOutput:
    """The target alone: the baseline. Arguments and errors as for `speculative_generate`."""
    return speculative_generate(
        target,
        None,
        input_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        stop_ids=stop_ids,
        generator=generator,
        synchronize=synchronize,
    )


@dataclass
class Row:
    """One request on its way.   is_chain: whether its drafts are chains.   number: its place among the prompts."""

    prompt: list[int]
    ending: Ending
    sampling: Sampling
    is_chain: bool
    length: LengthPolicy
    vocab: VocabPolicy
    generator: torch.Generator | None
    number: int = 0
    tokens: list[int] = field(default_factory=list)
    trace: DecodeTrace = field(init=False)
    live: LiveRows | None = None  # head rows of the newest round that drafted; None = all
    live_count: int = 0  # head rows in the current round; 0 = all, or nothing was drafted

    def __post_init__(self) -> None:
        self.trace = DecodeTrace(prompt_tokens=len(self.prompt))

    def ask(self) -> Ask:
        """What to draft in the coming round."""
        budget = min(self.length.length(), self.ending.limit - len(self.tokens) - 1)  # one token is the target's own
        if budget <= 0:
            self.live_count = 0
            return Ask(budget, self.choose)
        self.live = self.vocab.live()
        self.live_count = 0 if self.live is None else len(self.live.ids)
        return Ask(budget, self.choose, self.live)

    def choose(self, logits: Tensor) -> Drawn:
        drawn = self.sampling.choose(logits, self.generator)
        if not (self.is_chain and self.length.watches):
            return drawn
        law = DraftLaw(logits, drawn.law, drawn.column if self.length.reads_samples else None)
        return Drawn(drawn.column, drawn.law, not self.length.go_on(law))

    def next_token(self, logits: Tensor) -> int:
        """logits [1, V]"""
        return int(greedy(logits) if self.sampling.greedy else draw(self.sampling.law(logits[0]), self.generator))

    def verify(self, logits: Tensor, best: list[int] | None, tokens: list[int], proposal: Proposal) -> Verdict:
        """logits [n, V] after the last committed token and after every drafted one; best: their argmax, given at T = 0."""
        if best is not None:
            return verify_greedy(best, tokens, proposal.parents)

        def law_of(place: int) -> Tensor:
            return self.sampling.law(logits[place])

        return verify(law_of, tokens, proposal.parents, proposal.q, proposal.ids, self.generator)

    def chance(self, logits: Tensor, proposal: Proposal, node: int) -> float:
        """That a child of `node` (-1 = the last committed token) is accepted, see Observed.alpha; of independent siblings, the first.
        logits [V]"""
        children = [i for i, parent in enumerate(proposal.parents) if parent == node]
        if not children:
            return float("nan")
        law = logits.float().softmax(-1) if self.sampling.greedy else self.sampling.law(logits)
        if proposal.q is None:
            return float(law[proposal.tokens[children].to(law.device)].sum())
        return float(torch.minimum(law, spread(proposal.q[children[0]], proposal.ids, law)).sum())


class Batch:
    """Requests that are decoded together. A pass of the target and a draft serve all rows; everything else is a row's own.

    Times in a row's trace are its share: a pass over B rows counts with a B-th in each."""

    def __init__(
        self,
        target: TargetModel,
        drafter: BatchDrafter | None,
        rows: list[Row],
        sampling: Sampling,
        shape: Shape,
        now: Callable[[], float],
        observer: Observer | None = None,
    ):
        self.target, self.drafter, self.shape = target, drafter, shape
        self.observer = None if drafter is None else observer
        self.rows, self.sampling, self.now = list(rows), sampling, now

    @torch.inference_mode()
    def decode(self) -> None:
        """Until every row has ended."""
        started = self.now()
        work = self._prefill
        while self.rows:
            rows, share = self.rows, 1 / len(self.rows)
            work()
            now = self.now()
            for row in rows:
                row.trace.seconds += share * (now - started)
                row.trace.tokens = len(row.tokens)
            started, work = now, self._round

    def _prefill(self) -> None:
        """The prompts; the first token of every row; then the drafter, over the rows that go on."""
        rows, share = self.rows, 1 / len(self.rows)
        start = self.now()
        counts = [len(row.prompt) for row in rows]
        max_length = max(len(row.prompt) + row.ending.limit for row in rows)
        self.cache = self.target.new_cache(len(rows), max_length)
        step = self.target.forward(
            self._padded([row.prompt for row in rows]),
            self.cache,
            counts=None if len(set(counts)) == 1 else counts,
            want_taps=self.drafter is not None,
            logits_for="last",
        )
        for row, logits in zip(rows, step.logits, strict=True):
            row.ending.take(row.tokens, [row.next_token(logits)])
            row.length.begin()
        ran = self.now()
        for row in rows:
            row.trace.prefill_s = share * (ran - start)
        going = self._leave()
        if self.drafter is None or not going:
            return
        taps = step.taps if len(going) == len(rows) else step.taps[going]
        if self.observer is not None:  # before the drafter, whose weights it may change
            pairs = zip(self.rows, going, strict=True)
            self.observer.begin([Begun(row.number, row.prompt, step.taps[b, : len(row.prompt)]) for row, b in pairs])
        self.drafter.begin(taps, [row.prompt + row.tokens for row in self.rows], max_length)
        for row, b in zip(self.rows, going, strict=True):
            row.vocab.begin(row.prompt, step.last[b, : len(row.prompt)], self.target.teacher_logits)
        drafted = self.now()
        for row in self.rows:
            row.trace.draft_prefill_s = (drafted - ran) / len(self.rows)

    def _round(self) -> None:
        start = self.now()
        proposals = self._propose()
        drafted = [proposal.tokens.tolist() for proposal in proposals]
        starts = self.cache.lengths
        proposed = self.now()
        step = self._run(drafted, [proposal.parents for proposal in proposals])
        ran = self.now()
        verdicts, emitted = self._verify(step.logits, drafted, proposals)
        sampled = self.now()
        covered = [row.vocab.covers(verdict.token) for row, verdict in zip(self.rows, verdicts, strict=True)]
        kept = [[0, *(node + 1 for node in verdict.path)] for verdict in verdicts]
        rows = self.rows
        seen = [] if self.observer is None else self._observed(step, proposals, kept, emitted)
        told = self.now()
        self._commit(step, drafted, kept, emitted, starts)
        share, committing = 1 / len(rows), self.now() - told
        times = {"draft_s": share * (proposed - start + committing), "commit_s": share * committing}
        times |= {"verify_s": share * (ran - proposed), "sample_s": share * (sampled - ran)}
        for b, row in enumerate(rows):
            accepted, levels = len(verdicts[b].path), max(depths(proposals[b].parents), default=0)
            row.length.observe(levels, accepted)
            row.trace.rounds.append(
                Round(
                    len(drafted[b]),
                    min(accepted, emitted[b]),
                    emitted[b],
                    head_s=proposals[b].head_seconds,
                    live=row.live_count,
                    is_covered=covered[b],
                    levels=levels,
                    **times,
                )
            )
        if self.observer is not None:
            self.observer.observe(seen)

    def _observed(
        self, step: Step, proposals: list[Proposal], kept: list[list[int]], emitted: list[int]
    ) -> list[Observed]:
        """What the observer is told of every row, before the policies learn of the round."""
        seen = []
        for b, row in enumerate(self.rows):
            places, after = kept[b][: emitted[b]], row.tokens[-emitted[b] :]
            logits = step.logits[b, places]
            alpha = [row.chance(law, proposals[b], place - 1) for law, place in zip(logits, places, strict=True)]
            hits = [row.vocab.covers(token) for token in after]
            before = row.tokens[-emitted[b] - 1 : -1]
            seen.append(Observed(row.number, before, step.taps[b, places], logits, alpha, hits, row.live))
        return seen

    def _propose(self) -> list[Proposal]:
        asks = [row.ask() for row in self.rows]
        if self.drafter is None or max(ask.budget for ask in asks) <= 0:
            return [nothing() for _ in asks]
        proposals = self.drafter.draft(asks, self.shape)
        if isinstance(self.shape, Chain):
            proposals = [p.first(row.length.keep(len(p.parents))) for row, p in zip(self.rows, proposals, strict=True)]
        for ask, proposal in zip(asks, proposals, strict=True):
            _check(proposal, ask.budget, self.shape)
        return proposals

    def _run(self, drafted: list[list[int]], parents: list[list[int]]) -> Step:
        """The target over the last committed token and the drafted ones of every row, padded on the right."""
        ids = self._padded([[row.tokens[-1], *nodes] for row, nodes in zip(self.rows, drafted, strict=True)])
        positions = mask = None
        if not all(is_chain(row) for row in parents):
            positions, mask = place_trees(self.cache.lengths, parents, self.target.device)
        return self.target.forward(ids, self.cache, positions=positions, mask=mask, want_taps=self.drafter is not None)

    def _verify(
        self, logits: Tensor, drafted: list[list[int]], proposals: list[Proposal]
    ) -> tuple[list[Verdict], list[int]]:
        """Every row's verdict, and how many tokens the user got by it. logits [B, n, V]"""
        best = greedy(logits).tolist() if self.sampling.greedy else [None] * len(self.rows)
        verdicts = [row.verify(logits[b], best[b], drafted[b], proposals[b]) for b, row in enumerate(self.rows)]
        emitted = [
            row.ending.take(row.tokens, [*(drafted[b][node] for node in verdicts[b].path), verdicts[b].token])
            for b, row in enumerate(self.rows)
        ]
        return verdicts, emitted

    def _commit(
        self, step: Step, drafted: list[list[int]], kept: list[list[int]], emitted: list[int], starts: list[int]
    ) -> None:
        """What of the pass stays: in the cache (papers 9.8), with the drafter, with the policies; rows that have ended leave.

        kept: places in the pass of the last committed token and of the accepted path.   starts: slots before the pass."""
        self.cache.keep(starts, [places[:count] for places, count in zip(kept, emitted, strict=True)])
        if self.drafter is not None:
            for b, row in enumerate(self.rows):
                if not row.ending.reason:
                    n = 1 + len(drafted[b])
                    committed, accepted = row.tokens[-emitted[b] :], len(kept[b]) - 1
                    row.vocab.observe(
                        Verified(drafted[b], committed, accepted, step.logits[b, :n], step.last[b, :n], kept[b])
                    )
        before = len(self.rows)
        going = self._leave()
        if self.drafter is None or not going:
            return
        if len(going) < before:
            self.drafter.select(going)
        places = [kept[b] for b in going]
        tokens = [row.tokens[-emitted[b] :] for row, b in zip(self.rows, going, strict=True)]
        self.drafter.commit(tokens, _gather(step.taps if len(going) == before else step.taps[going], places))

    def _leave(self) -> list[int]:
        """Drop the rows that have ended. Returns the former places of the others; the last ones take the places that are free."""
        going = [b for b, row in enumerate(self.rows) if not row.ending.reason]
        if len(going) < len(self.rows):
            stay = set(going)
            late = [b for b in going if b >= len(going)]
            going = [b if b in stay else late.pop() for b in range(len(going))]
            self.rows = [self.rows[b] for b in going]
            if going:
                self.cache.select(going)
        return going

    def _padded(self, rows: list[list[int]]) -> Tensor:
        """[B, longest] token ids, padded on the right."""
        longest = max(len(row) for row in rows)
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.target.device)


def _gather(taps: Tensor, places: list[list[int]]) -> Tensor:
    """taps [B, n, A*H] -> those at each row's places (ascending), padded on the right."""
    longest = max(len(row) for row in places)
    if all(row[-1] == len(row) - 1 for row in places):
        return taps[:, :longest]
    index = torch.tensor([row + [0] * (longest - len(row)) for row in places], device=taps.device)
    return taps.gather(1, index[:, :, None].expand(-1, -1, taps.shape[2]))


def _check(proposal: Proposal, budget: int, shape: Shape) -> None:
    parents = proposal.parents
    assert len(proposal.tokens) == len(parents), (len(proposal.tokens), len(parents))
    assert all(-1 <= parent < i for i, parent in enumerate(parents)), f"not a tree: parents {parents}"
    assert max(depths(parents), default=0) <= max(budget, 0), f"the drafter went below a budget of {budget}: {parents}"
    assert shape.width > 1 or is_chain(parents), f"not a chain: parents {parents}"


def _check_rows(what: str, given: Sequence, count: int, own: Sequence) -> None:
    """own: those that must not serve two rows."""
    if len(given) != count:
        raise UserError(f"{what}: got {len(given)}, allowed: {count}, one for every prompt")
    if len({id(one) for one in own}) < len(own):
        raise UserError(f"{what}: got the same object for two prompts, which would mix them up; give each its own")


def _check_bias(length: LengthPolicy, sampling: Sampling) -> None:
    bias = length.bias
    if length.reads_samples and type(length).keep is not LengthPolicy.keep:
        bias = bias or "it reads which tokens were drawn, and may drop drafted ones"
    if bias and not sampling.greedy:
        raise UserError(
            f"length policy {type(length).__name__}: got temperature {sampling.temperature}, allowed: 0 only, as it would "
            f"bias the output: {bias}"
        )


def check_prompt(input_ids: Sequence[int] | Tensor, target: TargetModel) -> list[int]:
    """[T] or [1, T] token ids -> a list, if `target` can be run on them and has room for a token; UserError if not."""
    ids = torch.as_tensor(input_ids)
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or ids.numel() == 0:
        raise UserError(f"prompt: got token ids of shape {list(ids.shape)}, allowed: [T] or [1, T] with T of 1 or more")
    if len(ids) >= target.max_positions:
        raise UserError(
            f"prompt: got {len(ids)} tokens, allowed: up to {target.max_positions - 1} (the context of {target.name} "
            "less one new token); shorten it"
        )
    ids = ids.tolist()
    if not 0 <= min(ids) <= max(ids) < target.vocab_size:
        raise UserError(
            f"prompt: got token ids from {min(ids)} to {max(ids)}, allowed: 0 to {target.vocab_size - 1}; encode it "
            "with the target's tokenizer"
        )
    return ids


def _clock(target: TargetModel, synchronize: bool) -> Callable[[], float]:
    """Reads seconds; on a GPU, and only when asked, after its work is done."""
    if not synchronize or target.device.type == "cpu":
        return time.perf_counter

    def read() -> float:
        torch.accelerator.synchronize(target.device)
        return time.perf_counter()

    return read
