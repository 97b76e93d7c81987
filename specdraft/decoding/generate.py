"""The decode loop: one prefill, then rounds of draft, one target forward, verify, and dropping what was rejected.

The target alone is the same loop without a drafter, so that both sides of a comparison share cache, sampling and
counting. It knows nothing of how drafters draft or targets compute. Batch 1, chains.

Letters: T prompt tokens, N drafted tokens, V vocabulary, A taps, H width, a accepted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.config import UserError
from specdraft.decoding.length_policies import Fixed
from specdraft.decoding.length_policy import DraftLaw, LengthPolicy
from specdraft.decoding.live_rows import Verified
from specdraft.decoding.sampling import Sampling, draw, greedy
from specdraft.decoding.trace import DecodeTrace, Round
from specdraft.decoding.verify import Verdict, verify, verify_greedy
from specdraft.decoding.vocab_policies import AllTokens, VocabPolicy
from specdraft.models.drafter import Drafter, Drawn, Proposal
from specdraft.models.target import TargetModel

DEFAULT_LENGTH = 4
NOTHING_DRAFTED = Proposal(torch.empty(0, dtype=torch.int64), [])


@dataclass
class GenerateOutput:
    """tokens: the new tokens, an end-of-sequence token included.   reason: why they end: `eos`, `stop` (a stop string
    or id), `length` (max_new_tokens) or `context` (the target's last position)."""

    tokens: list[int]
    reason: str
    trace: DecodeTrace


def speculative_generate(
    target: TargetModel,
    drafter: Drafter | None,
    input_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    vocab_policy: VocabPolicy | None = None,
    length_policy: LengthPolicy | None = None,
    stop: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
    synchronize: bool = False,
) -> GenerateOutput:
    """Decode with a drafter. The output law is the target's own (papers 9): at T = 0 its greedy tokens, up to rounding.

    Args:
        drafter: None = the target alone.
        input_ids: the prompt, [T] or [1, T] token ids.
        max_new_tokens: never exceeded; neither is the target's context.
        temperature, top_k, top_p: see Sampling; one processor for drafted, verified and bonus tokens.
        vocab_policy: live rows of the draft head; default all.   length_policy: default 4 tokens a round.
        stop: strings; the output ends with the token that completes one.   stop_ids: end it as the target's EOS ids do.
        generator: the only source of randomness; None = torch's global one.
        synchronize: wait for the device at every clock reading: right parts of the trace on a GPU, and a slower run.

    Raises:
        UserError: an empty prompt, one longer than the context, ids outside the vocabulary; values outside their
            ranges; a length policy that would bias sampling at T > 0.
    """
    sampling = Sampling(temperature, top_k, top_p)
    length = Fixed(DEFAULT_LENGTH) if length_policy is None else length_policy
    if length.bias and not sampling.greedy:
        raise UserError(
            f"length policy {type(length).__name__}: got temperature {temperature}, allowed: 0 only, as it would bias the "
            f"output: {length.bias}"
        )
    prompt = check_prompt(input_ids, target)
    ending = Ending(target, len(prompt), max_new_tokens, stop, stop_ids)
    vocab = AllTokens() if vocab_policy is None else vocab_policy
    return _decode(target, drafter, prompt, ending, sampling, vocab, length, generator, _clock(target, synchronize))


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


@torch.inference_mode()
def _decode(
    target: TargetModel,
    drafter: Drafter | None,
    prompt: list[int],
    ending: Ending,
    sampling: Sampling,
    vocab: VocabPolicy,
    length: LengthPolicy,
    generator: torch.Generator | None,
    now: Callable[[], float],
) -> GenerateOutput:
    def choose(logits: Tensor) -> Drawn:
        column, law, _ = sampling.choose(logits, generator)
        if not length.watches:
            return Drawn(column, law)
        return Drawn(column, law, not length.go_on(DraftLaw(logits, law, column if length.reads_samples else None)))

    trace = DecodeTrace(prompt_tokens=len(prompt))
    tokens: list[int] = []
    started = now()
    cache = target.new_cache(1, len(prompt) + ending.limit)
    input_ids = torch.tensor([prompt], device=target.device)
    step = target.forward(input_ids, cache, want_taps=drafter is not None, logits_for="last")
    ending.take(tokens, [_next_token(step.logits[0], sampling, generator)])
    trace.prefill_s = now() - started
    if drafter is not None and not ending.reason:
        drafter.prefill(step.taps, torch.tensor([prompt + tokens], device=target.device))
        vocab.begin(prompt, step.last[0], target.teacher_logits)
        trace.draft_prefill_s = now() - started - trace.prefill_s
    length.begin()
    while not ending.reason:
        start = now()
        budget = min(length.length(), ending.limit - len(tokens) - 1)  # one token of the round is the target's own
        proposal, live = NOTHING_DRAFTED, None
        if drafter is not None and budget > 0:
            live = vocab.live()
            proposal = drafter.propose(budget, choose, live)
            proposal = proposal.first(length.keep(len(proposal.parents)))
        drafted = _check_chain(proposal, budget)
        proposed = now()
        run = torch.tensor([[tokens[-1], *drafted]], device=target.device)
        step = target.forward(run, cache, want_taps=drafter is not None)
        ran = now()
        verdict = _verify(step.logits[0], drafted, proposal, sampling, generator)
        accepted = len(verdict.path)
        emitted = ending.take(tokens, [*drafted[:accepted], verdict.token])
        sampled = now()
        live_rows, is_covered = 0 if live is None else len(live.ids), vocab.covers(verdict.token)
        if drafter is not None and not ending.reason:
            kept = [0, *(node + 1 for node in verdict.path)]
            vocab.observe(Verified(drafted, tokens[-emitted:], accepted, step.logits[0], step.last[0], kept))
            cache.crop(len(prompt) + len(tokens) - 1)  # keys and values of rejected tokens are gone (papers 9.8)
            drafter.observe(torch.tensor(tokens[-emitted:], device=target.device), step.taps[:, :emitted])
        length.observe(len(drafted), accepted)
        draft_s = proposed - start + now() - sampled
        times = (draft_s, proposal.head_seconds, ran - proposed, sampled - ran)
        trace.rounds.append(Round(len(drafted), min(accepted, emitted), emitted, *times, live_rows, is_covered))
    trace.tokens = len(tokens)
    trace.seconds = now() - started
    return GenerateOutput(tokens, ending.reason, trace)


class Ending:
    """When a text ends, by one rule for both sides of a comparison; and how many tokens it may still get.

    limit: new tokens allowed: max_new_tokens, or fewer where the context ends.   reason: empty until it has ended.
    """

    def __init__(
        self, target: TargetModel, prompt_length: int, max_new_tokens: int, stop: Sequence[str], stop_ids: Sequence[int]
    ):
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: got {max_new_tokens}, allowed: 1 or more")
        if stop and target.tokenizer is None:
            raise UserError(f"stop: got {list(stop)}, but the target {target.name} has no tokenizer; give stop_ids")
        if "" in stop:
            raise UserError("stop: got an empty string; give strings of one character or more")
        self.eos_ids = frozenset(target.eos_token_ids)
        self.stop_ids = frozenset(stop_ids)
        self.stop = tuple(stop)
        self.window = max((len(text.encode()) for text in stop), default=0) + 4
        self.tokenizer = target.tokenizer
        self.limit = min(max_new_tokens, target.max_positions - prompt_length)
        self.limit_reason = "length" if self.limit == max_new_tokens else "context"
        self.reason = ""

    def take(self, tokens: list[int], new: list[int]) -> int:
        """Append to `tokens` those of `new` that the user gets; returns how many."""
        for count, token in enumerate(new, 1):
            tokens.append(token)
            self.reason = self._ends(tokens)
            if self.reason:
                return count
        return len(new)

    def _ends(self, tokens: list[int]) -> str:
        if tokens[-1] in self.eos_ids:
            return "eos"
        if tokens[-1] in self.stop_ids:
            return "stop"
        if self.stop:
            text = self.tokenizer.decode(tokens[-self.window :])  # a token is at least one byte
            if any(string in text for string in self.stop):
                return "stop"
        return self.limit_reason if len(tokens) == self.limit else ""


def _verify(
    logits: Tensor, drafted: list[int], proposal: Proposal, sampling: Sampling, generator: torch.Generator | None
) -> Verdict:
    """logits [N+1, V] after the last committed token and after every drafted one."""
    if sampling.greedy:
        return verify_greedy(greedy(logits).tolist(), drafted, proposal.parents)
    return verify(lambda row: sampling.law(logits[row]), drafted, proposal.parents, proposal.q, proposal.ids, generator)


def _next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """logits [1, V]"""
    return int(greedy(logits) if sampling.greedy else draw(sampling.law(logits[0]), generator))


def _check_chain(proposal: Proposal, budget: int) -> list[int]:
    drafted = proposal.tokens.tolist()
    assert len(drafted) <= max(budget, 0), f"the drafter gave {len(drafted)} tokens for a budget of {budget}"
    assert proposal.parents == list(range(-1, len(drafted) - 1)), f"not a chain: parents {proposal.parents}"
    return drafted


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
