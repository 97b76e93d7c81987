"""Whatever a user gives the programs: one line that says what is wrong, exit code 2, and nothing written or lost. In this process, since
starting many is slow; it runs the same files as the main program."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdraft.data.vocab import VocabMap
from specdraft.models.checkpoint import save_drafter
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.testing import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
PROMPT = {"turns": ["Write of the sea."]}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A tiny target, a drafter of it, and whatever can be wrong with either and with data."""
    folder = tmp_path_factory.mktemp("hostile")
    tiny_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = TargetModel.load(str(folder / "target"), dtype=torch.float32)
    torch.manual_seed(0)
    drafter = new_drafter(target, DrafterConfig(), HeadConfig("full", init="svd"))
    save_drafter(folder / "good", drafter, target, "", {"name": "tiny"}, torch.float32)
    make_drafters(folder)
    make_data(folder)
    return folder


def make_drafters(folder):
    """Copies of the good one, each with one file spoilt."""

    def spoil(name, file, content):
        (folder / name).mkdir()
        for path in (folder / "good").iterdir():
            (folder / name / path.name).write_bytes(path.read_bytes())
        (folder / name / file).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    config = json.loads((folder / "good" / "config.json").read_text())
    spoil("cut", "model.safetensors", (folder / "good" / "model.safetensors").read_bytes()[:500])
    spoil("no_width", "config.json", config | {"drafter": {"hidden_size": 32, "tap_layers": [2, 4, 5]}})
    spoil("negative", "config.json", config | {"drafter": config["drafter"] | {"intermediate_size": -5}})
    spoil("no_angle", "config.json", config | {"drafter": config["drafter"] | {"rope_parameters": {}}})
    spoil("no_dtype", "config.json", config | {"dtype": "float7"})
    spoil("other", "config.json", config | {"target": config["target"] | {"hash": "0" * 16}})
    spoil("no_provenance", "provenance.json", b"{")
    spoil("list_provenance", "provenance.json", ["2026-11-30"])
    spoil("odd_provenance", "provenance.json", {"versions": ["torch"]})
    for name, settings in FOREIGN.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
        save_file({"fc.weight": torch.ones(2, 2)}, folder / name / "model.safetensors")


LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
FOREIGN = {
    "foreign_names": {"architectures": 5},
    "foreign_eagle": LLAMA | {"eagle_config": ["2", "4"]},
    "foreign_heads": LLAMA | {"num_attention_heads": 0},
    "foreign_rope": LLAMA | {"rope_theta": "large"},
    "foreign_ours": {"format": "specdraft-eagle3-1", "drafter": None},
    "foreign_bare": LLAMA,
}


def make_data(folder):
    lines = {
        "prompts.jsonl": json.dumps(PROMPT),
        "latin.jsonl": b'{"text": "caf\xe9"}',
        "empty.jsonl": "",
        "no_turns.jsonl": '{"turns": []}',
        "twice.jsonl": '{"id": "a", "text": "one"}\n{"id": "a", "text": "two"}',
        "digits.jsonl": '{"text": ' + "9" * 5000 + "}",
        "deep.jsonl": '{"text": ' + "[" * 100_000,
        "all.jsonl": '{"text": "one", "category": "all"}',
        "list.json": "[]",
        "half.jsonl": '{"id": "a", "input_ids": [1',
    }
    for name, content in lines.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "home").mkdir()
    (folder / "home" / "thesis.tex").write_text("years of work")
    VocabMap(torch.arange(5), 5).save(folder / "small.safetensors")
    VocabMap(torch.arange(300), 320).save(folder / "map.safetensors")
    save_file({"t2d": torch.tensor(True), "d2t": torch.zeros(1, dtype=torch.int64)}, folder / "point.safetensors")
    (folder / "broken").mkdir()
    (folder / "broken" / "results.jsonl").write_text('{"speedup": 1}\n')
    (folder / "broken" / "real.json").write_text("{")
    (folder / "broken" / "long.json").write_text("[]")


