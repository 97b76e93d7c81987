"""A target with given laws per prefix, drafters with given proposals, and exact enumeration of random programs.

None of it needs a model: the decoder is tested against laws that are known exactly.
"""

import random
from collections import defaultdict
from collections.abc import Callable

import torch

from specdraft.data.vocab import VocabMap
from specdraft.models.drafter import Proposal, nothing
from specdraft.models.heads import FullHead, Head, TrimmedHead
from specdraft.models.target import Step


class Tokens:
    """Stands for a key/value cache: the tokens that the target was run on and that were not dropped, for every row."""

    def __init__(self, batch_size: int, max_length: int):
        self.batch_size, self.max_length = batch_size, max_length
        self.slots: list[list[int]] = [[] for _ in range(batch_size)]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.slots]

    def keep(self, starts: list[int], paths: list[list[int]]) -> None:
        for b, (start, path) in enumerate(zip(starts, paths, strict=True)):
            assert path == sorted(set(path))
            self.slots[b] = self.slots[b][:start] + [self.slots[b][start + i] for i in path]
            assert len(self.slots[b]) <= self.max_length

    def select(self, rows: list[int]) -> None:
        assert rows
        self.slots, self.batch_size = [self.slots[b] for b in rows], len(rows)


class ScriptedTarget:
    """Logits are a function of all that a token may attend to, so a token that should have been dropped, or that stands in
    another branch, changes what follows. The one tap of a token is (position, token), so that a test can check what a drafter
    is told."""

    tokenizer = None
    name = "scripted"
    dtype = torch.float64
    precision = "float64"
    device = torch.device("cpu")

    def __init__(self, vocab_size: int = 4, eos: tuple[int, ...] = (), max_positions: int = 200, seed: int = 0):
        self.vocab_size, self.eos_token_ids, self.max_positions, self.seed = vocab_size, eos, max_positions, seed
        self.forwards = 0

    def logits(self, prefix: list[int]) -> torch.Tensor:
        numbers = random.Random(f"{self.seed} {prefix}")
        return torch.tensor([numbers.gauss(0, 1.5) for _ in range(self.vocab_size)], dtype=torch.float64)

    def new_cache(self, batch_size: int, max_length: int) -> Tokens:
        assert max_length <= self.max_positions
        return Tokens(batch_size, max_length)

    def forward(
        self, input_ids, cache, *, positions=None, mask=None, counts=None, want_taps=True, logits_for="all"
    ) -> Step:
        self.forwards += 1
        n = input_ids.shape[1]
        counts = [n] * len(input_ids) if counts is None else counts
        longest = max(cache.lengths)
        logits, taps = [], []
        for b, tokens in enumerate(input_ids.tolist()):
            start = len(cache.slots[b])
            cache.slots[b] += tokens
            for j in range(n):
                seen = cache.slots[b][: start + j + 1]
                if mask is not None:
                    assert mask.shape[1:] == (1, n, longest + n)
                    assert not mask[b, 0, j, start + n :].any()
                    seen = [t for t, can in zip(cache.slots[b], mask[b, 0, j].tolist(), strict=False) if can]
                position = len(seen) - 1
                assert positions is None or int(positions[b, j]) == position
                taps.append([float(position), float(tokens[j])])
                logits.append(self.logits(seen))
            del cache.slots[b][start + counts[b] :]
        logits = torch.stack(logits).unflatten(0, input_ids.shape)
        rows = logits
        if logits_for == "last":
            rows = torch.stack([logits[b, count - 1 : count] for b, count in enumerate(counts)])
        taps = torch.tensor(taps).unflatten(0, input_ids.shape)
        return Step(rows, taps if want_taps else None, logits)

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
            column, law, is_last = choose(scripted_logits(self.law, [prefix], self.ids, live))
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


class ScriptedRows:
    """A `BatchDrafter` from a law, as `ScriptedDrafter` is a `Drafter`: for batches, and in any shape."""

    def __init__(self, law: Callable[[list[int]], torch.Tensor], ids: list[int] | None = None):
        self.law, self.ids = law, ids

    def begin(self, taps, tokens, max_length):
        self.rows = [ScriptedDrafter(self.law, self.ids) for _ in tokens]
        for b, row in enumerate(tokens):
            assert len(row) < max_length
            self.rows[b].prefill(taps[b : b + 1, : len(row) - 1], torch.tensor([row]))

    def commit(self, tokens, taps):
        assert taps.shape[:2] == (len(self.rows), max(len(row) for row in tokens))
        for b, row in enumerate(self.rows):
            row.observe(torch.tensor(tokens[b]), taps[b : b + 1, : len(tokens[b])])

    def select(self, rows):
        self.rows = [self.rows[b] for b in rows]

    def draft(self, asks, shape):
        return [self._draft(row, ask, shape) for row, ask in zip(self.rows, asks, strict=True)]

    def _draft(self, row, ask, shape):
        if ask.budget <= 0:
            return nothing()
        growth, nodes = (shape.begin(ask, row.ids if ask.live is None else ask.live.ids), [row.committed])
        while True:
            level = growth.grow(scripted_logits(self.law, nodes, row.ids, ask.live))
            if level is None:
                return growth.proposal()
            nodes = [[*nodes[of], token] for token, of in zip(level[0].tolist(), level[1].tolist(), strict=True)]


def scripted_logits(law, prefixes, ids, live):
    """[prefixes, columns]"""
    logits = torch.stack([law(prefix) for prefix in prefixes])
    if live is not None:
        return live.logits(logits)
    return logits if ids is None else logits[:, ids]


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
