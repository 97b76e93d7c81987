"""eval/serve_bench.py against servers of this machine that answer like vLLM and like SGLang."""

import importlib.util
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specdraft.config import UserError, parse_config
from specdraft.testing import tiny_tokenizer

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("program_serve_bench", ROOT / "eval" / "serve_bench.py")
sys.modules[SPEC.name] = MODULE = importlib.util.module_from_spec(SPEC)  # its type hints are looked up there
SPEC.loader.exec_module(MODULE)
PROGRAM = vars(MODULE)
VLLM_METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} %d.0
"""
SGLANG_METRICS = 'sglang:spec_accept_length{model_name="m"} 1.75\nsglang:gen_throughput{model_name="m"} 9.0\n'


class Server:
    """kind: vllm, alone (vLLM without a drafter), sglang, sglang_info (without --enable-metrics), other. Each request drafts 4 rounds of 2,
    of which 3 and then 1 are accepted. seen: the bodies of the requests. fault: status code or bytes instead of a completion."""

    def __init__(self, kind):
        self.kind, self.seen, self.fault = kind, [], None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                self.reply(*server.get(self.path))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(*server.complete(body))

            def reply(self, status, content):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def get(self, path):
        done = len(self.seen)
        pages = {
            "/v1/models": {"data": [{"id": "m"}]},
            "/metrics": {
                "vllm": (VLLM_METRICS % (4 * done, 8 * done, 4 * done, 3 * done, done)).encode(),
                "alone": b'vllm:num_requests_running{engine="0"} 0.0\n',
                "sglang": SGLANG_METRICS.encode(),
            }.get(self.kind),
            "/get_server_info": {"internal_states": [{"avg_spec_accept_length": 1.5}]}
            if self.kind == "sglang_info"
            else None,
        }
        page = pages.get(path)
        return (404, {"error": "not found"}) if page is None else (200, page)

    def complete(self, body):
        if self.fault is not None:
            return (self.fault, {"error": "no memory left"}) if isinstance(self.fault, int) else (200, self.fault)
        self.seen.append(body)
        text = f"{len(body['prompt'])} tokens"
        return 200, {"choices": [{"text": text}], "usage": {"completion_tokens": 7}}


@pytest.fixture
def serve():
    servers = []

    def start(kind):
        servers.append(Server(kind))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    tiny_tokenizer().save_pretrained(folder / "target")
    rows = [{"turns": [f"Write {i} words about the sea."]} for i in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(workdir, url, *flags):
    common = [f"--url={url}", f"--target={workdir / 'target'}", f"--prompts={workdir / 'prompts.jsonl'}"]
    PROGRAM["main"](parse_config(PROGRAM["ServeConfig"], [*common, *flags]))


def test_vllm_counters_and_a_baseline(workdir, serve, capsys):
    """The warm-up request is counted on neither side; positions: 3 of 4 rounds, then 1 of those 3."""
    alone, server = serve("alone"), serve("vllm")
    run(workdir, alone.url, f"--output={workdir / 'alone.json'}", "--concurrency=3")
    assert "the server counted no drafts" in capsys.readouterr().out
    run(workdir, server.url + "/v1/", f"--baseline={workdir / 'alone.json'}", "--concurrency=3", "--json=True")
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert (found["server"], found["model"], found["requests"], found["tokens"]) == ("vLLM", "m", 5, 35)
    assert found["tau"] == pytest.approx(2.0)  # 1 + (3 + 1) / 4
    assert found["conditional_acceptance"] == pytest.approx([3 / 4, 1 / 3])
    assert found["tokens_per_second"] == pytest.approx(35 / found["seconds"])
    assert found["match_rate"] == 1.0
    assert "100 % of the texts equal" in lines[2]
    assert len(server.seen) == 6
    prompt = server.seen[1]
    assert prompt["temperature"] == 0.0
    text = tiny_tokenizer().decode(server.seen[0]["prompt"])
    assert text == "<|im_start|>user\nWrite 0 words about the sea.<|im_end|>\n<|im_start|>assistant\n", (
        "as the library renders it"
    )


@pytest.mark.parametrize(
    ("kind", "server", "tau"), [("sglang", "SGLang", 1.75), ("sglang_info", "SGLang", 1.5), ("other", "unknown", None)]
)
def test_other_servers(kind, server, tau, workdir, serve, capsys):
    run(workdir, serve(kind).url, "--json=True")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["server"], found["tau"]) == (server, tau)


def test_what_sglang_gives_is_no_tau_of_these_requests(workdir, serve, capsys):
    """A gauge: an average of the server's own, which cannot be taken before and after."""
    run(workdir, serve("sglang").url, "--json=True")
    lines = capsys.readouterr().out.splitlines()
    assert "tau 1.75 tokens a verify round (SGLang's own average, not of these requests alone)" in lines[1]
    assert json.loads(lines[-1])["tau_is"] == "SGLang's own average, not of these requests alone"


