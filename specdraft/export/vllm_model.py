"""vLLM's EAGLE-3 drafter with a low-rank head: logits = W_up (W_down h), never multiplied out. Runs inside vLLM only.

Everything but the head is vLLM's own, the map from draft ids to the target's included. W_up [D, R] is split over ranks as any head is
there, W_down [R, H] is the same on all. Letters: H width, D rows of the head, R rank, n rows.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM


class LowRankLMHead(torch.nn.Module):
    """Holds `lm_head.down.weight` [R, H] and `lm_head.up.weight` [D, R]."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, prefix: str):
        super().__init__()
        self.down = ReplicatedLinear(hidden_size, rank, bias=False, prefix=f"{prefix}.down", return_bias=False)
        self.up = ParallelLMHead(vocab_size, rank, prefix=f"{prefix}.up")

    @property
    def weight(self) -> torch.nn.Parameter:
        """What newer versions of vLLM look at to see whether a drafter's head is its own."""
        return self.up.weight


class LowRankLogits(torch.nn.Module):
    """What vLLM's models call for logits: its own processor, on the projected states."""

    def __init__(self, processor: LogitsProcessor):
        super().__init__()
        self.processor = processor

    def forward(self, head: LowRankLMHead, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[n, H] -> [n, D]"""
        return self.processor(head.up, head.down(hidden_states))

    def get_top_tokens(self, head: LowRankLMHead, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n]: the argmax, without gathering logits over ranks."""
        return self.processor.get_top_tokens(head.up, head.down(hidden_states))


class SlimSpecEagle3(Eagle3LlamaForCausalLM):
    """The drafter of a folder whose config.json has this architecture and `head_rank`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        self.lm_head = LowRankLMHead(config.hidden_size, config.draft_vocab_size, config.head_rank, "lm_head")
        self.logits_processor = LowRankLogits(self.logits_processor)
