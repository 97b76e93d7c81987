"""Our unroll, rows, losses and their gradients against speculators 0.9.0's Eagle3DraftModel, to 1e-5 in fp32.

The numbers were recorded by `record_speculators.py`; `make test-speculators` records them anew, at two sizes, and runs this
file on the result (SPECULATORS_RECORDING names it). Where the two libraries define different things, the mapping from one to the
other is written out here, and docs/parity.md says why ours is right.

speculators packs documents in one row of N = sum (T_d - 1): packed row n of document d is our row i = n - first row of d.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

from specdraft.data.vocab import VocabMap
from specdraft.losses import LOSSES, LossConfig, acceptance, teacher_law
from specdraft.models.eagle3 import Eagle3Drafter
from specdraft.models.eagle3_layer import Eagle3Config
from specdraft.models.heads import HeadConfig
from specdraft.models.target import TargetModel
from specdraft.testing import tiny_model
from specdraft.training.metrics import FIELDS
from specdraft.training.objective import Objective, ObjectiveConfig, Rows, denominators, supervised_counts

COMMITTED = Path(__file__).with_name("speculators.safetensors")
RECORDING = Path(os.environ.get("SPECULATORS_RECORDING", COMMITTED))
TAPS = (2, 4, 5)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
EPS = 1e-5  # speculators divides by rows + 1e-5


def read(path):
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["record"])  # noqa: SIM118


TENSORS, RECORD = read(RECORDING)
CASES = RECORD["cases"]
PACKED = [name for name in CASES if name.startswith("packed")]


def value(key):
    tensor = TENSORS[key]
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@pytest.fixture(scope="module")
def target():
    """A target with the recorded final norm and head; its layers are not run."""
    model = tiny_model("llama", RECORD["sizes"]["vocab"], RECORD["sizes"]["hidden"], tied=False)
    with torch.no_grad():
        model.model.norm.weight.copy_(value("weights/verifier_norm.weight"))
        model.lm_head.weight.copy_(value("weights/verifier_lm_head.weight"))
    return TargetModel.from_model(model, tap_layers=TAPS)


def make_drafter(case):
    """Ours, with speculators' weights; its first layer is called layers.0 there, midlayer in EAGLE-3's own checkpoints."""
    sizes = RECORD["sizes"]
    config = Eagle3Config(
        hidden_size=sizes["hidden"],
        intermediate_size=2 * sizes["hidden"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=sizes["hidden"] // 4,
        vocab_size=sizes["vocab"],
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tap_layers=TAPS,
        rms_norm_eps=1e-6,
        head=HeadConfig("trimmed" if case["trimmed"] else "full"),
        **({case["flag"]: True} if case["flag"] else {}),
    )
    tables = {key: value(f"weights/{key}") for key in ("d2t", "t2d")}
    vocab_map = VocabMap.from_tensors(tables, sizes["vocab"]) if case["trimmed"] else None
    drafter = Eagle3Drafter(config, vocab_map).bind(value("weights/embed_tokens.weight"))
    weights = {name: value("weights/" + peer_name(name)) for name in drafter.state_dict()}
    if vocab_map is not None:
        weights["lm_head.weight"] = weights["lm_head.weight"][vocab_map.target_ids]
    drafter.load_state_dict(weights)
    return drafter


def peer_name(name):
    return name.replace("midlayer.", "layers.0.")


def answer_masks():
    return [value(f"inputs/{d}/loss_mask") for d in (0, 1)]


def batch(documents):
    """Documents side by side, padded: taps [B, T, A*H], tokens [B, T], last states [B, T, H]."""
    keys = ("hidden_states", "input_ids", "verifier_last_hidden_states")
    return [pad_sequence([value(f"inputs/{d}/{key}") for d in documents], batch_first=True) for key in keys]


def pack():
    """(document, our row) of each row of the pack."""
    return [(d, i) for d, mask in enumerate(answer_masks()) for i in range(len(mask) - 1)]


def places(rows):
    """(document, our row) of each supervised row."""
    return list(zip(rows.sequence.tolist(), rows.index.flatten()[rows.slot].tolist(), strict=True))


@pytest.mark.parametrize("name", PACKED)
def test_logits(name):
    """Fault 22: every row and step, two documents side by side. A row reads no token past its own document; speculators' reads the next
    document's there, and is left out. Its rotary positions are ours plus one, and only their differences count."""
    drafter, steps = make_drafter(CASES[name]), CASES[name]["steps"]
    taps, ids, _ = batch([0, 1])
    rows = torch.arange(ids.shape[1] - 1).expand(2, -1)
    with torch.no_grad():
        logits = drafter.lm_head.logits(drafter.unroll(taps, ids, rows, steps))
    theirs, compared = value(f"{name}/logits"), 0
    for n, (d, i) in enumerate(pack()):
        exist = min(steps, len(answer_masks()[d]) - 1 - i)  # steps whose last token to read, x[i + 1 + k], exists
        assert_close(logits[:exist, d, i], theirs[:exist, n], **CLOSE)
        compared += exist
    assert compared == 52  # 9 + 7 rows of 4 steps, less 3 + 2 + 1 at the end of each document


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(name, target):
    """KL, decay 0.8, mean over rows, summed over steps: the loss of speculators' own forward pass for the document that is all
    answer, its loss functions over the rows that both supervise for the two with prompts; and the gradient of every weight."""
    drafter, steps = make_drafter(CASES[name]), CASES[name]["steps"]
    masks = [torch.ones_like(answer_masks()[0])] if name.startswith("whole") else answer_masks()
    denominator = denominators(supervised_counts(masks, steps), "rows") + EPS
    config = LossConfig(position_weights="geometric", decay=RECORD["decay"])
    objective = Objective(drafter, target, ObjectiveConfig(steps, loss=config))
    taps, ids, last = batch(range(len(masks)))
    loss, sums = objective(taps, last, ids, Rows.from_masks(masks, steps), denominator)
    loss.backward()
    by_step = RECORD["decay"] ** torch.arange(steps) * sums[FIELDS.index("loss")] / denominator
    assert_close(by_step.float(), value(f"{name}/loss_by_step"), **CLOSE)
    assert_close(loss.detach(), value(f"{name}/loss"), **CLOSE)
    gradients = {f"{name}/grad/{peer_name(key)}": parameter.grad for key, parameter in drafter.named_parameters()}
    assert gradients.keys() == {key for key in TENSORS if key.startswith(f"{name}/grad/")}
    for key, gradient in gradients.items():
        assert gradient.abs().max() > 1e-3, f"{key}: too small to compare"
        assert_close(gradient, value(key), **CLOSE, msg=lambda text, key=key: f"{key}: {text}")


