"""Talks to a running vLLM or SGLang server: completions of token ids, and what the server counted of its drafts.

It knows nothing of prompts, of targets or of how servers are started.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from specdraft.config import UserError

SAMPLE = re.compile(r"^(\w+:\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
VLLM = "vllm:spec_decode_num_"
SERVERS_AVERAGE = "SGLang's own average, not of these requests alone"


@dataclass
class Completion:
    """text; tokens: new ones, by the server's count; seconds: from request to answer."""

    text: str
    tokens: int
    seconds: float


@dataclass
class Served:
    """tokens_per_second: of all requests together, prompts included in the time.   tau: tokens per verify round; conditional_acceptance:
    of each drafted position, given the one before; both by the server's counters: None, [] where it gives none.   tau_is: of what.
    match_rate: None at a temperature above 0."""

    server: str
    model: str
    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float
    median_latency_s: float
    tau: float | None = None
    tau_is: str = "of these requests"
    conditional_acceptance: list[float] = field(default_factory=list)
    speedup: float | None = None
    match_rate: float | None = None
    texts: list[str] = field(default_factory=list)


def request(url: str, timeout: float, body: dict[str, Any] | None = None) -> str:
    """GET, or POST of JSON. Raises UserError: unreachable, cut off, or an error of the server's."""
    data = None if body is None else json.dumps(body).encode()
    try:
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=timeout) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        said = " ".join(error.read().decode(errors="replace").split())[:200]
        raise UserError(f"server {url}: answered {error.code} ({said or error.reason})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"server {url}: cannot be reached ({reason}); start it, or give its --url") from None
    except Exception as error:  # http.client's, which are no OSError: an answer cut short
        raise UserError(f"server {url}: broke off ({type(error).__name__}); look at its log") from None


def parse(text: str, url: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"server {url}: its answer is not JSON; is it vLLM or SGLang?") from None
    if not isinstance(found, dict):
        raise UserError(f"server {url}: its answer is no JSON object; is it vLLM or SGLang?")
    return found


def only_model(url: str, timeout: float) -> str:
    """The name of the model that the server has."""
    found = parse(request(f"{url}/v1/models", timeout), url).get("data")
    names = [model.get("id") for model in found if isinstance(model, dict)] if isinstance(found, list) else []
    if len(names) != 1 or not isinstance(names[0], str):
        raise UserError(f"server {url}: has {len(names)} models, name one with --model")
    return names[0]


def complete(
    url: str, model: str, prompt: list[int], max_new_tokens: int, temperature: float, timeout: float
) -> Completion:
    """One request, not streamed. prompt: token ids."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_new_tokens, "temperature": temperature}
    start = time.perf_counter()
    answer = parse(request(f"{url}/v1/completions", timeout, body), url)
    seconds = time.perf_counter() - start
    try:
        text, tokens = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
    except (LookupError, TypeError):
        text = tokens = None
    if not isinstance(text, str) or not isinstance(tokens, int):
        raise UserError(f"server {url}: its answer has no text or no token count; is it vLLM or SGLang?")
    return Completion(text, tokens, seconds)


def counters(url: str, timeout: float) -> dict[str, Any]:
    """What the server counted up to now: `server`, and for vLLM drafts, accepted (by position); for SGLang its mean accepted length."""
    try:
        text = request(f"{url}/metrics", timeout)
    except UserError:  # SGLang without --enable-metrics
        text = ""
    samples = SAMPLE.findall(text)
    if any(name.startswith("vllm:") for name, _, _ in samples):
        found: dict[str, Any] = {"server": "vLLM", "drafts": 0.0, "positions": {}}
        for name, labels, value in samples:
            if name == VLLM + "drafts_total":
                found["drafts"] += float(value)
            elif name == VLLM + "accepted_tokens_per_pos_total" and (position := POSITION.search(labels)):
                place = int(position[1])
                found["positions"][place] = found["positions"].get(place, 0.0) + float(value)
        return found
    lengths = [float(value) for name, _, value in samples if name == "sglang:spec_accept_length"]
    if not lengths and not samples:
        try:
            states = parse(request(f"{url}/get_server_info", timeout), url).get("internal_states")
        except UserError:
            return {"server": "unknown"}
        states = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
        found = [state.get("avg_spec_accept_length") for state in states]
        lengths = [length for length in found if isinstance(length, int | float)]
    return {"server": "SGLang", "accept_length": lengths[0] if lengths and lengths[0] else None}


def vllm_acceptance(before: dict[str, Any], after: dict[str, Any]) -> tuple[float | None, list[float]]:
    """tau = 1 + accepted / drafts, and the acceptance of each position given the one before. None, [] where nothing was drafted."""
    reached = after["drafts"] - before["drafts"]
    if not reached:
        return None, []
    accepted = [after["positions"][i] - before["positions"].get(i, 0.0) for i in sorted(after["positions"])]
    tau, acceptance = 1 + sum(accepted) / reached, []
    for count in accepted:
        if not reached:
            break
        acceptance.append(count / reached)
        reached = count
    return tau, acceptance