def sizes(folder):
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def refused(workdir, monkeypatch, capfd):
    """Runs a program that is to refuse; returns the line."""
    monkeypatch.chdir(workdir)

    def call(program, *flags):
        before = sizes(workdir)
        threads = torch.get_num_threads()
        monkeypatch.setattr(sys, "argv", [program, *flags])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        assert torch.get_num_threads() == threads
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert (stop.value.code, len(lines)) == (2, 1), lines
        assert sizes(workdir) == before, "something was written"
        return lines[0]

    return call


BENCH = ["--target=target", "--dtype=float32", "--prompts=prompts.jsonl", "--output=bench"]
ONE = ["--drafters", "good"]
BAD_BENCH = {
    "no drafter": ([], "drafters: got none"),
    "no temperature": ([*ONE, "--temperatures"], "temperatures"),
    "dtype": ([*ONE, "--dtype=int8"], "--dtype"),
    "threads": ([*ONE, "--threads=0"], "threads: got 0"),
    "repeats": ([*ONE, "--repeats=-1"], "repeats: got -1"),
    "batches": ([*ONE, "--batches", "1", "0"], "batches: got 0"),
    "per task": ([*ONE, "--per-task=-1"], "per_task: got -1"),
    "new tokens": ([*ONE, "--max-new-tokens=0"], "max_new_tokens: got 0"),
    "many new tokens": (
        [*ONE, "--max-new-tokens=1000000"],
        "max_new_tokens: got 1000000, which leaves room for none of 1",
    ),
    "cost prompts": ([*ONE, "--cost-prompts=-1"], "cost_prompts: got -1"),
    "seed": ([*ONE, f"--seed={10**30}"], "seed: got 1000000000"),
    "temperature": ([*ONE, "--temperatures", "0", "-1"], "temperature: got -1.0"),
    "NaN": ([*ONE, "--temperatures", "nan"], "temperature: got nan"),
    "block": ([*ONE, "--length=libraspec", "--policies.libraspec-block=0"], "libraspec_block: got 0"),
    "balance": ([*ONE, "--length=libraspec", "--policies.libraspec-a=nan"], "libraspec_a: got nan"),
    "evospec": ([*ONE, "--policies.evospec.refresh-every=0"], "refresh_every: got 0"),
    "no list": ([*ONE, "--vocab=frequency"], "policies.frequency: got none"),
    "folder for a list": ([*ONE, "--vocab=frequency", "--policies.frequency=home"], "policies.frequency: got home"),
    "another list": (
        [*ONE, "--vocab=frequency", "--policies.frequency=small.safetensors"],
        "made for 5 tokens, the target has 320",
    ),
    "folder for prompts": ([*ONE, "--prompts=home"], "home: cannot be read"),
    "no prompts": ([*ONE, "--prompts=empty.jsonl"], "got no prompts"),
    "not UTF-8": ([*ONE, "--prompts=latin.jsonl"], "not UTF-8"),
    "no turns": ([*ONE, "--prompts=no_turns.jsonl"], "not empty"),
    "ids": ([*ONE, "--prompts=twice.jsonl"], "line 1 too"),
    "digits": ([*ONE, "--prompts=digits.jsonl"], "line 1: not valid JSON"),
    "brackets": ([*ONE, "--prompts=deep.jsonl"], "line 1: not valid JSON"),
    "task all": ([*ONE, "--prompts=all.jsonl"], "a task named 'all'"),
    "file for a folder": ([*ONE, "--output=prompts.jsonl"], "output prompts.jsonl: cannot be made (File exists)"),
    "foreign results": ([*ONE, "--output=broken"], "is not what this program writes"),
    "foreign folder": (["--drafters", "home"], "has no config.json"),
    "cut weights": (["--drafters", "cut"], "cannot be read"),
    "no width": (["--drafters", "no_width"], "config.json: has no intermediate_size"),
    "negative width": (["--drafters", "negative"], "config.json describes no drafter"),
    "no angle": (["--drafters", "no_angle"], "config.json describes no drafter"),
    "unknown dtype": (["--drafters", "no_dtype"], "dtype 'float7', allowed: bfloat16"),
    "other target": (["--drafters", "other"], "trained for the target"),
    "self in trees": (["--drafters", "sparse_self", "--trees", "eagle2"], "sparse_self drafts chains"),
    "self in batches": (["--drafters", "sparse_self", "--batches", "2"], "got trees chain and batches 2"),
    "self, long": (["--drafters", "sparse_self", "--policies.most=30"], "sparse.longest: got 20, allowed: 30 or more"),
    "self, budget": (["--drafters", "sparse_self", "--policies.sparse.budget=nan"], "budget: got nan"),
}


