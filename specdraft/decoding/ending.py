"""When a text ends: one rule for the target alone and for decoding with a drafter. It knows nothing of models.

What a text may end by: a token that ends an answer, a stop string or id, its length, the context.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdraft.config import UserError
from specdraft.models.target import TargetModel


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
