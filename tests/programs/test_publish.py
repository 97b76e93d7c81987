"""recipes/publish.py and import_drafter.py as users run them; the Hub is a server on this machine, the client is the real one."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from fake_hub import TOKEN, FakeHub
from safetensors.torch import load_file

from specdraft import cli, summary
from specdraft.config import UserError, parse_config
from specdraft.data.vocab import VocabMap
from specdraft.decoding.measure import drafts
from specdraft.export import origin as origin_module
from specdraft.export.card import Publication, model_card
from specdraft.export.formats import import_drafter
from specdraft.export.origin import find_origin
from specdraft.models.checkpoint import load_drafter, read_taps, save_drafter
from specdraft.models.heads import HeadConfig
from specdraft.models.initialise import DrafterConfig, new_drafter
from specdraft.models.target import TargetModel
from specdraft.testing import TINY_VOCAB, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
FOLDER_FILES = {"README.md", "config.json", "model.safetensors", "provenance.json"}


def load_program(name):
    """A program's names, as a module that its type hints can be looked up in."""
    spec = importlib.util.spec_from_file_location(f"program_{name}", ROOT / "recipes" / f"{name}.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


PUBLISH, IMPORT = load_program("publish"), load_program("import_drafter")
TRIM = load_program("trim_head")
DRIVER = """
import sys, time
time.sleep = lambda seconds: None  # the client waits between its tries
from pathlib import Path
from specdraft.config import UserError
from specdraft.export.hub import publish
try:
    print("published:", publish(Path(sys.argv[1]), "me/drafter", revision=sys.argv[2], private=True))
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A tiny target with a card, and a run's folder: a low-rank drafter and its summary."""
    folder = tmp_path_factory.mktemp("publish")
    tiny_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (folder / "target" / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# A target\n")
    target = TargetModel.load(str(folder / "target"), dtype=torch.float32)
    drafter = new_drafter(target, DrafterConfig(), HeadConfig(rank=6, init="svd"))
    run = {"name": "tiny", "prompts": "builtin", "train": {"epochs": 3}}
    save_drafter(folder / "run" / "drafter", drafter, target, "", run)
    (folder / "run" / "summary.json").write_text(json.dumps(SUMMARY | summary.sizes(drafter)))
    return folder


PROVENANCE = {
    "date": "2026-11-30",
    "versions": {"torch": "2.13.0"},
    "machine": {"processor": "Abacus 3000", "cores": 2, "threads": 2, "gpus": []},
}
SUMMARY = {
    "draft": "chain of 2",
    **dict.fromkeys(("speedup", "speedup_low", "speedup_high", "tau"), 1.5),
    **dict.fromkeys(
        ("tokens_per_second", "target_tokens_per_second", "draft_ms", "head_ms", "verify_ms", "sample_ms", "target_ms"),
        10.0,
    ),
    "prompts": 40,
    "temperature": 0.0,
    "dtype": "bfloat16",
    "conditional_acceptance": [0.5, None],
    "match_rate": 1.0,
    "head": {"kind": "lowrank", "rows": 320, "width": 6},
    "held_out": {"hit": [0.5]},
    "answer_tokens": 5,
    "parameters": 9,
    "head_parameters": 3,
    "minutes": 1.0,
    "training": {"epochs": 3.0, "tokens": 7, "minutes": 1.0},
    "provenance": PROVENANCE,
}


@pytest.fixture
def hub():
    hub = FakeHub()
    yield hub
    hub.close()


def environment(hub, workdir, token=TOKEN):
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    mine = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(workdir / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return keep | mine | ({"HF_TOKEN": token} if token else {}) | {"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}


def push(hub, workdir, revision="main", token=TOKEN):
    """The library's publish, in a process of its own: the client reads its settings once."""
    folder = workdir / "folder"
    folder.mkdir(exist_ok=True)
    for name in FOLDER_FILES:
        (folder / name).write_text("{}")
    command = [sys.executable, "-c", DRIVER, str(folder), revision]
    done = subprocess.run(
        command, env=environment(hub, workdir, token), capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert TOKEN not in done.stdout + done.stderr, "a token is never printed"
    return done


def run_main(module, kind, *flags):
    module["main"](parse_config(module[kind], list(flags)))


def publish_flags(workdir, name, *more):
    return [
        f"--drafter={workdir / 'run' / 'drafter'}",
        f"--target={workdir / 'target'}",
        "--base-model=org/target",
        "--repo=me/drafter",
        f"--output={workdir / name}",
        *more,
    ]


# --- the folder and its card -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle3", "factors", "speculators", "sglang", "specdraft"])
def test_dry_run_writes_the_folder_and_uploads_nothing(kind, workdir, capsys):
    flags = ["--factors=True"] if kind == "factors" else [f"--format={kind}"]
    run_main(PUBLISH, "PublishConfig", *publish_flags(workdir, kind, *flags))
    folder, out = workdir / kind, capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == FOLDER_FILES
    assert "dry run" in out
    assert "nothing was uploaded; with --push it goes to me/drafter, public if new, branch main" in out
    target = TargetModel.load(str(workdir / "target"), dtype=torch.float32)
    import_drafter(folder, target)
    card = (folder / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "org/target"
    assert header["license"] == "cc-by-4.0", "the target's, from its card"
    assert header["tags"] == ["speculative-decoding", "eagle3", "lowrank"]
    expected = [
        "low rank (SlimSpec, arXiv 2605.10453): 320 x 6 and 6 x 32",
        "1.50x",
        "Abacus 3000, 2 cores",
        '"epochs": 3',
        "prompts (`builtin`)",
        target.hash,
        "cc-by-4.0",
        "**vLLM**",
        "**SGLang**",
        "**speculators**",
        "specdraft import-drafter --source me/drafter",
    ]
    assert [text for text in expected if text not in card] == []
    assert ("pip install specdraft   # beside vLLM" in card) == (kind == "factors")
    assert ("sglang.launch_server" in card) == (kind == "sglang")
    assert ("SpeculatorModel.from_pretrained" in card) == (kind == "speculators")
    if kind == "speculators":
        settings = json.loads((folder / "config.json").read_text())
        assert settings["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert json.loads((folder / "provenance.json").read_text())["run"]["train"] == {"epochs": 3}


def test_weights_are_rounded_once_and_their_origin_stays(workdir):
    """In the dtype that they have on disk they come out bit for bit, whatever the target is loaded in."""
    target = TargetModel.load(str(workdir / "target"), dtype=torch.float32)
    drafter, source, written = (
        new_drafter(target, DrafterConfig(), HeadConfig("full")),
        workdir / "wide",
        workdir / "whole",
    )
    save_drafter(source, drafter, target, "", {}, torch.float32)
    flags = publish_flags(workdir, "whole", "--format=specdraft", "--dtype=float32")
    run_main(PUBLISH, "PublishConfig", f"--drafter={source}", *flags[1:])
    before, after = (load_file(folder / "model.safetensors") for folder in (source, written))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(x, x.bfloat16().float()) for x in before.values())
    origins = [json.loads((folder / "provenance.json").read_text()) for folder in (source, written)]
    assert origins[0] == origins[1]


@pytest.mark.parametrize("format", ["eagle3", "speculators", "sglang", "specdraft"])
def test_the_commands_of_a_card_say_all_that_they_need(format, workdir):
    """The branch, the target, and how a folder counts layers where nothing in it says so; our own programs take their flags."""
    flags = [f"--format={format}", "--revision=other"]
    run_main(PUBLISH, "PublishConfig", *publish_flags(workdir, f"commands-{format}", *flags))
    card = (workdir / f"commands-{format}" / "README.md").read_text()
    own = [shlex.split(line) for line in card.splitlines() if line.startswith("specdraft ")]
    assert {words[1] for words in own} == {"import-drafter", "publish"}
    for _, name, *words in own:
        assert name in cli.programs()
        module, kind = {"publish": (PUBLISH, "PublishConfig"), "import-drafter": (IMPORT, "ImportConfig")}[name]
        config = parse_config(module[kind], words)
        assert config.target == "org/target"
        if name == "import-drafter":
            ids = {"eagle3": "vllm", "sglang": "sglang"}.get(format, "auto")
            assert (config.revision, config.layer_ids) == ("other", ids)
    assert ("--speculative-draft-model-revision other" in card) == (format == "sglang")


def test_another_drafters_summary_is_not_taken_for_this_ones(workdir, capsys):
    """recipes/trim_head.py may write beside the summary of the drafter that it trims."""
    target = TargetModel.load(str(workdir / "target"), dtype=torch.float32)
    drafter = new_drafter(target, DrafterConfig(), HeadConfig(rank=5, init="svd"))
    save_drafter(workdir / "run" / "smaller", drafter, target, "", {})
    flags = publish_flags(workdir, "smaller", f"--drafter={workdir / 'run' / 'smaller'}")
    run_main(PUBLISH, "PublishConfig", *flags)
    assert "summary.json of this drafter: the card will say that nothing was measured" in capsys.readouterr().out
    assert "Not measured." in (workdir / "smaller" / "README.md").read_text()
    with pytest.raises(UserError, match="is of another drafter, by its head and size"):
        run_main(PUBLISH, "PublishConfig", *flags, f"--summary={workdir / 'run' / 'summary.json'}")


def test_a_drafter_in_a_folder_of_any_name_needs_no_repository(workdir):
    (workdir / "my first run").mkdir()
    (workdir / "my first run" / "drafter").symlink_to(workdir / "run" / "drafter")
    flags = [f"--drafter={workdir / 'my first run' / 'drafter'}", "--repo="]
    run_main(PUBLISH, "PublishConfig", *publish_flags(workdir, "spaces", *flags))
    assert (workdir / "spaces" / "README.md").exists()


@pytest.mark.parametrize("name", ["", "chain of 3", "tree of 6, 2 deep, from 300 tokens"])
def test_the_snippet_of_a_new_drafters_card_runs(name, workdir, tmp_path, capsys):
    """It drafts as was measured."""
    target = TargetModel.load(str(workdir / "target"), dtype=torch.float32)
    drafter = load_drafter(workdir / "run" / "drafter", target)
    drafter.frequent = VocabMap(torch.arange(300), target.vocab_size)
    save_drafter(tmp_path / "drafter", drafter, target, "", {})
    found = SUMMARY | ({"draft_arguments": str(drafts(drafter, target.device)[name])} if name else {})
    card = summary.model_card({"target": str(workdir / "target"), "prompts": "builtin"}, target, found)
    (snippet,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    exec(snippet.replace("<this folder>", str(tmp_path / "drafter")), {})
    assert capsys.readouterr().out.strip()


# --- where the target comes from -------------------------------------------------------------------------------------


def hub_that_says(monkeypatch, **header):
    card = SimpleNamespace(to_dict=lambda: header)
    monkeypatch.setattr(origin_module, "model_info", lambda *_, **__: SimpleNamespace(card_data=card, sha="abc123"))


@pytest.mark.parametrize(
    ("name", "hub", "license", "quantisation"),
    [
        ("default", "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0", "Q4_1"),
        ("gemma-3-270m", "google/gemma-3-270m", "gemma", "Q4_K_M"),
    ],
)
def test_a_packaged_target_is_not_the_hubs_own_weights(name, hub, license, quantisation, workdir):
    """The card says so, and its commands name the weights that the drafter was made for."""
    origin = find_origin(name, None, None, {})
    assert (origin.base_model, origin.base_revision, origin.license) == (hub, None, {"license": license})
    target = TargetModel.load(str(workdir / "target"), dtype=torch.float32)
    drafter = new_drafter(target, DrafterConfig(), HeadConfig(rank=6, init="svd"))
    card = model_card(Publication("me/d", "main", "sglang", False, origin, "", {}, {}), drafter, target)
    assert f"of a {quantisation} GGUF of it, dequantised: `--target {name}` of this library." in card
    assert f"--target {name} --layer-ids sglang" in card
    assert f"--target {name} --format eagle3" in card
    assert f"--model-path {hub} " in card


def test_the_commit_of_the_target_on_the_hub(monkeypatch):
    hub_that_says(monkeypatch, license="mit")
    assert find_origin("org/target", None, None, {}).base_revision == "abc123"
    assert find_origin("org/target", None, "v1", {}).base_revision == "v1"
    assert find_origin("org/target", "org/other", None, {}).base_revision is None
    assert find_origin("HuggingFaceTB/SmolLM2-135M-Instruct", None, None, {}).base_revision == "abc123"


def test_a_licence_of_its_own_has_a_name_and_a_link(monkeypatch):
    own = {"license": "other", "license_name": "own-terms", "license_link": "LICENSE"}
    hub_that_says(monkeypatch, **own)
    link = "https://huggingface.co/org/target/blob/main/LICENSE"
    assert find_origin("org/target", None, None, {}).license == own | {"license_link": link}
    given = {"license": "other", "license_name": "n", "license_link": "https://x.y"}
    assert find_origin("org/target", None, None, given).license == given
    with pytest.raises(UserError, match="license: got other, which needs a name and a link; give --license-link"):
        find_origin("org/target", None, None, given | {"license_link": None})
    hub_that_says(monkeypatch, license="other")
    with pytest.raises(UserError, match="give --license-name and --license-link"):
        find_origin("org/target", None, None, {})


def test_what_was_published_can_be_imported(workdir, capsys):
    run_main(PUBLISH, "PublishConfig", *publish_flags(workdir, "again", "--format=sglang"))
    flags = [f"--source={workdir / 'again'}", f"--target={workdir / 'target'}", f"--output={workdir / 'imported'}"]
    run_main(IMPORT, "ImportConfig", *flags, "--layer-ids=sglang")
    assert "full head of 320 x 32, reads the target's layers (2, 4, 5)" in capsys.readouterr().out
    assert "not measured here" in (workdir / "imported" / "README.md").read_text()
    with pytest.raises(UserError, match="exists; give a new folder"):
        run_main(IMPORT, "ImportConfig", *flags)


def test_a_drafter_of_other_layers_is_trimmed_and_published(workdir, capsys):
    """Neither program is told which layers: config.json says it."""
    target = TargetModel.load(str(workdir / "target"), dtype=torch.float32, tap_layers=(1, 3, 6))
    drafter = new_drafter(target, DrafterConfig(), HeadConfig("full", init="svd"))
    save_drafter(workdir / "other" / "drafter", drafter, target, "", {})
    VocabMap(torch.arange(TINY_VOCAB - 20), TINY_VOCAB).save(workdir / "v.safetensors")
    cut = workdir / "cut" / "drafter"
    flags = [f"--drafter={workdir / 'other' / 'drafter'}", f"--target={workdir / 'target'}"]
    run_main(TRIM, "TrimConfig", *flags, f"--vocab={workdir / 'v.safetensors'}", f"--output={cut}")
    assert read_taps(cut) == (1, 3, 6)
    run_main(PUBLISH, "PublishConfig", *publish_flags(workdir, "taps", f"--drafter={cut}"))
    assert "| 1, 3, 6 |" in (workdir / "taps" / "README.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repo=no owner"], "repo 'no owner'"),
        (["--repo=alone"], "allowed: owner/name"),
        (["--repo=", "--push"], "repo: got none, needed with --push"),
        (["--factors=True", "--format=sglang"], "allowed with --format eagle3 only"),
        (["--drafter=nowhere"], "has no config.json"),
        (["--summary=nowhere.json"], "summary nowhere.json: cannot be read"),
        (["--target=nowhere/at-all", "--license=mit"], "nowhere/at-all"),
    ],
)
def test_bad_input_is_one_line(flags, message, workdir):
    with pytest.raises(UserError) as caught:
        run_main(PUBLISH, "PublishConfig", *publish_flags(workdir, "bad"), *flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (workdir / "bad").exists()


def test_a_target_of_unknown_name_or_licence(workdir, tmp_path):
    flags = [flag for flag in publish_flags(workdir, "bad") if not flag.startswith("--base-model")]
    with pytest.raises(UserError, match="give its Hub id"):
        run_main(PUBLISH, "PublishConfig", *flags)
    (tmp_path / "target").mkdir()
    with pytest.raises(UserError, match="org/target says none, and a drafter carries its target's"):
        run_main(PUBLISH, "PublishConfig", *publish_flags(workdir, "bad", f"--target={tmp_path / 'target'}"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "source: got none"),
        ("no/where", "HF_HUB_OFFLINE is set|cannot be reached"),
        ("not a name", "no such folder; give a folder"),
    ],
)
def test_a_source_that_is_not_there(source, message, workdir):
    with pytest.raises(UserError, match=message) as caught:
        run_main(IMPORT, "ImportConfig", f"--source={source}", f"--output={workdir / 'nothing'}")
    assert "\n" not in str(caught.value)


# --- the upload ------------------------------------------------------------------------------------------------------


def test_the_program_pushes_what_it_wrote(hub, workdir):
    flags = publish_flags(workdir, "pushed", "--push=True", "--private=True", "--revision=factors", "--factors=True")
    command = [sys.executable, str(ROOT / "recipes" / "publish.py"), *flags]
    done = subprocess.run(
        command, env=environment(hub, workdir), capture_output=True, text=True, timeout=300, cwd=workdir
    )
    assert done.returncode == 0, done.stderr
    assert f"published: {hub.url}/me/drafter/commit/" in done.stdout
    repo = hub.repos["me/drafter"]
    assert repo["private"]
    assert repo["branches"]["main"] == {}
    assert repo["branches"]["factors"] == {name: (workdir / "pushed" / name).read_bytes() for name in FOLDER_FILES}
    assert TOKEN not in done.stdout + done.stderr
    for path in [*(workdir / "pushed").iterdir(), *(workdir / "run").rglob("*.*")]:
        assert TOKEN.encode() not in path.read_bytes(), path


def test_a_second_push_keeps_what_is_there(hub, workdir):
    assert push(hub, workdir).returncode == 0
    hub.repos["me/drafter"]["branches"]["main"]["notes.txt"] = b"mine"
    assert push(hub, workdir).returncode == 0
    assert set(hub.repos["me/drafter"]["branches"]["main"]) == FOLDER_FILES | {"notes.txt"}
    assert hub.seen.count("create") == 1


NOTHING = "nothing was changed"
EMPTY = "nothing was published, the repository was created and has no files yet"
FAILURES = [
    ("whoami", 401, "could not log in: the Hub answered 401", "run `hf auth login`, or set HF_TOKEN; " + NOTHING),
    ("whoami", "cut", "could not log in: the connection failed", NOTHING),
    ("info", 503, "could not look for the repository: the Hub answered 503", NOTHING),
    ("create", 403, "could not create the repository: the Hub answered 403", "the token may not write there"),
    (
        "create",
        "cut",
        "could not create the repository: the connection failed",
        "the repository may have been created; it has no files",
    ),
    (
        "branch",
        500,
        "could not create the branch: the Hub answered 500",
        "the repository was created and has no files yet",
    ),
    ("preupload", 503, "could not upload: the Hub answered 503", EMPTY),
    ("upload", 500, "could not upload", EMPTY),
    ("upload", "cut", "could not upload: the connection failed", EMPTY),
    ("commit", 409, "could not upload: the Hub answered 409", EMPTY),
    ("commit", 500, "could not upload: the Hub answered 500", EMPTY),
    ("commit", "cut", "could not upload: the connection failed", EMPTY),
    ("commit", "cut after", "could not upload: the connection failed", "the files may have arrived"),
]


@pytest.mark.parametrize(("step", "failure", "what", "state"), FAILURES, ids=lambda value: str(value)[:12])
def test_a_push_that_fails_says_what_is_there(step, failure, what, state, hub, workdir):
    hub.fail[step] = failure
    done = push(hub, workdir, revision="new" if step == "branch" else "main")
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stdout + done.stderr
    assert lines[-1].startswith("error: publish me/drafter: "), done.stderr
    assert what in lines[-1]
    assert state in lines[-1]
    assert "Traceback" not in done.stderr
    files = hub.repos.get("me/drafter", {"branches": {"main": {}}})["branches"]["main"]
    assert set(files) == (FOLDER_FILES if failure == "cut after" else set())


@pytest.mark.parametrize(("step", "failure"), [("branch", "cut after"), ("revision", 503), ("commit", 500)])
def test_a_branch_of_an_existing_repository_may_have_been_made(step, failure, hub, workdir):
    hub.repos["me/drafter"] = {"private": False, "branches": {"main": {}}, "commits": 1}
    hub.fail[step] = failure
    done = push(hub, workdir, revision="new")
    assert "the branch new may have been made, no file was changed" in done.stderr
    assert "nothing was changed" not in done.stderr
    assert "new" in hub.repos["me/drafter"]["branches"]


def test_when_nobody_can_tell_it_says_so(hub, workdir):
    """The connection breaks while the commit is made, and the Hub cannot be asked any more."""
    hub.repos["me/drafter"] = {"private": False, "branches": {"main": {}}, "commits": 1}
    commit, hub.fail["commit"] = hub.commit, "cut after"

    def commit_and_die(*args):
        hub.fail["revision"] = 503
        return commit(*args)

    hub.commit = commit_and_die
    done = push(hub, workdir)
    assert "it is not known whether the files arrived: look at" in done.stderr


def test_without_a_token(hub, workdir):
    done = push(hub, workdir, token=None)
    assert "could not log in: no token: run `hf auth login`, or set HF_TOKEN; nothing was changed" in done.stderr
    assert hub.seen == []