@pytest.mark.parametrize("case", BAD_BENCH)
def test_bench(refused, case):
    flags, message = BAD_BENCH[case]
    assert message in refused("eval/bench.py", *BENCH, *flags)


SELF = ["--target=target", "--dtype=float32", "--output=self", "--contexts=400", "--max-new-tokens=24"]
BAD_SELF = {
    "context": (["--contexts", "400", "500"], "got 524 positions for the longest, allowed: the 512 of the target"),
    "no context": (["--contexts", "0"], "contexts: got 0"),
    "prompts": (["--prompts=0"], "prompts: got 0"),
    "new tokens": (["--max-new-tokens=-3"], "max_new_tokens: got -3"),
    "rounds": (["--rounds=0"], "rounds: got 0"),
    "threads": (["--threads=-1"], "threads: got -1"),
    "seed": (["--seed=-1"], "seed: got -1"),
    "dtype": (["--dtype=int8"], "--dtype"),
    "budget": (["--budgets", "0.1", "nan"], "budget: got nan"),
    "length": (["--lengths", "0"], "lengths: got (0,)"),
    "acceptance": (["--acceptance", "1.5"], "acceptance: got (1.5,)"),
    "heads": (["--random-model.heads=3"], "random_model: got hidden 512, heads 3"),
    "layers": (["--random-model.layers=0"], "random_model.layers: got 0"),
    "device": (["--parts=long", "--acceptance=0.5", "--device=abacus"], "device: got 'abacus'"),
    "file for a folder": (["--output=prompts.jsonl/deep"], "output prompts.jsonl/deep: cannot be made"),
    "foreign output": (["--output=broken"], "broken/real.json: is not JSON"),
    "odd output": (["--output=broken", "--parts=long"], "broken/long.json: is no JSON object with key, rows"),
    "target": (["--target=home"], "neither config.json nor a .gguf file"),
}


@pytest.mark.parametrize("case", BAD_SELF)
def test_sparse_self(refused, case):
    flags, message = BAD_SELF[case]
    assert message in refused("eval/sparse_self.py", *SELF, *flags)