def test_sampled_texts_are_not_compared(workdir, serve, capsys):
    server, flags = serve("vllm"), ["--temperature=0.7", "--json=True"]
    run(workdir, server.url, *flags, f"--output={workdir / 'sampled.json'}")
    capsys.readouterr()
    run(workdir, server.url, *flags, f"--baseline={workdir / 'sampled.json'}")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("x over the baseline")
    assert json.loads(lines[-1])["match_rate"] is None


def test_a_baseline_of_other_prompts_is_refused(workdir, serve):
    """As many, and as many texts."""
    server = serve("vllm")
    run(workdir, server.url, f"--output={workdir / 'mine.json'}")
    rows = [{"turns": [f"Sing {i} songs of the wind."]} for i in range(5)]
    (workdir / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = len(server.seen)
    with pytest.raises(UserError, match=r"was run with other prompts .*; give both the same --prompts and --target"):
        run(workdir, server.url, f"--prompts={workdir / 'others.jsonl'}", f"--baseline={workdir / 'mine.json'}")
    assert len(server.seen) == seen


def test_every_packaged_target_has_a_tokenizer(workdir, monkeypatch, serve):
    asked = []
    monkeypatch.setitem(PROGRAM, "packaged_target", lambda name: asked.append(name) or workdir / "target")
    for name in ("default", "gemma-3-270m"):
        run(workdir, serve("vllm").url, f"--target={name}")
    assert asked == ["default", "gemma-3-270m"]


@pytest.mark.parametrize(
    ("fault", "flags", "message"),
    [
        (500, [], 'answered 500 ({"error": "no memory left"})'),
        (b"<html>", [], "its answer is not JSON"),
        (b"{}", [], "has no text or no token count"),
        (None, ["--url=http://127.0.0.1:9"], "cannot be reached"),
        (None, ["--url=nonsense"], "cannot be reached"),
        (None, ["--target=no/where"], "its tokenizer cannot be read"),
        (None, ["--prompts=nowhere.jsonl"], "nowhere.jsonl"),
        (b"[]", [], "its answer is no JSON object"),
        (b"[" * 100_000, [], "its answer is not JSON"),
        (b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": "seven"}}', [], "no text or no token count"),
        (None, ["--count=0"], "count: got 0, allowed: 1 or more"),
        (None, ["--max-new-tokens=-1"], "max_new_tokens: got -1"),
        (None, ["--temperature=nan"], "temperature: got nan"),
        (None, ["--timeout=0"], "timeout: got 0.0, allowed: above 0"),
        (None, ["--output=/"], "output /: is a folder, allowed: a file"),
        (None, ["--baseline=nowhere.json"], "baseline nowhere.json: cannot be read"),
    ],
)
def test_faults_are_one_line(fault, flags, message, workdir, serve):
    server = serve("vllm")
    server.fault = fault
    with pytest.raises(UserError) as caught:
        run(workdir, server.url, *flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


BASELINE = {
    "texts": ["a"] * 5,
    "tokens_per_second": 1.0,
    "prompts": "0" * 16,
    "config": {"max_new_tokens": 128, "temperature": 0.0, "concurrency": 1},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": ["a"]}, "has 1 texts, this run 5"),
        ({"texts": None}, "has no list of texts, or no settings; give a file that --output wrote"),
        ({"tokens_per_second": 0.0}, "has 0.0 tokens per second"),
        ({"tokens_per_second": "fast"}, "has 'fast' tokens per second"),
        (
            {"config": BASELINE["config"] | {"concurrency": 4}},
            "was run with concurrency = 4, now 1; give both the same",
        ),
        ({"config": BASELINE["config"] | {"max_new_tokens": 64}}, "was run with max_new_tokens = 64, now 128"),
    ],
)
def test_a_baseline_that_is_none_is_refused_before_anything_runs(workdir, serve, change, message):
    server = serve("vllm")
    (workdir / "short.json").write_text(json.dumps(BASELINE | change))
    with pytest.raises(UserError, match=message):
        run(workdir, server.url, f"--baseline={workdir / 'short.json'}")
    assert server.seen == []
