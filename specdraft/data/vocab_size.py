"""How large a trimmed vocabulary should be: given, by coverage, or by what it saves (arXiv 2603.05210; docs/papers.md).

What a size is worth is known exactly for every k from cumulative counts, so exhaustive search is the default and the
oracle; Optuna's TPE sampler, as the paper uses it, is there beside it. Measured costs come from elsewhere
(decoding/head_times.py): here they are functions of k. It knows nothing of heads or targets.

Letters: k rows of the head, V target vocabulary, H width, I width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from specdraft.config import UserError

Sizes = np.ndarray  # [n] int64
Values = np.ndarray  # [n] float64
OfSize = Callable[[Sizes], Values]


@dataclass
class SizeConfig:
    """choose: `size` = as given; `coverage` = the smallest that covers min_coverage; else the best that covers it, by `utility`:
    weight * coverage + (1 - weight) * share of a draft step's FLOPs that is saved (arXiv 2603.05210); `measured`: the same with
    seconds measured on this machine; `throughput`: predicted tokens per second over those of the full head, papers (1.1).

    size: tokens that the head can draft, for `size`.   min_coverage: share of held-out tokens, 0..1, a bound for all but `size`,
    `throughput` too; 0 = the plain maximum.   lowest, highest: sizes that are tried for the last three.   search: `exhaustive`
    tries all of them, `tpe` as many as `trials` says, by Optuna.   acceptance: conditional acceptance by drafted position that a
    full-vocabulary drafter has, one for each token that a round drafts (a run's summary.json has it)."""

    choose: Literal["size", "coverage", "utility", "measured", "throughput"] = "size"
    size: int = 8192
    min_coverage: float = 0.9
    weight: float = 0.5
    lowest: int = 50
    highest: int = 50_000
    search: Literal["exhaustive", "tpe"] = "exhaustive"
    trials: int = 100
    seed: int = 0
    acceptance: tuple[float, ...] = (0.5, 0.45, 0.42)

    def __post_init__(self) -> None:
        shares = {"min_coverage": self.min_coverage, "weight": self.weight}
        shares |= {f"acceptance[{i}]": alpha for i, alpha in enumerate(self.acceptance)}
        for key, value in shares.items():
            if not 0 <= value <= 1:
                raise UserError(f"{key}: got {value}, allowed: 0 to 1")
        if not 1 <= self.lowest <= self.highest or self.trials < 1 or not self.acceptance:
            raise UserError(
                f"lowest, highest, trials, acceptance: got {self.lowest}, {self.highest}, {self.trials}, {self.acceptance}, allowed: "
                "1 <= lowest <= highest, 1 trial or more, 1 acceptance or more"
            )
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed: got {self.seed}, allowed: 0 to 2**32 - 1")


@dataclass(frozen=True)
class Choice:
    """size: k.   value: what was maximised, there (the coverage, where that alone decided).   coverage: C(k), 0..1."""

    size: int
    value: float
    coverage: float


def draft_flops(
    *, hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> dict[str, int]:
    """FLOPs of one EAGLE-3 draft step without its head, by part (papers 6): fc 3H -> H, attention of input width 2H, gated MLP."""
    h, q, kv = hidden_size, num_heads * head_dim, num_kv_heads * head_dim
    return {
        "fc": 2 * 3 * h * h,
        "attention": 2 * 2 * h * q + 2 * (2 * 2 * h * kv) + 2 * q * h,
        "mlp": 2 * h * intermediate_size * 3,
    }


def head_flops(hidden_size: int, rows: int, rank: int | None = None) -> int:
    """FLOPs of a head for one token: `rows` dense rows, or the two factors of a low-rank head."""
    return 2 * hidden_size * rows if rank is None else 2 * rank * (hidden_size + rows)


def latency_reduction(
    *, hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int
) -> OfSize:
    """R(k) = 1 - F(k) / F(V): the share of a draft step's FLOPs that a head of k rows saves (arXiv 2603.05210, papers 6)."""
    body = sum(
        draft_flops(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        ).values()
    )
    full = body + head_flops(hidden_size, vocab_size)
    return lambda k: 1 - (body + 2 * hidden_size * k) / full


def coverage_curve(counts: Tensor, admission: Tensor) -> Values:
    """C(k) for k = 0, 1, .., all ids of `admission` (vocab.py: admission_order): the share of `counts` [V] (occurrences, or probability
    mass) that the first k of them cover. Ids that are not among them count as never covered."""
    total = float(counts.double().sum())
    if not total > 0:
        raise UserError("coverage: got no tokens to cover; give answers, or held-out answers, that are not empty")
    covered = counts[admission].double().cumsum(0).numpy()
    return np.concatenate([[0.0], covered]) / total


def utility(coverage: Values, reduction: OfSize, weight: float) -> OfSize:
    """U(k) = a C(k) + (1 - a) R(k), a = weight (papers 6). coverage: `coverage_curve`."""
    return lambda k: weight * coverage[k] + (1 - weight) * reduction(k)


def tau_of(acceptance: tuple[float, ...], coverage: Values) -> Values:
    """Tokens of a round, bonus included, of a drafter whose acceptance alpha_1.. a vocabulary bounds: 1 + sum_j prod_{i<=j} alpha_i C.

    A token outside is a miss; inside, tokens are taken to be accepted as often as all are. So alpha C <= min(alpha, C), and this is
    a careful estimate: rare tokens are the hard ones, and mostly lost anyway."""
    products = np.cumprod(np.asarray(acceptance))
    powers = np.asarray(coverage)[..., None] ** np.arange(1, len(products) + 1)
    return 1 + (products * powers).sum(-1)


def choose_size(config: SizeConfig, coverage: Values, least: int, value: OfSize | None = None) -> Choice:
    """The size that `config` asks for. coverage: `coverage_curve`, for k = 0.. all tokens that there are to choose from. least: number
    of ids that are always in. value: what to maximise, for every choice but `size` and `coverage`.

    Raises:
        UserError: no size reaches the coverage; a size below `least` or above the tokens that there are; Optuna is asked for and not there.
    """
    if config.choose == "size":
        if not least <= config.size < len(coverage):
            raise UserError(
                f"size: got {config.size}, allowed: {least} (ids that are always in) to {len(coverage) - 1}"
            )
        return Choice(config.size, float(coverage[config.size]), float(coverage[config.size]))
    if config.choose == "coverage":
        return smallest(coverage, config.min_coverage, least)
    assert value is not None, config.choose
    low, high = max(config.lowest, least), min(config.highest, len(coverage) - 1)
    if low > high:
        raise UserError(
            f"lowest, highest: got {config.lowest} to {config.highest}, allowed: sizes among the {least} (ids that are always in) to "
            f"{len(coverage) - 1} that there are"
        )
    if coverage[high] < config.min_coverage:
        raise UserError(
            f"min_coverage: got {config.min_coverage}, allowed: up to {coverage[high]:.4f}, what {high} tokens cover; lower it, raise "
            "highest, or count more text"
        )
    size = SEARCHES[config.search](value, coverage, low, high, config)
    return Choice(size, float(value(np.array([size]))[0]), float(coverage[size]))


def smallest(coverage: Values, wanted: float, least: int = 1) -> Choice:
    """The smallest k >= least with C(k) >= wanted."""
    if coverage[-1] < wanted:
        raise UserError(
            f"min_coverage: got {wanted}, allowed: up to {coverage[-1]:.4f}, what all {len(coverage) - 1} tokens that there are cover"
        )
    size = max(least, int(np.searchsorted(coverage, wanted, side="left")))
    return Choice(size, float(coverage[size]), float(coverage[size]))


def exhaustive(value: OfSize, coverage: Values, low: int, high: int, config: SizeConfig) -> int:
    """argmax of `value` over every k in low..high that covers enough; the smaller of two equals."""
    sizes = np.arange(low, high + 1)
    return int(sizes[np.where(coverage[sizes] >= config.min_coverage, value(sizes), -np.inf).argmax()])


def tpe(value: OfSize, coverage: Values, low: int, high: int, config: SizeConfig) -> int:
    """The best k that Optuna's TPESampler finds in `trials` trials (arXiv 2603.05210 uses 30 to 100, integer k). A size that covers
    too little is worth less than any that covers enough, and the less the more it lacks."""
    try:
        import optuna
    except ImportError:
        raise UserError("search: tpe needs optuna; pip install 'specdraft[vocab]', or choose exhaustive") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def trial_value(trial: optuna.Trial) -> float:
        k = trial.suggest_int("k", low, high)
        lacking = config.min_coverage - coverage[k]
        return float(value(np.array([k]))[0]) if lacking <= 0 else -1e3 * (1 + float(lacking))

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=config.seed))
    study.optimize(trial_value, n_trials=config.trials)
    best = study.best_params["k"]
    return best if coverage[best] >= config.min_coverage else smallest(coverage, config.min_coverage, low).size


SEARCHES = {"exhaustive": exhaustive, "tpe": tpe}
