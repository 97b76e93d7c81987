"""Runs speculators' Eagle3DraftModel on tiny random weights and writes down all that `test_speculators.py` compares with ours.

Runs in .venv-speculators, where neither our package nor its versions are installed, so it imports nothing of ours; documents are packed,
shifted, masked and scored by speculators' own code. What it does not know: how our unroll lays out its rows.

    .venv-speculators/bin/python tests/parity/record_speculators.py [--out FILE] [--seed 1 --hidden 64 --vocab 256 ...]

The file: `weights/` and `inputs/` in bf16 (small, and exact in the fp32 that everything is computed in), then for each case
`logits` [K, N, S] over the N packed rows, `loss`, `loss_by_step` [K] and `grad/<weight>`.

Letters: T tokens of a document, N rows of the pack, H width, V target vocabulary, S draft vocabulary, K steps.
"""

import argparse
import json
import zlib
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.losses import exp_loss_decay, loss_function, resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from transformers import LlamaConfig

DECAY = 0.8
PADDING = 2  # empty rows at the end of the pack
DOCUMENTS = [(10, range(3, 8)), (8, range(2, 8))]  # tokens, and which of them are the answer
FLAGS = ["norm_before_residual", "norm_output", "fc_norm", "norm_before_fc"]
LOSSES = ["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"]

# One document that is all answer, so that both libraries supervise the same rows: the loss of speculators' own forward pass.
# Two packed documents with prompts: speculators' losses, over the rows that both supervise.
CASES = {
    "packed_full": {"steps": 4, "flag": None, "trimmed": False},
    "packed": {"steps": 4, "flag": None, "trimmed": True},
    **{f"packed_{flag}": {"steps": 4, "flag": flag, "trimmed": True} for flag in FLAGS},
    **{f"whole_k{steps}": {"steps": steps, "flag": None, "trimmed": True} for steps in (1, 2, 3, 4)},
}


