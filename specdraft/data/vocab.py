"""`VocabMap`: which target tokens a drafter can propose, in which order; and how to choose them by frequency.

Field formats: d2t [S] are OFFSETS (target id = draft id + d2t[draft id]), t2d [V] is a membership mask. The order of
draft ids is free (here by falling count): always gather through d2t, never select with t2d. It knows nothing of heads.
S draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor

from specdraft.config import UserError
from specdraft.data.chat import Example, render_prompt
from specdraft.provenance import atomic_path, hash_tensors

BYTE_TOKENS = [*pre_tokenizers.ByteLevel.alphabet(), *(f"<0x{byte:02X}>" for byte in range(256))]


class VocabMap:
    """Draft ids 0..S-1 -> target ids.

    target_ids: [S] int64, unique, in 0..V-1, in any order.
    vocab_size: V.
    draft_index: [V] int64, the inverse; -1 where a target token is outside.
    offsets: [S] int64, d2t as the field stores it.
    hash: of map and V; two maps of one size but other content have other hashes.

    Raises:
        UserError: ids out of range, repeated, or none.
    """

    def __init__(self, target_ids: Tensor, vocab_size: int, where: str = "vocabulary map") -> None:
        if target_ids.dtype != torch.int64 or target_ids.dim() != 1:
            raise UserError(f"{where}: got ids {target_ids.dtype} {list(target_ids.shape)}, expected int64 [S]")
        if len(target_ids) == 0:
            raise UserError(f"{where}: got no ids, at least 1 is needed")
        low, high = int(target_ids.min()), int(target_ids.max())
        if low < 0 or high >= vocab_size:
            raise UserError(f"{where}: got target ids from {low} to {high}, allowed: 0 to {vocab_size - 1}")
        self.target_ids = target_ids.cpu().clone()
        self.vocab_size = vocab_size
        self.draft_index = torch.full((vocab_size,), -1, dtype=torch.int64)
        self.draft_index[self.target_ids] = torch.arange(len(target_ids))
        distinct = int((self.draft_index >= 0).sum())
        if distinct != len(target_ids):
            raise UserError(f"{where}: {len(target_ids) - distinct} of {len(target_ids)} target ids are repeated")
        self.hash = hash_tensors({f"target_ids of {vocab_size}": self.target_ids})

    def __len__(self) -> int:
        return len(self.target_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VocabMap) and self.hash == other.hash

    __hash__ = None  # type: ignore[assignment]

    @property
    def offsets(self) -> Tensor:
        return self.target_ids - torch.arange(len(self))

    @property
    def is_identity(self) -> bool:
        """All of V in its own order: such a map is left out of checkpoints."""
        return len(self) == self.vocab_size and not self.offsets.any()

    @classmethod
    def identity(cls, vocab_size: int) -> VocabMap:
        return cls(torch.arange(vocab_size), vocab_size)

    @classmethod
    def from_counts(cls, counts: Tensor, size: int, always: Iterable[int] = (), valid: int | None = None) -> VocabMap:
        """The `always` ids and the most frequent others, `size` in all, in the order (-count, id).

        counts: [V] occurrences. valid: only ids below it are real tokens (default V); padded rows never enter.

        Raises:
            UserError: `size` above the real tokens or below the number of `always` ids, or an `always` id out of range.
        """
        valid = len(counts) if valid is None else valid
        forced = torch.tensor(sorted(set(always)), dtype=torch.int64)
        if len(forced) and not 0 <= int(forced[0]) <= int(forced[-1]) < valid:
            raise UserError(f"vocabulary map: required ids {forced.tolist()} must be from 0 to {valid - 1}")
        if not max(1, len(forced)) <= size <= valid:
            raise UserError(
                f"vocabulary size: got {size}, allowed: {max(1, len(forced))} (end-of-turn, template and byte tokens "
                f"are always in) to {valid}"
            )
        order = torch.argsort(counts[:valid], descending=True, stable=True)
        is_forced = torch.zeros(valid, dtype=torch.bool)
        is_forced[forced] = True
        chosen = is_forced.clone()
        chosen[order[~is_forced[order]][: size - len(forced)]] = True
        return cls(order[chosen[order]], len(counts))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], vocab_size: int, where: str = "vocabulary map") -> VocabMap:
        """From `d2t` and `t2d` among the tensors of a checkpoint; `where` names it in errors.

        Raises:
            UserError: one of them missing; offsets that lead out of range or repeat ids; a t2d that says otherwise.
        """
        if not {"d2t", "t2d"} <= set(tensors):
            raise UserError(f"{where}: got the tensors {sorted(tensors)}, expected d2t and t2d among them")
        d2t, t2d = tensors["d2t"].cpu(), tensors["t2d"].cpu()
        if d2t.dtype != torch.int64 or d2t.dim() != 1 or t2d.dtype != torch.bool or t2d.shape != (vocab_size,):
            got = f"d2t {d2t.dtype} {list(d2t.shape)} and t2d {t2d.dtype} {list(t2d.shape)}"
            raise UserError(f"{where}: got {got}, expected d2t int64 [S] and t2d bool [{vocab_size}]")
        vocab = cls(d2t + torch.arange(len(d2t)), vocab_size, where)
        wrong = int((vocab.membership() != t2d).sum())
        if wrong:
            raise UserError(
                f"{where}: d2t and t2d disagree about {wrong} of {vocab_size} target ids; the file is broken"
            )
        return vocab

    def tensors(self) -> dict[str, Tensor]:
        """As checkpoints hold them: d2t [S] int64, t2d [V] bool."""
        return {"d2t": self.offsets, "t2d": self.membership()}

    def membership(self) -> Tensor:
        """t2d: [V] bool, True where a target token can be drafted."""
        return self.draft_index >= 0

    def save(self, path: Path) -> None:
        """One safetensors file with d2t, t2d, and the hash in its metadata."""
        with atomic_path(path) as temporary:
            save_file(self.tensors(), temporary, metadata={"hash": self.hash})

    @classmethod
    def load(cls, path: Path) -> VocabMap:
        """Raises UserError: no such file, not a vocabulary map, or an inconsistent one."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"vocabulary map {path}: no such file; make it with data_prep/build_vocab.py")
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise UserError(f"vocabulary map {path}: not a safetensors file ({error})") from None
        vocab_size = len(tensors["t2d"]) if "t2d" in tensors else 0
        return cls.from_tensors(tensors, vocab_size, f"vocabulary map {path}")


