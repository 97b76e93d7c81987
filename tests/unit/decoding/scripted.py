"""A target with given laws per prefix, drafters with given proposals, and exact enumeration of random programs.

None of it needs a model: the decoder is tested against laws that are known exactly.
"""

import random
from collections import defaultdict
from collections.abc import Callable

import torch

from specdraft.data.vocab import VocabMap
from specdraft.models.drafter import Proposal
from specdraft.models.heads import FullHead, Head, TrimmedHead
from specdraft.models.target import Step


class Tokens:
    """Stands for a key/value cache: the tokens that the target was run on and that were not dropped."""

    def __init__(self, max_length: int):
        self.max_length, self.tokens = max_length, []

    def crop(self, length: int) -> None:
        assert length <= len(self.tokens)
        del self.tokens[length:]


class ScriptedTarget:
    """Logits are a function of everything in the cache, so a token that should have been dropped changes what follows.
    The one tap of a position is (position, token), so that a test can check what a drafter is told."""

    tokenizer = None
    name = "scripted"
    dtype = torch.float64
    device = torch.device("cpu")

    def __init__(self, vocab_size: int = 4, eos: tuple[int, ...] = (), max_positions: int = 200, seed: int = 0):
        self.vocab_size, self.eos_token_ids, self.max_positions, self.seed = vocab_size, eos, max_positions, seed
        self.forwards = 0

    def logits(self, prefix: list[int]) -> torch.Tensor:
        numbers = random.Random(f"{self.seed} {prefix}")
        return torch.tensor([numbers.gauss(0, 1.5) for _ in range(self.vocab_size)], dtype=torch.float64)

    def new_cache(self, batch_size: int, max_length: int) -> Tokens:
        assert batch_size == 1
        assert max_length <= self.max_positions
        return Tokens(max_length)

    def forward(self, input_ids, cache, *, want_taps=True, logits_for="all") -> Step:
        self.forwards += 1
        logits, taps = [], []
        for token in input_ids[0].tolist():
            taps.append([float(len(cache.tokens)), float(token)])
            cache.tokens.append(token)
            logits.append(self.logits(cache.tokens))
        assert len(cache.tokens) <= cache.max_length
        rows = logits if logits_for == "all" else logits[-1:]
        return Step(torch.stack(rows)[None], torch.tensor([taps]) if want_taps else None, torch.stack(logits)[None])

    def teacher_logits(self, last: torch.Tensor) -> torch.Tensor:
        """A position's state is its logits."""
        return last

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The naive loop: what greedy decoding must give."""
        tokens = []
        while len(tokens) < count and len(prompt) + len(tokens) < self.max_positions:
            tokens.append(int(self.logits(prompt + tokens).argmax()))
            if tokens[-1] in self.eos_token_ids:
                break
        return tokens


class ScriptedDrafter:
    """Drafts from `law(prefix) -> logits`, over the target ids `ids` (None = all), and keeps account of what it is
    told: the committed tokens, and taps that must be those of the positions before the last of them."""

    def __init__(self, law: Callable[[list[int]], torch.Tensor], ids: list[int] | None = None):
        self.law = law
        self.ids = None if ids is None else torch.tensor(ids)
        self.committed: list[int] = []
        self.heard = 0

    def prefill(self, taps, input_ids):
        self.committed = input_ids[0].tolist()
        self.heard = 0
        self._hear(taps)

    def observe(self, tokens, taps):
        self.committed += tokens.tolist()
        assert len(tokens) == taps.shape[1]
        self._hear(taps)

    def _hear(self, taps):
        for position, token in taps[0].tolist():
            assert position == self.heard
            assert token == self.committed[self.heard]
            self.heard += 1
        assert self.heard == len(self.committed) - 1

    def propose(self, budget, choose, live=None):
        tokens, laws, prefix = [], [], list(self.committed)
        ids = self.ids if live is None else live.ids
        for _ in range(budget):
            logits = self.law(prefix)[None]
            if live is not None:
                logits = live.logits(logits)
            elif ids is not None:
                logits = logits[:, ids]
            column, law, is_last = choose(logits)
            tokens.append(int(column if ids is None else ids[column]))
            laws.append(law)
            prefix.append(tokens[-1])
            if is_last:
                break
        q = torch.stack(laws) if laws and laws[0] is not None else None
        return Proposal(torch.tensor(tokens, dtype=torch.int64), list(range(-1, len(tokens) - 1)), q, ids)


def scripted_head(vocab_size: int = 4, ids: list[int] | None = None) -> Head:
    """A head whose hidden state is the law's logits over the whole vocabulary: rows of the identity."""
    vocab_map = None if ids is None else VocabMap(torch.tensor(ids), vocab_size)
    head = FullHead(vocab_size, vocab_size) if vocab_map is None else TrimmedHead(vocab_size, vocab_map)
    head.init_from(torch.eye(vocab_size))
    return head.double()


class Oracle:
    """Replays a script of random decisions and notes the probabilities of all that were possible."""

    def __init__(self, script: list[int]):
        self.script, self.made, self.probability = script, [], 1.0

    def choice(self, probabilities: list[float]) -> int:
        step = len(self.made)
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        taken = self.script[step] if step < len(self.script) else possible[0]
        self.made.append((taken, possible))
        self.probability *= probabilities[taken]
        return taken

    def draw(self, law: torch.Tensor, generator=None) -> torch.Tensor:
        """Stands for sampling.draw."""
        return torch.tensor([self.choice((law / law.sum()).tolist())])

    def uniform(self, generator=None) -> "Coin":
        """Stands for sampling.uniform, in comparisons `uniform() * q < p`."""
        return Coin(self)


class Coin:
    """u in [0, 1): `u * q < p` holds with probability min(1, p/q)."""

    def __init__(self, oracle: Oracle, scale: float = 1.0):
        self.oracle, self.scale = oracle, scale

    def __mul__(self, scale: float) -> "Coin":
        return Coin(self.oracle, self.scale * scale)

    def __lt__(self, bound: float) -> bool:
        chance = min(1.0, bound / self.scale)
        return bool(self.oracle.choice([1 - chance, chance]))


def exact_law(program: Callable[[Oracle], object]) -> dict:
    """The law of what `program` returns, by running it once for every sequence of its random decisions."""
    law, scripts = defaultdict(float), [[]]
    while scripts:
        script = scripts.pop()
        oracle = Oracle(script)
        law[program(oracle)] += oracle.probability
        decisions = [taken for taken, _ in oracle.made]
        for step in range(len(script), len(oracle.made)):
            taken, possible = oracle.made[step]
            scripts += [[*decisions[:step], other] for other in possible if other != taken]
    return dict(law)


def total_variation(one: dict, other: dict) -> float:
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2
