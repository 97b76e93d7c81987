"""A new drafter for a target: its shape from the target's config, its first weights from the target's own.

The target's last layer, final norm and head do nearly what the drafter's must, so copying them saves a good part of the
training (docs/log.md has the figures). It knows nothing of data or losses; features for the whitened head are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from specdraft.config import UserError, require_positive
from specdraft.data.vocab import VocabMap, require_same_map
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.eagle3_layer import Eagle3Config, rotary_tables
from specdraft.models.heads import Components, Head, HeadConfig, LowRankHead, TrimmedHead
from specdraft.models.target import TargetModel


@dataclass
class DrafterConfig:
    """What one chooses about a drafter's body; everything else is the target's. The head has a config of its own.

    body_init: `target` copies the target's last layer where the shapes agree (fresh weights elsewhere), `random` does not.
    copying: one key/value head starts as one that copies (copying.py).
    intermediate_size: width of the MLP; None = the target's.   tap_layers: the target's layers whose inputs it
    reads; None = (2, L//2, L-3).
    """

    body_init: Literal["target", "random"] = "target"
    copying: bool = True
    intermediate_size: int | None = None
    tap_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False

    def __post_init__(self) -> None:
        require_positive({"drafter.intermediate_size": self.intermediate_size})


def new_drafter(
    target: TargetModel,
    config: DrafterConfig,
    head: HeadConfig,
    vocab_map: VocabMap | None = None,
    features: Tensor | None = None,
) -> Eagle3Drafter:
    """A drafter with its first weights, fp32, on the target's device. features [N, H]: last states of the target (inputs of its
    final norm), for a `whitened_svd` head. Random weights come from torch's default generator: seed it before."""
    drafter = Eagle3Drafter(eagle3_config(target, config, head), vocab_map)
    _random_body(drafter)
    if config.body_init == "target":
        _copy_body(drafter, target)
    if head.init != "random":
        init_head(drafter, target, head.init, features)
    return drafter.to(target.device).bind(target.embedding_weight)


@torch.no_grad()
def warm_start(drafter: Eagle3Drafter, trained: Eagle3Drafter, where: str) -> None:
    """Take over all weights of a trained drafter; `where` names it in errors.

    Raises:
        UserError: a head over another vocabulary map, whose rows would come to mean other tokens (fault 18, with both hashes); a
            drafter of another shape, or of other settings that no tensor tells of.
    """
    require_same_map(drafter.lm_head.vocab_map, trained.lm_head.vocab_map, where)
    _require_same_settings(drafter.config, trained.config, where)
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in trained.state_dict().items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise UserError(
                f"{where}: {name} is {found.get(name, 'missing')}, expected {wanted.get(name, 'nothing of that name')}; "
                "give a drafter of the same shape, or change drafter.* and head.* to its shape"
            )
    drafter.load_state_dict(trained.state_dict())


def _require_same_settings(wanted: Eagle3Config, found: Eagle3Config, where: str) -> None:
    names = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
    names += ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "rope_parameters")
    for name in names:
        has, expected = getattr(found, name), getattr(wanted, name)
        if has == expected or (name == "rope_parameters" and _same_angles(wanted, found)):
            continue
        advice = (
            f"set drafter.{name} to {has}" if hasattr(DrafterConfig, name) else "give a drafter that has the target's"
        )
        raise UserError(f"{where}: has {name} {has}, expected {expected}; {advice}")


def _same_angles(a: Eagle3Config, b: Eagle3Config) -> bool:
    """A rotary scheme can be written in several ways."""
    return all(torch.equal(x, y) for x, y in zip(rotary_tables(a), rotary_tables(b), strict=True))


def trimmed_copy(drafter: Eagle3Drafter, vocab_map: VocabMap) -> Eagle3Drafter:
    """The same drafter with its head cut to a map's rows, without training; body weights are shared. See TrimmedHead.from_full."""
    kind = "lowrank" if isinstance(drafter.lm_head, LowRankHead) else "trimmed"
    head = TrimmedHead.from_full(drafter.lm_head, vocab_map)
    return _with_head(drafter, head, replace(drafter.config.head, kind=kind))


def factored_copy(drafter: Eagle3Drafter, rank: int, parts: Components) -> Eagle3Drafter:
    """The same drafter with its head in two factors, without training; body weights are shared. See LowRankHead.from_dense."""
    head = LowRankHead.from_dense(drafter.lm_head, drafter.config.vocab_size, rank, parts)
    return _with_head(drafter, head, replace(drafter.config.head, kind="lowrank", rank=rank))


def _with_head(drafter: Eagle3Drafter, head: Head, config: HeadConfig) -> Eagle3Drafter:
    copy = Eagle3Drafter(replace(drafter.config, head=config), head.vocab_map)
    for name, module in drafter.named_children():
        setattr(copy, name, head if name == "lm_head" else module)
    for name, buffer in drafter.named_buffers(recurse=False):
        setattr(copy, name, buffer)
    return copy.train(drafter.training).bind(drafter.embedding)