BAD_PROMPTS = {
    "held out": (["--held-out-every=0"], "held_out_every: got 0"),
    "max prompts": (["--max-prompts=-1"], "max_prompts: got -1"),
    "max rows": (["--max-rows=0"], "max_rows: got 0"),
    "no source": (["--source"], "source"),
    "weights": (
        ["--source", "builtin", "prompts.jsonl", "--output=new.jsonl", "--weights", "inf", "1"],
        "weights: got [inf, 1.0]",
    ),
    "NaN": (
        ["--source", "builtin", "prompts.jsonl", "--output=new.jsonl", "--weights", "nan", "1"],
        "weights: got [nan, 1.0]",
    ),
    "a source": (["--source", "prompts.jsonl", "--output=./prompts.jsonl"], "would take the place of a source"),
    "other ending": (["--output=prompts.txt"], "output: got prompts.txt"),
    "no name": (["--output=."], "output: got ."),
    "folder": (["--source=home"], "home: cannot be read"),
    "digits": (["--source=digits.jsonl"], "not valid JSON"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_make_prompts(refused, case):
    flags, message = BAD_PROMPTS[case]
    assert message in refused("data_prep/make_prompts.py", *flags)


BAD_VOCAB = {
    "folder for a map": (["--corpus=prompts.jsonl", "--output=home"], "output home: is a folder, allowed: a file"),
    "file for a folder": (
        ["--answers=half.jsonl", "--held-out=half.jsonl", "--frontier=prompts.jsonl"],
        "frontier prompts.jsonl: cannot be made",
    ),
    "seed": (["--corpus=prompts.jsonl", "--seed=-1"], "seed: got -1"),
    "corpus of bytes": (["--corpus=latin.jsonl"], "line 1: got bytes that are not UTF-8"),
    "answers of bytes": (["--answers=latin.jsonl"], "line 1: got bytes that are not UTF-8"),
    "cut answers": (["--answers=half.jsonl"], "line 1: not JSON"),
    "empty answers": (["--answers=empty.jsonl"], "got no rows"),
    "empty corpus": (["--corpus=empty.jsonl"], "nothing to count"),
    "deep corpus": (["--corpus=deep.jsonl"], "nothing to count"),
    "map for counts": (["--counts=map.safetensors"], "token counts map.safetensors"),
    "folder for counts": (["--counts=home"], "token counts home: cannot be read"),
    "NaN": (["--corpus=prompts.jsonl", "--choose=coverage", "--min-coverage=nan"], "min_coverage: got nan"),
}


@pytest.mark.parametrize("case", BAD_VOCAB)
def test_build_vocab(refused, case):
    flags, message = BAD_VOCAB[case]
    assert message in refused(
        "data_prep/build_vocab.py", "--target=target", "--output=v.safetensors", "--cache=cache", *flags
    )


BAD_TRIM = {
    "map of another target": (["--vocab=small.safetensors"], "made for 5 tokens, the target has 320"),
    "map of one number": (["--vocab=point.safetensors"], "vocabulary map point.safetensors"),
    "folder for a map": (["--vocab=home"], "vocabulary map home: no such file"),
    "text for a map": (["--vocab=prompts.jsonl"], "not a safetensors file"),
    "its own folder": (["--output=home/../good"], "got the drafter's own folder"),
    "folder of others": (["--output=home"], "holds other things"),
    "no dtype": (["--drafter=no_dtype"], "dtype 'float7'"),
    "cut weights": (["--drafter=cut"], "cannot be read"),
    "no width": (["--drafter=no_width"], "has no intermediate_size"),
}


@pytest.mark.parametrize("case", BAD_TRIM)
def test_trim_head(refused, case):
    flags, message = BAD_TRIM[case]
    common = ["--target=target", "--drafter=good", "--vocab=map.safetensors", "--output=trimmed"]
    assert message in refused("recipes/trim_head.py", *common, *flags)


@pytest.mark.parametrize("name", [*FOREIGN, "cut", "no_width", "home"])
def test_import_drafter(refused, name):
    line = refused("recipes/import_drafter.py", "--target=target", f"--source={name}", "--output=imported")
    assert name in line


BAD_PUBLISH = {
    "no provenance": (["--drafter=no_provenance"], "no_provenance/provenance.json: is not JSON"),
    "list": (["--drafter=list_provenance"], "is not one of a checkpoint, with date, versions, run"),
    "odd": (["--drafter=odd_provenance"], "is not one of a checkpoint"),
    "summary": (["--summary=list.json"], "summary list.json: is not one of a run"),
    "folder for a summary": (["--summary=home"], "summary home: cannot be read"),
    "bytes for a summary": (["--summary=latin.jsonl"], "is not one of a run"),
    "its own folder": (["--output=home/../good"], "got the drafter's own folder"),
    "base model": (["--base-model=two words"], "base_model: got 'two words'"),
    "no base model": (["--base-model="], "base_model: got ''"),
    "cut weights": (["--drafter=cut"], "cannot be read"),
}


@pytest.mark.parametrize("case", BAD_PUBLISH)
def test_publish(refused, case):
    flags, message = BAD_PUBLISH[case]
    common = ["--target=target", "--drafter=good", "--base-model=org/target", "--license=mit", "--output=published"]
    assert message in refused("recipes/publish.py", *common, *flags)


@pytest.mark.parametrize("card", [b"---\nlicense: [\n---\n", b"---\nlicense: \xff\n---\n", b"---\n- mit\n---\n"])
def test_publish_reads_odd_cards_of_targets(refused, workdir, card):
    (workdir / "target" / "README.md").write_bytes(card)
    line = refused(
        "recipes/publish.py", "--target=target", "--drafter=good", "--base-model=org/target", "--output=published"
    )
    assert line.startswith("error: license: ")
    assert "--license" in line
    (workdir / "target" / "README.md").unlink()
