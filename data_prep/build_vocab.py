"""answers.jsonl -> the vocabulary map of a trimmed head: the tokens that the target writes most.

python data_prep/build_vocab.py --answers answers.jsonl --size 8192 --output vocab.safetensors --target org/model

End-of-turn, template and byte tokens are always in.
"""

from dataclasses import dataclass
from pathlib import Path

from specdraft.config import run_program
from specdraft.data.chat import answers_to_examples, check_masks, read_answers
from specdraft.data.vocab import VocabMap, count_tokens, coverage, required_ids
from specdraft.models.target import TargetModel


@dataclass
class VocabConfig:
    """answers: of the target, see generate_responses.py.   size: tokens that the head can draft."""

    answers: Path = Path("answers.jsonl")
    output: Path = Path("vocab.safetensors")
    target: str = "default"
    size: int = 8192


def main(config: VocabConfig) -> None:
    target = TargetModel.load(config.target)
    examples, account = answers_to_examples(read_answers(config.answers))
    check_masks(examples, target.tokenizer)
    counts = count_tokens(examples, target.vocab_size)
    vocab = VocabMap.from_counts(counts, config.size, required_ids(target.tokenizer, target.eos_token_ids))
    vocab.save(config.output)
    print(f"{config.answers}: {account}; {int(counts.sum()):,} answer tokens, {int((counts > 0).sum()):,} different")
    print(
        f"{config.output}: {len(vocab)} of {target.vocab_size} tokens, {coverage(counts, vocab):.2%} of them, hash {vocab.hash}"
    )


if __name__ == "__main__":
    run_program(main, VocabConfig)
