"""The target's forward pass for any Hugging Face decoder-only model: its own code, our cache, hooks for the taps.

It knows nothing of families, files or tokenizers. Sliding-window layers keep all their slots and get a mask, so that
they are right after a crop too.

Letters: B rows, n new tokens, T slots in use, H width, G key/value heads, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from specdraft.config import UserError
from specdraft.models.attention import Attention, attention_of
from specdraft.models.cache import Append, KVCache

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "final_norm", "norm_f")


class GenericModel:
    """Runs a Hugging Face causal language model over a `KVCache`."""

    def __init__(self, model: PreTrainedModel):
        self.config = model.config
        self.trunk = model.get_decoder()
        self.dtype = model.get_input_embeddings().weight.dtype
        self.layers, self.norm = _layers_and_norm(self.trunk, self.config.num_hidden_layers)
        takes_cache = "cache" in inspect.signature(self.trunk.forward).parameters
        self.cache_argument = "cache" if takes_cache else "past_key_values"  # the older name

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache of `max_length` slots a row."""
        return HookedCache(batch_size, max_length, len(self.layers))

    def forward(
        self,
        input_ids: Tensor,
        cache: HookedCache | None,
        append: Append,
        taps: tuple[int, ...],
        attention: Attention | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """[B,n] -> the inputs of the layers in `taps`, each [B,n,H], and the input of the final norm [B,n,H].

        attention: what to attend with over the cache (see attention.py); None = as usual."""
        arguments = {"use_cache": False}
        if cache is not None:
            cache.append = append
            positions = append.new_slots() if append.positions is None else append.positions
            arguments = {
                self.cache_argument: cache.view,
                "use_cache": True,
                "position_ids": positions.expand(input_ids.shape[0], -1),
                "attention_mask": self._masks(append),
            }
        hooked = [*(self.layers[index] for index in taps), self.norm]
        with _inputs_of(hooked) as inputs, attention_of(self.config, attention):
            self.trunk(input_ids=input_ids, **arguments)
        return inputs[:-1], inputs[-1]

    def _masks(self, append: Append) -> Tensor | dict[str, Tensor]:
        """Masks to add, [B or 1, 1, n, width]; by kind of layer where the model tells its layers apart."""
        visible = append.causal_mask() if append.mask is None else append.mask
        window = getattr(self.config, "sliding_window", None)
        near = visible if window is None else visible & (append.distance() < window)
        masks = {"full_attention": _additive(visible, self.dtype), "sliding_attention": _additive(near, self.dtype)}
        has_kinds = getattr(self.config, "layer_types", None) is not None
        return masks if has_kinds else masks["sliding_attention"]


class HookedCache(KVCache):
    """A `KVCache` together with the view of it that a Hugging Face model takes."""

    def __init__(self, batch_size: int, max_length: int, num_layers: int, dtype: torch.dtype | None = None):
        super().__init__(batch_size, max_length, num_layers, dtype)
        self.append: Append | None = None
        self.view = Cache(layers=[CacheLayer(self, index) for index in range(num_layers)])


class CacheLayer(CacheLayerMixin):
    """One layer of the view: stores through the `KVCache` that owns the slots."""

    is_sliding = False

    def __init__(self, owner: HookedCache, index: int):
        super().__init__()
        self.owner, self.index = owner, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """[B,G,n,D] -> the slots to attend to, [B,G,width,D]. The further arguments differ between versions."""
        return self.owner.write(self.index, key_states.transpose(1, 2), value_states.transpose(1, 2), self.owner.append)

    def get_seq_length(self) -> int:
        return self.owner.append.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.append.width, 0

    def get_max_length(self) -> int:
        return self.owner.max_length

    get_max_cache_shape = get_max_length  # the older name


@contextmanager
def _inputs_of(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """A list that holds, after a forward pass inside the block, the input of each module."""
    inputs: list[Tensor] = []

    def catch(_module: nn.Module, positional: tuple, named: dict) -> None:
        inputs.append(positional[0] if positional else named["hidden_states"])

    handles = [module.register_forward_pre_hook(catch, with_kwargs=True) for module in modules]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
    assert len(inputs) == len(modules), (len(inputs), len(modules))


def _layers_and_norm(trunk: nn.Module, num_layers: int) -> tuple[nn.ModuleList, nn.Module]:
    lists = [child for child in trunk.children() if isinstance(child, nn.ModuleList) and len(child) == num_layers]
    norms = [child for name, child in trunk.named_children() if name in FINAL_NORMS]
    if len(lists) != 1 or len(norms) != 1:
        raise UserError(
            f"target: cannot find the {num_layers} decoder layers and the final norm in {type(trunk).__name__}; "
            "use a decoder-only model that keeps them as direct children of its trunk, as Llama does"
        )
    return lists[0], norms[0]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)
