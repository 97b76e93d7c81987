"""Reads a target from a Hugging Face folder, a GGUF file or the Hub; refuses what is not a complete decoder-only model.

It knows nothing of taps, caches or drafters: it returns a Hugging Face model and its tokenizer.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specdraft.config import UserError
from specdraft.models import thin_products
from specdraft.models.lean import MODEL_TYPES
from specdraft.provenance import has_bf16_products

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
NEEDED_IN_CONFIG = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")


def load_model(
    where: str, dtype: torch.dtype, device: str, revision: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (frozen weights in `dtype` on `device`) and tokenizer of a folder, a .gguf file or a Hub id.

    Raises:
        UserError: nothing there, no config, not a causal language model, needs remote code, incomplete or corrupt
            weights, no tokenizer, an unreachable Hub.
    """
    require_device(device)
    source, gguf = _locate(where)
    options: dict[str, Any] = {"trust_remote_code": False}  # left open, transformers asks at a terminal
    options |= {"revision": revision} if revision is not None else {}
    if gguf is not None:
        options["gguf_file"] = gguf
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except Exception as error:  # whatever a foreign file makes a parser raise
        raise UserError(_explain(where, error)) from None
    _require_decoder(where, config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:
        raise UserError(
            f"target {where}: its tokenizer cannot be read ({_brief(error)}); put the tokenizer's files there"
        ) from None
    if gguf is not None:
        options |= _gguf_options()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=supported_dtype(dtype, device, config.model_type), output_loading_info=True, **options
        )
    except Exception as error:
        raise UserError(
            f"target {where}: its weights cannot be read ({_brief(error)}); fetch the model again"
        ) from None
    bad = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if bad:
        raise UserError(
            f"target {where}: {len(bad)} weights are missing or misshapen, such as {bad[0]}; fetch the model again"
        )
    return model.to(device).eval().requires_grad_(False), tokenizer


def require_device(device: str) -> None:
    """Raises UserError for a device that torch does not see here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device: got {device!r} ({_brief(error)}), allowed: cpu, or an accelerator that torch sees here"
        ) from None


def supported_dtype(dtype: torch.dtype, device: str, model_type: str) -> torch.dtype:
    """bf16 becomes fp32 on a processor that has no products in bf16, unless thin_products.py makes up for them: in the families
    of lean.py, which use it."""
    if (
        dtype != torch.bfloat16
        or has_bf16_products(device)
        or (model_type in MODEL_TYPES and thin_products.available())
    ):
        return dtype
    logging.getLogger(__name__).warning("this processor has no bf16 products: the target runs in fp32")
    return torch.float32


def _locate(where: str) -> tuple[str, str | None]:
    """-> folder or Hub id, and the GGUF file in it, if that is what holds the weights."""
    path = Path(where).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"target {where}: got a file, allowed: a model folder, a .gguf file or a Hub id")
        return str(path.parent), path.name
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists():
            return str(path), None
        if len(ggufs) == 1:
            return str(path), ggufs[0].name
        if ggufs:
            raise UserError(f"target {where}: the folder has {len(ggufs)} .gguf files; name one of them")
        raise UserError(
            f"target {where}: the folder has neither config.json nor a .gguf file; give a Hugging Face model folder"
        )
    if not HUB_ID.fullmatch(where) or where.startswith("."):
        raise UserError(f"target {where}: no such folder or file; give a model folder, a .gguf file or a Hub id")
    return where, None


def _require_decoder(where: str, config) -> None:
    kind = f"target {where}: got a {config.model_type} model"
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{kind} (encoder-decoder), allowed: decoder-only language models")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{kind}, which has no causal language model in transformers; allowed: decoder-only language models"
        )
    missing = [key for key in NEEDED_IN_CONFIG if not hasattr(config, key)]
    if missing:
        raise UserError(
            f"{kind} whose config has no {missing[0]}, allowed: text-only models with learned positions or rotary"
        )
    trained_as = (config.architectures or ["?"])[0]
    if "MaskedLM" in trained_as:
        raise UserError(f"{kind} trained as {trained_as} (an encoder), allowed: decoder-only language models")


def _gguf_options() -> dict:
    try:
        from transformers import GgufConfig
    except ImportError:  # older versions always unpack the weights
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _explain(where: str, error: Exception) -> str:
    """The line for a config that cannot be read: transformers' own errors run over many."""
    text = _brief(error)
    if "trust_remote_code" in str(error):
        return f"target {where}: needs code of its own (trust_remote_code), which is not run; allowed: transformers' models"
    if Path(where).expanduser().exists():
        return f"target {where}: its config cannot be read ({text}); give a Hugging Face model folder"
    return (
        f"target {where}: no such folder, and the Hub does not have it or cannot be reached ({text}); "
        "give a local model folder"
    )


def _brief(error: Exception, limit: int = 160) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + "..."