PEER_LOSSES = {
    "forward_kl": "kl_div",
    "reverse_kl": "rkl",
    "js": "jsd",
    "ce": "ce",
    "tv": "tv",
    "lk_alpha": "nla",
    "lk_hybrid": "lk_hybrid",
}


@pytest.mark.parametrize("name", ["packed", "packed_full"])
@pytest.mark.parametrize("loss", PEER_LOSSES)
def test_row_losses(name, loss, target):
    """Each loss, row by row, with two mappings. The label of speculators' CE is the teacher's argmax inside S, ours the text's token.
    Its TV and LK losses take p renormalised on S, ours the true p: alpha as it counts them is too high (fault 29)."""
    drafter, steps = make_drafter(CASES[name]), CASES[name]["steps"]
    rows = Rows.from_masks(answer_masks(), steps)
    teacher = Objective(drafter, target, ObjectiveConfig(steps)).teacher(batch([0, 1])[-1], rows)
    log_p, log_mass, _ = teacher_law(teacher, 1.0, torch.float32)
    packed = torch.tensor([pack().index(place) for place in places(rows)])
    for k, valid in enumerate(rows.valid):
        p, mass, n = log_p[teacher.index[k, valid]], log_mass[teacher.index[k, valid]], packed[valid]
        q, label = value(f"{name}/logits")[k, n].log_softmax(-1), p.argmax(-1)
        if loss in ("tv", "lk_alpha", "lk_hybrid") and CASES[name]["trimmed"]:
            assert (acceptance(p, q) < 1 - value(f"{name}/row_loss/tv")[k, n]).all()
            p, mass = p - mass[:, None], torch.zeros_like(mass)
        theirs = value(f"{name}/row_loss/{PEER_LOSSES[loss]}")[k, n]
        assert_close(LOSSES[loss](p, q, mass, label, LossConfig()), theirs, **CLOSE)


def test_supervised_rows():
    """Faults 20 and 22. Of (row i, step k) speculators asks only that the token at i + 1 + k, counted through the pack, is answer.
    Ours are among them. The others have a label that is no answer, have read a prompt token as if drafted, or take the next document
    for their own."""
    masks, steps = answer_masks(), CASES["packed"]["steps"]
    rows = Rows.from_masks(masks, steps)
    found = Counter()
    for k, count in enumerate(value("packed/native_rows").tolist()):
        ours = {place for place, valid in zip(places(rows), rows.valid[k].tolist(), strict=True) if valid}
        theirs = {place for place, (d, i) in zip(pack(), pack()[k:], strict=False) if masks[d][i + 1]}
        assert ours <= theirs
        assert len(theirs) == count
        for d, i in theirs - ours:
            if i + 1 + k >= len(masks[d]):
                found["next document"] += 1
            else:
                found["label" if masks[d][i + 1 : i + 2 + k].all() else "prompt"] += 1
    assert int(rows.valid.sum()) == 24
    assert found == {"label": 8, "prompt": 8, "next document": 3}


def test_native_loss_is_over_those_rows():
    """The rule that test_supervised_rows ascribes to speculators gives the loss that it returned."""
    answer = torch.tensor([answer_masks()[d][i + 1] for d, i in pack()])
    total = 0.0
    for k in range(CASES["packed"]["steps"]):
        rows = answer[k:]
        losses = value("packed/row_loss/kl_div")[k, : len(rows)]
        total += RECORD["decay"] ** k * (losses * rows).sum() / (rows.sum() + EPS)
    assert_close(total, value("packed/native_loss"), **CLOSE)


@pytest.mark.speculators
def test_recording_is_current():
    """speculators, run again at the committed sizes, gives what is committed."""
    assert RECORDING != COMMITTED, "run make test-speculators, which makes a recording to compare with"
    tensors, record = read(COMMITTED)
    assert record["sizes"] == RECORD["sizes"]
    assert record["versions"]["speculators"] == RECORD["versions"]["speculators"]
    assert tensors.keys() == TENSORS.keys()
    for key, tensor in tensors.items():
        assert_close(TENSORS[key], tensor, atol=1e-6, rtol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
