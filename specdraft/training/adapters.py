"""What is trained while decoding: low-rank adapters on a drafter's products (LoRA, arXiv 2106.09685, by peft), or all of its weights.

Both train an fp32 copy of the drafter and say what its weights have become; the drafter itself is never part of a graph. They know
nothing of losses or of when to train.

Letters: H width, R rank of a low-rank head, r rank of an adapter, S rows of the head, n live rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdraft.config import UserError
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.heads import Head, HeadConfig, LowRankHead

ADAPTER = "default"


class Trained(Protocol):
    """module: unrolls in fp32; its `lm_head.logits(hidden [N, H], live [n] rows or None)` gives [N, n]. named: what is trained."""

    module: Eagle3Drafter
    named: dict[str, nn.Parameter]

    def frozen(self) -> contextlib.AbstractContextManager[Eagle3Drafter]:
        """A module with the weights that the drafter came with."""

    def distance(self) -> Tensor:
        """||W - W_0||_F^2 over all that is trained."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names of the drafter's parameters, and what they have become."""

    def reset(self) -> None:
        """Back to W_0."""


class Lora:
    """W = W_0 + s B A with A [r, in], B [out, r], B = 0 at the beginning; W_0 is frozen.

    head: also adapt both factors of a low-rank head.   Raises UserError: peft is not installed; `head` for another head.
    """

    def __init__(self, drafter: Eagle3Drafter, head: bool, rank: int, scale: float, seed: int):
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError:
            raise UserError("online.method lora: peft is not installed; pip install 'specdraft[peft]'") from None
        if head and not isinstance(drafter.lm_head, LowRankHead):
            raise UserError(
                f"online.head: got a {drafter.config.head.kind} head with method lora, allowed: a low-rank one; leave it out"
            )
        self.scale = scale
        self.module = fp32_copy(drafter, FactorsHead(drafter.lm_head, scale) if head else SharedHead(drafter.lm_head))
        self.module.requires_grad_(False)
        targets = [name for name, part in self.module.named_modules() if isinstance(part, nn.Linear)]
        config = LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=targets, init_lora_weights=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, self.module, ADAPTER)
        self.layers = {name: self.module.get_submodule(name) for name in targets}
        self.named = {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}
        self._first = {name: weight.detach().clone() for name, weight in self.named.items()}

    @contextlib.contextmanager
    def frozen(self) -> Iterator[Eagle3Drafter]:
        for layer in self.layers.values():
            layer.enable_adapters(False)
        try:
            yield self.module
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)

    def distance(self) -> Tensor:
        """||s B A||_F^2 = s^2 tr(B^T B A A^T): r x r products alone."""
        total = torch.zeros((), device=self.module.fc.weight.device)
        for layer in self.layers.values():
            a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            total = total + self.scale**2 * ((b.T @ b) * (a @ a.T)).sum()
        return total

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self.layers.items():
            weight = layer.get_base_layer().weight + layer.get_delta_weight(ADAPTER)
            yield HEAD_NAMES.get(name, f"{name}.weight"), weight

    @torch.no_grad()
    def reset(self) -> None:
        for name, weight in self.named.items():
            weight.copy_(self._first[name])


class Full:
    """Every weight of the body, and with `head` of the head: what LoRA is compared with."""

    def __init__(self, drafter: Eagle3Drafter, head: bool):
        self.module, self._frozen = (fp32_copy(drafter, SharedHead(drafter.lm_head)) for _ in range(2))
        if head:
            self.module.lm_head, self._frozen.lm_head = OwnHead(drafter.lm_head), OwnHead(drafter.lm_head)
        self._frozen.requires_grad_(False)
        self.named = dict(self.module.requires_grad_(True).named_parameters())

    @contextlib.contextmanager
    def frozen(self) -> Iterator[Eagle3Drafter]:
        yield self._frozen

    def distance(self) -> Tensor:
        pairs = zip(self.module.parameters(), self._frozen.parameters(), strict=True)
        return sum((own - first).square().sum() for own, first in pairs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.named.items():
            yield name, weight.detach()

    @torch.no_grad()
    def reset(self) -> None:
        self.module.load_state_dict(self._frozen.state_dict())


class SharedHead(nn.Module):
    """The drafter's own head, read in fp32 and not trained: no copy of it is made."""

    def __init__(self, head: Head):
        super().__init__()
        self._of = {"head": head}  # a dict, so that nn.Module does not take it in

    def logits(self, hidden: Tensor, live: Tensor | None = None) -> Tensor:
        """[N, H] -> [N, n]"""
        head = self._of["head"]
        weight = head.weight.detach()
        rows = weight if live is None else weight[live]
        projected = F.linear(hidden, head.down.detach().float()) if isinstance(head, LowRankHead) else hidden
        return F.linear(projected, rows.float())


class OwnHead(nn.Module):
    """An fp32 copy of the head that is trained. Parameters named as the head's own."""

    def __init__(self, head: Head):
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().float().clone())
        self.down = nn.Parameter(head.down.detach().float().clone()) if isinstance(head, LowRankHead) else None

    def logits(self, hidden: Tensor, live: Tensor | None = None) -> Tensor:
        """[N, H] -> [N, n]"""
        projected = hidden if self.down is None else F.linear(hidden, self.down)
        return F.linear(projected, self.weight if live is None else self.weight[live])


class FactorsHead(nn.Module):
    """The factors of a low-rank head as two products, which adapters can be put on."""

    def __init__(self, head: LowRankHead, scale: float):
        super().__init__()
        self.scale = scale
        rank, width = head.down.shape
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, len(head.weight), bias=False)
        for layer, factor in ((self.down, head.down), (self.up, head.weight)):
            layer.weight = nn.Parameter(factor.detach().float().clone(), requires_grad=False)

    def logits(self, hidden: Tensor, live: Tensor | None = None) -> Tensor:
        """[N, H] -> [N, n]: of W_up and B the live rows only."""
        live = slice(None) if live is None else live
        rows = self.up.get_base_layer().weight[live]
        if not self.up.disable_adapters:
            rows = rows + self.scale * self.up.lora_B[ADAPTER].weight[live] @ self.up.lora_A[ADAPTER].weight
        return F.linear(self.down(hidden), rows)


def fp32_copy(drafter: Eagle3Drafter, head: nn.Module) -> Eagle3Drafter:
    """The drafter's body in fp32, with another head."""
    config = replace(
        drafter.config, head=HeadConfig("lowrank", rank=1)
    )  # the smallest that there is; it gives way to `head`
    with torch.random.fork_rng(devices=[]):
        copy = Eagle3Drafter(config)
    copy.lm_head = nn.Identity()
    body = {name: weight for name, weight in drafter.state_dict().items() if not name.startswith("lm_head.")}
    copy.load_state_dict(body)
    copy.lm_head = head
    return copy.to(drafter.fc.weight.device).eval().bind(drafter.embedding)


HEAD_NAMES = {"lm_head.down": "lm_head.down", "lm_head.up": "lm_head.weight"}  # FactorsHead -> LowRankHead