def draw(name: str, shape: tuple[int, ...], seed: int, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """Normal numbers that depend on the name alone, and that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    return (mean + std * torch.randn(shape, generator=generator)).bfloat16().float()


def make_inputs(sizes: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """The documents, as speculators' data sets give them before they are shifted and packed."""
    documents = []
    for d, (length, answer) in enumerate(DOCUMENTS):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[list(answer)] = True
        ids = draw(f"ids{d}", (length, sizes.vocab), sizes.seed).argmax(-1)
        taps = draw(f"taps{d}", (length, 3 * sizes.hidden), sizes.seed)
        last = draw(f"last{d}", (length, sizes.hidden), sizes.seed)
        documents.append(
            {"input_ids": ids, "loss_mask": mask, "hidden_states": taps, "verifier_last_hidden_states": last}
        )
    return documents


def make_model(sizes: argparse.Namespace, flag: str | None, trimmed: bool) -> Eagle3DraftModel:
    """A drafter whose weights of one name are the same in every case."""
    layer = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=sizes.hidden // 4,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=sizes.draft_vocab if trimmed else sizes.vocab,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        **({flag: True} if flag else {}),
    )
    model = Eagle3DraftModel(config)
    t2d = torch.zeros(sizes.vocab, dtype=torch.bool)
    t2d[draw("t2d", (sizes.vocab,), sizes.seed).topk(sizes.draft_vocab).indices] = True
    draft_ids = t2d.nonzero()[:, 0]
    model.load_vocab_mappings(t2d, draft_ids - torch.arange(len(draft_ids)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # a norm
                parameter.copy_(draw(name, parameter.shape, sizes.seed, mean=1.0, std=0.2))
            elif "lm_head" in name:
                head = draw(name, (sizes.vocab, sizes.hidden), sizes.seed, std=2 * sizes.hidden**-0.5)
                parameter.copy_(head[draft_ids] if trimmed else head)
            else:
                parameter.copy_(draw(name, parameter.shape, sizes.seed, std=parameter.shape[1] ** -0.5))
    model.lm_head.weight.requires_grad_(True)  # speculators freezes it; its gradient is part of what we compare
    return model


def run(model: Eagle3DraftModel, documents: list[dict], steps: int) -> dict:
    """One training step's forward pass of packed documents: native loss and metrics, logits [K, N, S], targets [N, S]."""
    seen: dict[str, list] = {"draft": [], "verifier": []}
    hooks = [
        model.lm_head.register_forward_hook(lambda module, args, out: seen["draft"].append(out)),
        model.verifier_lm_head.register_forward_hook(lambda module, args, out: seen["verifier"].append(out)),
    ]
    samples = []
    for document in documents:
        length = len(document["input_ids"])
        samples.append(document | {"lengths": torch.tensor([length]), "position_ids": torch.arange(length)})
    rows = sum(len(document["input_ids"]) - 1 for document in documents)
    collate = CollateFn(rows + PADDING, model.hidden_size, dtype=torch.float32, preprocess=shift_batch)
    pack = {key: value for key, value in collate(samples).items() if isinstance(value, torch.Tensor)}
    loss_config = resolve_loss_config("kl_div", "eager")
    _, loss, metrics = model(**pack, ttt_steps=steps, ttt_step_loss_decay=DECAY, loss_config=loss_config)
    for hook in hooks:
        hook.remove()
    return {"loss": loss, "metrics": metrics, "logits": torch.cat(seen["draft"]), "targets": seen["verifier"][0][0]}


def shared_rows(documents: list[dict], step: int) -> torch.Tensor:
    """Packed rows that both libraries supervise at a step, [N]: all tokens that a row has read, and its label, are answer."""
    supervised = []
    for document in documents:
        mask = document["loss_mask"].tolist()
        supervised += [i + 2 + step < len(mask) and all(mask[i + 1 : i + 3 + step]) for i in range(len(mask) - 1)]
    return torch.tensor(supervised + [False] * PADDING)


def loss_over(out: dict, masks: list[torch.Tensor]) -> torch.Tensor:
    """speculators' loss of each step [K], with the masks of the rows [N] given to it."""
    kl = resolve_loss_config("kl_div", "eager")["kl_div"][0]
    losses = []
    for k, mask in enumerate(masks):
        logits, targets, mask = (x[None, : len(x) - k] for x in (out["logits"][k], out["targets"].roll(-k, 0), mask))
        decay = partial(exp_loss_decay, gamma=DECAY)
        losses.append(loss_function(logits, targets, mask, torch.full(mask.shape, k), loss_fn=kl, decay_fn=decay))
    return torch.stack(losses)


def record_case(model: Eagle3DraftModel, documents: list[dict], steps: int, whole: bool) -> dict[str, torch.Tensor]:
    """All that is compared of one case."""
    if whole:
        first = dict(documents[0], loss_mask=torch.ones(DOCUMENTS[0][0], dtype=torch.bool))
        first["loss_mask"][-1] = False  # the last token has no label: speculators would supervise the row that reads it
        out = run(model, [first], steps)
        by_step = torch.stack([out["metrics"][f"loss_{k}_sum"] for k in range(steps)])
        loss, found = out["loss"], {}
    else:
        out = run(model, documents, steps)
        by_step = loss_over(out, [shared_rows(documents, k) for k in range(steps)])
        loss, found = by_step.sum(), {"logits": out["logits"]}
        found["native_loss"] = out["loss"]
        found["native_rows"] = torch.stack([out["metrics"][f"full_acc_{k}_total"] for k in range(steps)])
        for name in LOSSES:
            fn = resolve_loss_config(name, "eager")[name][0]
            values = [fn(out["logits"][k][None], out["targets"].roll(-k, 0)[None])[0] for k in range(steps)]
            found[f"row_loss/{name}"] = torch.stack(values)  # wrapped in the last k rows, where nothing is supervised
    loss.backward()
    found |= {"loss": loss, "loss_by_step": by_step}
    return found | {f"grad/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("speculators.safetensors"))
    for name, size in {"seed": 0, "hidden": 16, "vocab": 64, "draft_vocab": 24}.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=size)
    sizes = parser.parse_args()
    torch.set_num_threads(1)
    documents = make_inputs(sizes)
    tensors = {f"inputs/{d}/{key}": value for d, document in enumerate(documents) for key, value in document.items()}
    for name, case in CASES.items():
        model = make_model(sizes, case["flag"], case["trimmed"])
        # The first case has both heads whole, of V rows; the others have those of the map.
        for key, weight in model.state_dict().items():
            tensors.setdefault(f"weights/{key}", weight)
        found = record_case(model, documents, case["steps"], whole=name.startswith("whole"))
        tensors |= {f"{name}/{key}": value for key, value in found.items()}
    for key, tensor in tensors.items():
        given = key.startswith(("weights/", "inputs/")) and tensor.is_floating_point()
        tensors[key] = tensor.detach().to(torch.bfloat16 if given else tensor.dtype).contiguous()
    versions = {name: version(name) for name in ("speculators", "torch", "transformers")}
    shape = {key: value for key, value in vars(sizes).items() if key != "out"}
    record = {"sizes": shape, "decay": DECAY, "cases": CASES, "versions": versions}
    sizes.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, sizes.out, {"record": json.dumps(record)})
    print(f"{sizes.out}: {len(tensors)} tensors, {sizes.out.stat().st_size / 1000:.0f} kB, {versions}")


if __name__ == "__main__":
    main()