def require_same_map(expected: VocabMap, got: VocabMap, where: str) -> None:
    """A head's rows mean the tokens of one map. Raises UserError for any other, of whatever size."""
    if expected != got:
        raise UserError(
            f"{where}: got vocabulary map {got.hash} ({len(got)} of {got.vocab_size} tokens), expected {expected.hash} "
            f"({len(expected)} of {expected.vocab_size}); use the map that the head was trained with"
        )


def count_tokens(examples: Iterable[Example], vocab_size: int) -> Tensor:
    """[V] int64: how often each token stands in an answer (supervised tokens only).

    Raises:
        UserError: a token id outside the vocabulary: the answers are of another tokenizer.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        ids = example.input_ids[example.loss_mask]
        if len(ids) and int(ids.max()) >= vocab_size:
            raise UserError(
                f"example {example.id!r}: got token id {int(ids.max())}, allowed: 0 to {vocab_size - 1}; "
                "the data is of another tokenizer"
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def coverage(counts: Tensor, vocab: VocabMap) -> float:
    """Share (0..1) of the counted tokens that the map can draft. counts: [V]."""
    return float(counts[vocab.target_ids].sum() / counts.sum().clamp_min(1))


def required_ids(tokenizer: Any, eos_token_ids: Sequence[int]) -> list[int]:
    """Ids that every draft vocabulary needs, ascending: all end ids, special tokens, the tokens of the chat template,
    and the tokens of single bytes. Without them a drafter could never end an answer or spell a rare character."""
    table = tokenizer.get_vocab()
    ids = {*eos_token_ids, *tokenizer.all_special_ids, *(table[token] for token in BYTE_TOKENS if token in table)}
    if tokenizer.chat_template:
        ids |= set(render_prompt(tokenizer, [{"role": "user", "content": ""}]))
        ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in tokenizer.chat_template}
    return sorted(ids)
