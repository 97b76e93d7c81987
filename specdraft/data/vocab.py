"""`VocabMap`: which target tokens a drafter can propose, in which order; and how to choose them by frequency.

Field formats: d2t [S] are OFFSETS (target id = draft id + d2t[draft id]), t2d [V] is a membership mask. The order of
draft ids is free (here by falling count): always gather through d2t, never select with t2d. It knows nothing of heads, of
where counts come from (token_counts.py), or of how large a map should be (vocab_size.py).
S draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor

from specdraft.config import UserError
from specdraft.data.chat import Example, chat_template, render_prompt
from specdraft.provenance import atomic_path, hash_tensors

BYTE_FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]  # SentencePiece's tokens of single bytes
BYTE_LEVEL = pre_tokenizers.ByteLevel.alphabet()  # GPT-2's


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
    def from_counts(cls, counts: Tensor, size: int, always: Collection[int] = (), valid: int | None = None) -> VocabMap:
        """The `always` ids and the most frequent others, `size` in all, in the order (-count, id).

        counts: [V] occurrences. valid: only ids below it are real tokens (default V); padded rows never enter.

        Raises:
            UserError: `size` above the real tokens or below the number of `always` ids, or an `always` id out of range.
        """
        admitted = admission_order(counts, always, valid)
        least = max(1, len(set(always)))
        if not least <= size <= len(admitted):
            raise UserError(
                f"vocabulary size: got {size}, allowed: {least} (end-of-turn, template and byte tokens "
                f"are always in) to {len(admitted)}"
            )
        chosen = torch.zeros(len(counts), dtype=torch.bool)
        chosen[admitted[:size]] = True
        order = torch.argsort(counts, descending=True, stable=True)
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
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"vocabulary map {path}: not a safetensors file ({error}); make it with data_prep/build_vocab.py"
            ) from None
        vocab_size = tensors["t2d"].numel() if "t2d" in tensors else 0
        return cls.from_tensors(tensors, vocab_size, f"vocabulary map {path}")


def admission_order(counts: Tensor, always: Collection[int] = (), valid: int | None = None) -> Tensor:
    """Ids in the order in which a growing vocabulary takes them in: the `always` ids, then the others by (-count, id). The
    first k are the members of the map of size k, for every k from the number of `always` ids on. [valid] int64

    counts: [V] occurrences. valid: only ids below it are real tokens (default V); padded rows never enter.

    Raises:
        UserError: an `always` id out of range.
    """
    valid = len(counts) if valid is None else valid
    forced = torch.tensor(sorted(set(always)), dtype=torch.int64)
    if len(forced) and not 0 <= int(forced[0]) <= int(forced[-1]) < valid:
        raise UserError(f"vocabulary map: required ids {forced.tolist()} must be from 0 to {valid - 1}")
    order = torch.argsort(counts[:valid], descending=True, stable=True)
    is_forced = torch.zeros(valid, dtype=torch.bool)
    is_forced[forced] = True
    return torch.cat([forced, order[~is_forced[order]]])


def require_same_map(expected: VocabMap | None, got: VocabMap | None, where: str) -> None:
    """A head's rows mean the tokens of one map (None: all of the target's, in their order). Raises UserError for any other,
    of whatever size (fault 18)."""
    if expected != got:
        raise UserError(
            f"{where}: got vocabulary map {_named(got)}, expected {_named(expected)}; "
            "use the map that the head was trained with"
        )


def require_tokens(vocab: VocabMap, needed: Iterable[int], where: str) -> None:
    """Raises UserError where the map lacks one of the ids: without end-of-turn tokens a drafter can never end an answer (fault 16)."""
    missing = [token for token in needed if vocab.draft_index[token] < 0]
    if missing:
        raise UserError(
            f"{where}: the target's end-of-turn ids {missing} are not in vocabulary map {vocab.hash}; "
            "build it with data_prep/build_vocab.py, where they are always in"
        )


def _named(vocab: VocabMap | None) -> str:
    return "none (all tokens)" if vocab is None else f"{vocab.hash} ({len(vocab)} of {vocab.vocab_size} tokens)"


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


def required_ids(tokenizer: Any, eos_token_ids: Sequence[int], vocab_size: int | None = None) -> list[int]:
    """Ids that every draft vocabulary needs, ascending: all end ids, special tokens, the tokens of the chat template,
    and the tokens of single bytes. Without them a drafter could never end an answer or spell a rare character.

    vocab_size: V; ids that only the tokenizer knows, from V on, are left out (Gemma-3's image token has no row in a text model)."""
    table = tokenizer.get_vocab()
    byte_tokens = BYTE_FALLBACK if BYTE_FALLBACK[0] in table else BYTE_LEVEL
    ids = {*eos_token_ids, *tokenizer.all_special_ids, *(table[token] for token in byte_tokens if token in table)}
    if tokenizer.chat_template:
        ids |= set(render_prompt(tokenizer, [{"role": "user", "content": ""}]))
        template = chat_template(tokenizer)
        ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in template}
    return sorted(i for i in ids if vocab_size is None or i < vocab_size)
