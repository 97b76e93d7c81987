"""Long prompts: their length, that the facts are in them and only once, and that they are found where they are said to be."""

import re

import pytest

from specdraft.config import UserError
from specdraft.data.long_prompts import TASKS, count_words, long_prompts


def paragraphs(made):
    return made.prompt.turns[0].split("\n\n")[1:-1]  # without the introduction and the question


@pytest.mark.parametrize("length", [300, 900, 5000])
def test_as_long_as_asked(length):
    """Never longer; shorter by at most the paragraph that did not fit and one that the facts drove out."""
    for made in long_prompts(6, length):
        assert length - 2 * 6 * 25 < count_words(made.prompt.turns[0]) <= length


def test_any_measure_of_length():
    """One that is not additive: pairs of characters."""
    for made in long_prompts(3, 4000, lambda text: (len(text) + 1) // 2, seed=3):
        assert 3000 < (len(made.prompt.turns[0]) + 1) // 2 <= 4000


def test_the_tasks_come_in_turn_and_a_seed_fixes_them():
    made = long_prompts(6, 700, seed=1)
    assert [p.prompt.category for p in made] == [f"long_{task}" for task in TASKS] * 2
    assert made == long_prompts(6, 700, seed=1)
    assert not {p.prompt.turns for p in made} & {p.prompt.turns for p in long_prompts(6, 700, seed=2)}
    assert len({p.prompt.id for p in made}) == 6


@pytest.mark.parametrize("number", range(9))
def test_the_facts_are_in_the_document_where_they_are_said_to_be(number):
    made = long_prompts(9, 1500)[number]
    text = paragraphs(made)
    question = made.prompt.turns[0].split("\n\n")[-1]
    places = [round(depth * (len(text) - 1)) for depth in made.depths]
    for answer in made.answers:
        assert sum(answer in paragraph for paragraph in text) >= 1
    if made.prompt.category == "long_summarisation":
        assert [f"Chapter {i + 1}: " in text[place] for i, place in enumerate(places)] == [True] * len(places)
        assert all(answer in text[place] for answer, place in zip(made.answers, places, strict=True))
        assert sum("Chapter" in paragraph for paragraph in text) == len(places)
    elif made.prompt.category == "long_retrieval":
        (fact,) = (s for s in text[places[0]].split(".") if f"carries the number {made.answers[0]}" in s)
        assert fact.strip().removeprefix("The ").split(" carries")[0] in question
        assert made.prompt.turns[0].count("carries the number") == 5
    else:
        guild = question.split("ledger of the ")[1].split(" lives")[0]
        (first,) = re.findall(rf"The ledger of the {guild} is kept by ([\w ]+)\.", text[places[0]])
        (second,) = re.findall(rf"{first} lives at ([\w' ]+)\.", text[places[1]])
        assert f"The house at {second} was sold for {made.answers[0]} crowns." in text[places[2]]


def test_sentences_hardly_repeat():
    """A document of the same few sentences would be easy to draft."""
    text = long_prompts(1, 5000)[0].prompt.turns[0]
    sentences = text.replace("\n\n", " ").split(". ")
    assert len(set(sentences)) > 0.98 * len(sentences)


def test_too_short_a_length_is_refused():
    with pytest.raises(UserError, match="got a length of 20, allowed"):
        long_prompts(1, 20)
