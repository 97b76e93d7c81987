"""Runs prompts against a running vLLM or SGLang server: tokens per second, latency, and what the server counted of its drafts.

python eval/serve_bench.py --url http://localhost:8000 --output target_alone.json       # a server without a drafter
python eval/serve_bench.py --url http://localhost:8000 --baseline target_alone.json     # with one: speedup, equal texts, acceptance

Prompts go as token ids, rendered as the library renders them, so that both sides read the same. The server's counters are read
before and after (vLLM: /metrics; SGLang: /metrics with --enable-metrics, else /get_server_info): other traffic spoils them.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from specdraft.config import UserError, config_to_dict, require_positive, run_program
from specdraft.data.chat import render_prompt
from specdraft.data.tasks import builtin_prompts, read_prompts, split_held_out
from specdraft.export.server import SERVERS_AVERAGE, Completion, Served, complete, counters, only_model, vllm_acceptance
from specdraft.models.default_target import is_packaged, packaged_target
from specdraft.provenance import hash_json, provenance, read_json, require_no_folder, require_writable, write_json


@dataclass
class ServeConfig:
    """url: of the server, without /v1.   target: for its tokenizer.   prompts: a JSONL file; `builtin` = held-out built-in ones.
    count, max_new_tokens, temperature: of the requests.   concurrency: requests at a time.   model: as the server calls it; None = its
    only one.   output: JSON file for figures and texts.   baseline: such a file of a run without a drafter.   timeout: seconds for
    one request."""

    url: str = "http://localhost:8000"
    target: str = "default"
    prompts: str = "builtin"
    count: int = 20
    max_new_tokens: int = 128
    temperature: float = 0.0
    concurrency: int = 1
    model: str | None = None
    output: Path | None = None
    baseline: Path | None = None
    timeout: float = 600.0
    json: bool = False


def main(config: ServeConfig) -> None:
    check(config)
    prompts = choose_prompts(config)
    asked = hash_json(prompts)
    baseline = read_baseline(config, len(prompts), asked)
    url = config.url.rstrip("/").removesuffix("/v1")
    model = config.model or only_model(url, config.timeout)
    options = (config.max_new_tokens, config.temperature, config.timeout)
    complete(url, model, prompts[0], *options)  # warm-up; counted on neither side
    before = counters(url, config.timeout)
    start = time.perf_counter()
    with ThreadPoolExecutor(config.concurrency) as pool:
        answers = list(pool.map(lambda prompt: complete(url, model, prompt, *options), prompts))
    seconds = time.perf_counter() - start
    served = summarise(model, answers, seconds, before, counters(url, config.timeout))
    if baseline is not None:
        compare(served, baseline, config.temperature)
    print(report(served))
    record = {"config": config_to_dict(config), "prompts": asked, "provenance": provenance(), **asdict(served)}
    if config.output is not None:
        write_json(config.output, record)
    if config.json:
        print(json.dumps(record))


def check(config: ServeConfig) -> None:
    """All that can be said before a server is asked. Raises UserError."""
    require_positive({name: getattr(config, name) for name in ("count", "concurrency", "max_new_tokens")})
    if not 0 <= config.temperature < math.inf:
        raise UserError(f"temperature: got {config.temperature}, allowed: 0 (greedy) or above")
    if not 0 < config.timeout <= threading.TIMEOUT_MAX:
        raise UserError(f"timeout: got {config.timeout}, allowed: above 0, in seconds")
    if config.output is not None:
        require_no_folder(config.output, "output")
        require_writable(config.output.parent, "output")


def choose_prompts(config: ServeConfig) -> list[list[int]]:
    """Token ids of the prompts."""
    where = str(packaged_target(config.target)) if is_packaged(config.target) else config.target
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:  # whatever a foreign file makes a parser raise
        raise UserError(
            f"target {where}: its tokenizer cannot be read ({' '.join(str(error).split())[:160]})"
        ) from None
    source = split_held_out(builtin_prompts())[1] if config.prompts == "builtin" else read_prompts(Path(config.prompts))
    chosen = source[: config.count]
    return [render_prompt(tokenizer, [{"role": "user", "content": prompt.turns[0]}]) for prompt in chosen]


def read_baseline(config: ServeConfig, count: int, asked: str) -> dict[str, Any] | None:
    """Texts and rate of a run without a drafter. asked: hash of the prompts' token ids. Raises UserError for another file, and for a run
    with other settings or prompts."""
    if config.baseline is None:
        return None
    where, advice = f"baseline {config.baseline}", "give a file that --output wrote"
    found = read_json(config.baseline, "baseline", advice, ("texts", "config", "tokens_per_second", "prompts"))
    rate = found["tokens_per_second"]
    if not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise UserError(f"{where}: has {rate!r} tokens per second; {advice}, of a server that answered")
    if not isinstance(found["texts"], list) or not isinstance(found["config"], dict):
        raise UserError(f"{where}: has no list of texts, or no settings; {advice}")
    for name in ("max_new_tokens", "temperature", "concurrency"):
        if found["config"].get(name) != getattr(config, name):
            raise UserError(
                f"{where}: was run with {name} = {found['config'].get(name)!r}, now {getattr(config, name)!r}; give both the same"
            )
    if len(found["texts"]) != count:
        raise UserError(
            f"{where}: has {len(found['texts'])} texts, this run {count}; give both the same --count and --prompts"
        )
    if found["prompts"] != asked:
        raise UserError(
            f"{where}: was run with other prompts (hash {found['prompts']}, now {asked}); give both the same --prompts and --target"
        )
    return found


def summarise(
    model: str,
    answers: list[Completion],
    seconds: float,
    before: dict[str, Any],
    after: dict[str, Any],
) -> Served:
    texts, tokens = [answer.text for answer in answers], sum(answer.tokens for answer in answers)
    served = Served(
        server=after["server"],
        model=model,
        requests=len(answers),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        median_latency_s=statistics.median(answer.seconds for answer in answers),
        texts=texts,
    )
    if served.server == "vLLM" and before["server"] == "vLLM":
        served.tau, served.conditional_acceptance = vllm_acceptance(before, after)
    elif served.server == "SGLang":
        served.tau, served.tau_is = after["accept_length"], SERVERS_AVERAGE
    return served


def compare(served: Served, baseline: dict[str, Any], temperature: float) -> None:
    """Speedup, and how many texts are equal: at temperature 0 only, as sampled ones need not be."""
    served.speedup = served.tokens_per_second / baseline["tokens_per_second"]
    if temperature == 0:
        equal = sum(a == b for a, b in zip(served.texts, baseline["texts"], strict=True))
        served.match_rate = equal / len(served.texts)


def report(served: Served) -> str:
    lines = [
        f"{served.server}, {served.model}: {served.tokens_per_second:.1f} tokens/s over {served.requests} requests "
        f"({served.tokens:,} tokens in {served.seconds:.1f} s), median latency {served.median_latency_s:.2f} s"
    ]
    if served.tau is not None:
        label = f" ({served.tau_is})" if served.tau_is == SERVERS_AVERAGE else ""
        acceptance = ", ".join(f"{alpha:.2f}" for alpha in served.conditional_acceptance) or "not given"
        lines.append(
            f"tau {served.tau:.2f} tokens a verify round{label}; conditional acceptance by position: {acceptance}"
        )
    else:
        lines.append("the server counted no drafts")
    if served.speedup is not None:
        equal = "" if served.match_rate is None else f"; {100 * served.match_rate:.0f} % of the texts equal"
        lines.append(f"{served.speedup:.2f}x over the baseline{equal}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main, ServeConfig)
