"""Token counts -> the vocabulary map of a trimmed head: the tokens that the target writes most, as many as pay.

python data_prep/build_vocab.py --answers answers.jsonl --size 8192 --output vocab.safetensors --target org/model
python data_prep/build_vocab.py --answers runs/answers/*/part-*.jsonl --prompts builtin --choose utility --frontier runs/vocab

End-of-turn, template and byte tokens are always in. Counts, head times and probability mass are kept in --cache, so that another
size takes seconds.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specdraft.config import UserError, run_program
from specdraft.data.chat import Example
from specdraft.data.tasks import builtin_prompts, read_prompts, split_held_out
from specdraft.data.token_counts import (
    Split,
    TokenCounts,
    add,
    cached_counts,
    counts_of_ranking,
    read_frequency_list,
    read_split,
)
from specdraft.data.vocab import VocabMap, admission_order, required_ids
from specdraft.data.vocab_size import (
    OfSize,
    SizeConfig,
    Values,
    choose_size,
    coverage_curve,
    utility,
)
from specdraft.decoding.frontier import Curves, flops_saved, frontier, probability_mass, write_frontier
from specdraft.decoding.head_times import HeadTimes, cached_head_times
from specdraft.models.target import TargetModel
from specdraft.provenance import require_no_folder, require_writable


@dataclass
class VocabConfig(SizeConfig):
    """What is counted: answers (JSONL of generate_responses.py, or conversations: only what the assistant wrote), corpus (text or
    JSONL: everything), counts (a file of an earlier run's cache); or, instead of them, an FR-Spec list (freq_list, .pt).
    held_out: answers that coverage is measured on; or prompts: `builtin` or a prompts file, whose held-out part (that of the recipes)
    names the rows of `answers` that are not counted and that coverage is measured on. Only `size` can do without either.
    frontier: folder for the table and plot of all sizes.   cache: folder of counts, times and mass."""

    answers: tuple[Path, ...] = ()
    corpus: tuple[Path, ...] = ()
    counts: tuple[Path, ...] = ()
    freq_list: Path | None = None
    held_out: tuple[Path, ...] = ()
    prompts: str | None = None
    target: str = "default"
    device: str = "cpu"
    output: Path = Path("vocab.safetensors")
    frontier: Path | None = None
    cache: Path = Path("runs/vocab-cache")


def main(config: VocabConfig) -> None:
    check(config)
    target = TargetModel.load(config.target, device=config.device)
    ids = held_out_ids(config)
    counts, held_out, where = count(config, target, ids)
    always = required_ids(target.tokenizer, target.eos_token_ids, target.vocab_size)
    admission = admission_order(counts, always)
    most = len(admission) if config.freq_list is None else most_of_list(config, counts, admission, len(always))
    coverage = None if held_out is None else coverage_curve(held_out.total, admission[:most])
    times = None
    if config.frontier is not None or config.choose in ("measured", "throughput"):
        times = cached_head_times(target, config.cache, len(config.acceptance))
        if times.warning:
            print(f"warning: {times.warning}")
    worth = {} if coverage is None else worth_of_size(config, target, coverage, times)
    size = config.size if coverage is None else choose(config, config.choose, coverage, len(always), worth)
    vocab = VocabMap.from_counts(counts, size, always)
    vocab.save(config.output)
    share = "" if coverage is None else f", {coverage[size]:.2%} of {where}"
    print(f"{config.output}: {size} of {target.vocab_size} tokens by {config.choose}{share}, hash {vocab.hash}")
    if config.frontier is not None:
        chosen = {config.choose: size} | other_choices(config, coverage, len(always), worth)
        mass = probability_mass(target, held_out_examples(config, target, ids), config.cache)
        curves = Curves(admission, range(len(always), most + 1), held_out, mass, flops_saved(target), times)
        points = frontier(curves, target.hidden_size, config, chosen)
        print(write_frontier(config.frontier, points, curves, config, target))


def check(config: VocabConfig) -> None:
    """What does not go together, and what could not be written in the end. Raises UserError."""
    require_no_folder(config.output, "output")
    counted = [*config.answers, *config.corpus, *config.counts]
    if bool(counted) == (config.freq_list is not None):
        got = "both counts and freq_list" if counted else "nothing to count"
        raise UserError(f"build_vocab: got {got}, allowed: answers, corpus, counts; or freq_list alone")
    if config.prompts is not None and (config.held_out or not config.answers):
        raise UserError("prompts: splits the rows of answers; give answers, and no held_out")
    needs_coverage = config.frontier is not None or config.choose != "size"
    if needs_coverage and not config.held_out and config.prompts is None:
        flags = "--prompts or --held-out" if config.answers else "--held-out"
        what = "frontier" if config.choose == "size" else f"choose {config.choose}"
        raise UserError(f"{what}: coverage is measured on held-out answers; give {flags}")
    require_writable(config.output.parent, "output")
    if config.frontier is not None:
        require_writable(config.frontier, "frontier")


def held_out_ids(config: VocabConfig) -> list[str] | None:
    """Ids of the held-out prompts, which are those of their answers."""
    if config.prompts is None:
        return None
    prompts = builtin_prompts() if config.prompts == "builtin" else read_prompts(config.prompts)
    return [prompt.id for prompt in split_held_out(prompts)[1]]


def count(
    config: VocabConfig, target: TargetModel, ids: list[str] | None
) -> tuple[torch.Tensor, TokenCounts | None, str]:
    """(counts [V] that rank the tokens, counts that coverage is measured on, what these are)."""

    def cached(kind: str, paths: tuple[Path, ...], split: Split | None = None) -> list[TokenCounts]:
        return [cached_counts(kind, path, target.tokenizer, target.vocab_size, config.cache, split) for path in paths]

    counted = cached("answers", config.answers, None if ids is None else ("out", ids)) + cached("corpus", config.corpus)
    counted += [TokenCounts.load(path, target.tokenizer, target.vocab_size) for path in config.counts]
    held_out, where = None, "these tokens"
    if config.held_out or ids is not None:
        parts = cached("answers", config.held_out or config.answers, None if ids is None else ("in", ids))
        held_out, where = add(parts), "held-out tokens"
        print(f"held out: {held_out.account}; {int(held_out.total.sum()):,} tokens")
    if config.freq_list is not None:
        ranking = read_frequency_list(config.freq_list, target.vocab_size)
        return counts_of_ranking(ranking, target.vocab_size), held_out, where
    whole = add(counted)
    counts = whole.total
    print(f"{whole.account}; {int(counts.sum()):,} tokens, {int((counts > 0).sum()):,} different")
    return counts, held_out or whole, where


def most_of_list(config: VocabConfig, counts: torch.Tensor, admission: torch.Tensor, least: int) -> int:
    """The largest vocabulary that a frequency list gives: the ids that it names and those that are always in. Raises UserError
    for a `size` beyond it."""
    most = least + int((counts[admission[least:]] > 0).sum())
    if config.choose == "size" and config.size > most:
        raise UserError(
            f"size: got {config.size}, allowed: up to {most}, what {config.freq_list} and the required ids name"
        )
    return most


def worth_of_size(
    config: VocabConfig, target: TargetModel, coverage: Values, times: HeadTimes | None
) -> dict[str, OfSize]:
    """What each choice maximises."""
    worth = {"utility": utility(coverage, flops_saved(target), config.weight)}
    if times is not None:
        worth["measured"] = utility(coverage, times.reduction, config.weight)
        worth["throughput"] = times.throughput(coverage, config.acceptance)
    return worth


def choose(config: VocabConfig, how: str, coverage: Values, least: int, worth: dict[str, OfSize]) -> int:
    return choose_size(replace(config, choose=how), coverage, least, worth.get(how)).size


def other_choices(config: VocabConfig, coverage: Values, least: int, worth: dict[str, OfSize]) -> dict[str, int]:
    """The sizes that the other ways would choose, so that they stand in the table; those that cannot be reached are left out."""
    found = {}
    for how in ("coverage", *worth):
        try:
            found[how] = choose(config, how, coverage, least, worth)
        except UserError as reason:
            print(f"not in the table: {how} ({reason})")
    return found


def held_out_examples(config: VocabConfig, target: TargetModel, ids: list[str] | None) -> list[Example]:
    """The answers that coverage is measured on."""
    split = None if ids is None else ("in", ids)
    paths = config.held_out or config.answers
    return [example for path in paths for example in read_split(path, target.tokenizer, split)[0]]


if __name__ == "__main__":
    run_program(main, VocabConfig)