def eagle3_config(target: TargetModel, config: DrafterConfig, head: HeadConfig) -> Eagle3Config:
    """The target's widths, rotary scheme and positions; and the choices of `config`.

    Raises:
        UserError: choices that clash; a target without rotary positions, or with a scheme whose numbers are for a part of a head; no width
            of an MLP, there or in `config`.
    """
    if config.fc_norm and config.norm_before_fc:
        raise UserError("drafter: fc_norm and norm_before_fc exclude each other; choose one")
    hf = target.hf_config
    heads, width = hf.num_attention_heads, config.intermediate_size or getattr(hf, "intermediate_size", None)
    if getattr(hf, "rope_parameters", None) is None:
        raise UserError(
            f"target {target.name}: has no rotary positions, which its drafter would take over; choose another target"
        )
    if width is None:
        raise UserError(
            f"drafter.intermediate_size: got none, and the target {target.name} does not name its own; give one"
        )
    rope = dict(hf.rope_parameters)
    if "rope_type" not in rope:  # one scheme for each kind of layer (Gemma-3): the drafter's layer sees everything
        rope = dict(rope["full_attention"])
    part = rope.pop("partial_rotary_factor", None)  # the drafter's layer turns the whole of a head
    if part not in (None, 1) and rope["rope_type"] not in ("default", "proportional"):
        raise UserError(
            f"target {target.name}: rotary scheme {rope['rope_type']} with partial_rotary_factor {part}, allowed: 1 with this scheme; "
            "choose another target"
        )
    return Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=getattr(hf, "num_key_value_heads", None) or heads,
        head_dim=getattr(hf, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_positions,
        rope_parameters=rope,
        tap_layers=target.tap_layers,
        rms_norm_eps=next((getattr(hf, name) for name in NORM_EPS if hasattr(hf, name)), Eagle3Config.rms_norm_eps),
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
        fc_norm=config.fc_norm,
        norm_before_fc=config.norm_before_fc,
        head=head,
    )


def init_head(drafter: Eagle3Drafter, target: TargetModel, init: str, features: Tensor | None) -> None:
    """Rows (or the best low-rank stand-in) of the target's head."""
    rows = target.head_weight.float()
    head = drafter.lm_head
    if not isinstance(head, LowRankHead):
        head.init_from(rows)
    elif init == "whitened_svd":
        assert features is not None, "whitened_svd needs features"
        normed = target.norm(features).double()
        head.init_from(rows, normed.T @ normed / len(normed), token_frequency(target, features))
    else:
        head.init_from(rows)


@torch.inference_mode()
def token_frequency(target: TargetModel, features: Tensor) -> Tensor:
    """How often the target says each token: its law averaged over last states [N, H]; no token is at exactly 0. [V]"""
    total = torch.full((target.vocab_size,), 1e-9 * len(features), device=features.device)
    for chunk in features.split(256):
        total += target.teacher_logits(chunk).float().softmax(-1).sum(0)
    return total / len(features)


def _random_body(drafter: Eagle3Drafter) -> None:
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 * 0.5)


@torch.no_grad()
def _copy_body(drafter: Eagle3Drafter, target: TargetModel) -> None:
    """fc passes the last tap on; attention reads it as the target's last layer does (the embedding half starts at small
    random weights); MLP and norms are that layer's. A tensor of another shape keeps its random start, and a norm that the target's layer
    has not stays 1."""
    h = drafter.config.hidden_size
    source = target.model.get_decoder().layers[-1]
    weights = source.state_dict()
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, -h:] += torch.eye(h)
    for name, parameter in drafter.midlayer.named_parameters():
        weight = weights.get(name)
        if "norm" in name or weight is None:
            continue
        if weight.shape == parameter.shape:
            parameter.copy_(weight)
        elif weight.shape == (parameter.shape[0], h):  # q, k, v read [embedding, hidden]
            parameter[:, :h].mul_(0.2)
            parameter[:, h:] = weight
    before_mlp = (
        "pre_feedforward_layernorm" if hasattr(source, "pre_feedforward_layernorm") else "post_attention_layernorm"
    )
    # of mean 0 and mean square 1: a norm makes its scale of it, also one that stores w - 1, centres or adds a bias
    sign = torch.ones(h, dtype=target.dtype, device=target.device)
    sign[1::2] = -1
    for own, norm in (
        (drafter.midlayer.hidden_norm, getattr(source, "input_layernorm", None)),
        (drafter.midlayer.post_attention_layernorm, getattr(source, before_mlp, None)),
        (drafter.norm, target.norm),
    ):
        if norm is not None:
            own.weight.copy_((norm(sign) - norm(-sign)) * sign / 2)


NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")  # in a target's config
