"""Long prompts: documents of any length with facts to find, and a question about them whose answer is known.

Three tasks in turn: `retrieval` (one sentence among many like it), `multi_hop` (three sentences in different places that
lead to each other) and `summarisation` (the result of every section). The documents are chronicles of towns that do not
exist, made of our own sentences and words; a seed fixes them. It knows no tokenizer: the caller says how to measure a text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from specdraft.config import UserError
from specdraft.data.tasks import Prompt

SHORTEST = 300  # words or tokens: room for the facts, the question and something around them
DISTRACTORS = 4
CHAPTER_PARAGRAPHS = 6

Made = tuple[str, tuple[str, ...], tuple[float, ...]]  # text, answers, depths


@dataclass(frozen=True)
class LongPrompt:
    """answers: what a right answer contains.   depths: where in the document (0 = its beginning, 1 = its end) the facts stand."""

    prompt: Prompt
    answers: tuple[str, ...]
    depths: tuple[float, ...]


def count_words(text: str) -> int:
    return len(text.split())


def long_prompts(
    count: int, length: int, measure: Callable[[str], int] = count_words, seed: int = 0
) -> list[LongPrompt]:
    """`count` prompts, the tasks in turn, each as long as whole paragraphs allow without passing `length` by `measure`.

    measure: text -> length, such as the number of its tokens; it should be nearly additive over paragraphs.

    Raises:
        UserError: too short a length for the facts and the question.
    """
    if length < SHORTEST:
        raise UserError(f"long prompts: got a length of {length}, allowed: {SHORTEST} or more")
    made = []
    for number in range(count):
        task = list(TASKS)[number % len(TASKS)]
        writer = _Writer(random.Random(f"{seed} {number}"), length, measure)
        text, answers, depths = TASKS[task](writer)
        made.append(
            LongPrompt(Prompt(f"long-{task}-{length}-{seed}-{number}", f"long_{task}", (text,)), answers, depths)
        )
    return made


# --- a task writes a text, and says its answers and the depths of its facts ---


def _retrieval(writer: _Writer) -> Made:
    objects = writer.some(OBJECTS, DISTRACTORS + 1)
    places = writer.some(PLACES, DISTRACTORS + 1)
    codes = writer.numbers.sample(range(1000, 10000), DISTRACTORS + 1)
    facts = [f"The {o} of {p} carries the number {c}." for o, p, c in zip(objects, places, codes, strict=True)]
    question = (
        f"Which number does the {objects[0]} of {places[0]} carry? Copy the sentence of the document that says so, then "
        "the three sentences that follow it."
    )
    text, depths = _scatter(writer, facts, 1, question)
    return text, (str(codes[0]),), depths


def _multi_hop(writer: _Writer) -> Made:
    guilds, people, streets = writer.some(GUILDS, 2), writer.people(2), writer.some(STREETS, 2)
    numbers, crowns = writer.numbers.sample(range(2, 90), 2), writer.numbers.sample(range(1000, 2000), 2)
    facts = []
    for i in range(2):  # the second chain leads astray
        facts.append(f"The ledger of the {guilds[i]} is kept by {people[i]}.")
        facts.append(f"{people[i]} lives at {numbers[i]} {streets[i]}.")
        facts.append(f"The house at {numbers[i]} {streets[i]} was sold for {crowns[i]} crowns.")
    question = (
        f"For how many crowns was the house sold in which the keeper of the ledger of the {guilds[0]} lives? Write down "
        "every step, and copy the sentence that each step rests on."
    )
    text, depths = _scatter(writer, facts, 3, question)
    return text, (str(crowns[0]),), depths


def _summarisation(writer: _Writer) -> Made:
    question = "Summarise the document: for every chapter give its title and, in one sentence, its main result."
    page = writer.measure(writer.paragraph())
    chapters = min(len(SUBJECTS), max(2, writer.length // (CHAPTER_PARAGRAPHS * page)))
    results = tuple(f"{writer.one(CHANGES)} by {writer.numbers.randint(5, 95)} per cent" for _ in range(chapters))
    openings = [
        f"Chapter {number}: {subject}. The main result of this chapter is that {subject} {result}."
        for number, (subject, result) in enumerate(zip(writer.some(SUBJECTS, chapters), results, strict=True), start=1)
    ]
    paragraphs = writer.paragraphs(question, openings)
    places = [len(paragraphs) * number // chapters for number in range(chapters)]
    text, depths = writer.document(paragraphs, openings, places, question)
    return text, results, depths


def _scatter(writer: _Writer, facts: list[str], asked: int, question: str) -> tuple[str, tuple[float, ...]]:
    """The facts open paragraphs anywhere; the first `asked` ones are those of the question."""
    paragraphs = writer.paragraphs(question, facts)
    places = [writer.numbers.randrange(len(paragraphs)) for _ in facts]
    text, depths = writer.document(paragraphs, facts, places, question)
    return text, depths[:asked]


class _Writer:
    """Sentences of a chronicle, from one stream of random numbers, and documents of them that fit a length."""

    def __init__(self, numbers: random.Random, length: int, measure: Callable[[str], int]):
        self.numbers, self.length, self.measure = numbers, length, measure

    def paragraphs(self, question: str, facts: list[str]) -> list[str]:
        """As many as there is room for beside the question and the facts."""
        taken = [self.paragraph()]
        room = self.length - sum(map(self.measure, [_document(taken, question), *facts]))
        while (room := room - self.measure((text := self.paragraph()) + "\n\n")) >= 0:
            taken.append(text)
        return taken

    def document(
        self, paragraphs: list[str], facts: list[str], places: list[int], question: str
    ) -> tuple[str, tuple[float, ...]]:
        """Every fact opens the paragraph at its place; then the last paragraphs without facts go, until the whole fits."""
        for fact, place in zip(facts, places, strict=True):
            paragraphs[place] = f"{fact} {paragraphs[place]}"
        spare = [place for place in range(len(paragraphs)) if place not in places]
        while self.measure(_document(paragraphs, question)) > self.length:  # measures need not be additive
            if not spare:
                raise UserError(f"long prompts: a length of {self.length} has no room for the facts; give a larger one")
            dropped = spare.pop()
            del paragraphs[dropped]
            places = [place - (place > dropped) for place in places]
        return _document(paragraphs, question), tuple(place / max(1, len(paragraphs) - 1) for place in places)

    def one(self, words: tuple[str, ...]) -> str:
        return self.numbers.choice(words)

    def some(self, words: tuple[str, ...], count: int) -> list[str]:
        return self.numbers.sample(words, count)

    def people(self, count: int) -> list[str]:
        names = zip(self.some(FIRST_NAMES, count), self.some(LAST_NAMES, count), strict=True)
        return [f"{first} {last}" for first, last in names]

    def paragraph(self) -> str:
        return " ".join(self.sentence() for _ in range(self.numbers.randint(3, 6)))

    def sentence(self) -> str:
        person, other = self.people(2)
        return self.one(SENTENCES).format(
            person=person,
            other=other,
            place=self.one(PLACES),
            street=self.one(STREETS),
            guild=self.one(GUILDS),
            object=self.one(OBJECTS),
            goods=self.one(GOODS),
            weather=self.one(WEATHER),
            month=self.one(MONTHS),
            year=self.numbers.randint(1802, 1949),
            few=self.numbers.randint(2, 12),
            many=self.numbers.randint(20, 800),
        )


def _document(paragraphs: list[str], question: str) -> str:
    return "\n\n".join(["Read the following document, then answer the question below it.", *paragraphs, question])


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


FIRST_NAMES = _words(
    "Ada, Bruno, Celia, Dorin, Edda, Fabian, Greta, Hanno, Ilse, Jonas, Katrin, Lorenz, Mirjam, Niels, Odile, "
    "Pavel, Quirin, Rosa, Severin, Tilda, Ulrich, Vera, Wanda, Yorick"
)
LAST_NAMES = _words(
    "Abendroth, Brask, Calloway, Dunmore, Eklund, Farrow, Gantry, Holloway, Ivers, Jarrett, Kessler, Lindqvist, "
    "Marlow, Norling, Oakes, Penhale, Quill, Ravn, Sorley, Thackeray, Varga"
)
PLACES = _words(
    "Harrow Quay, Kestrel Bay, Low Marsh, Saint Orla, Tern Island, Upper Wick, the Salt Meadows, Vane Hill, the "
    "Old Ferry, Wren Valley, Black Sluice, Copper Bridge, the Long Dyke, Ember Cross"
)
STREETS = _words(
    "Tanner Row, Mill Street, Anchor Lane, Candle Alley, Bishop's Walk, Rope Street, Orchard Road, Gull Steps, "
    "Hatters' Court, Juniper Lane, King's Rise, Lantern Street, North Wall, Pump Square"
)
GUILDS = _words(
    "Guild of Ropemakers, Guild of Glaziers, Society of Pilots, Union of Weavers, Guild of Coopers, Society of "
    "Beekeepers, Union of Lamplighters, Guild of Bookbinders, Society of Surveyors"
)
OBJECTS = _words(
    "storm bell, harbour crane, tide clock, town seal, lighthouse lamp, water gate, signal mast, iron chest, fire "
    "engine, weighing house, stone lion, market scale, chain ferry, bronze door"
)
GOODS = _words("salt, tar, barley, slate, wool, lamp oil, herring, copper wire, window glass, rope, honey")
WEATHER = _words(
    "a week of fog, the first frost, a spring tide, three days of rain, a dry summer, an early thaw, a gale from "
    "the north, a night of hail, the longest calm in memory"
)
MONTHS = _words("January, February, March, April, May, June, July, August, September, October, November, December")
SUBJECTS = _words(
    "the trade in salt, the work on the dykes, the number of ships, the price of bread, the cost of lamp oil, the "
    "catch of herring, the length of the roads, the school roll, the harvest of barley, the export of rope, the "
    "income of the ferry, the number of fires, the water in the wells, the making of glass, the wool trade"
)
CHANGES = ("rose", "fell", "grew", "shrank", "increased", "declined")
SENTENCES = (
    "In {month} {year} {person} of the {guild} brought {many} barrels of {goods} to {place}.",
    "After {weather}, the road between {place} and {street} was closed for {few} weeks.",
    "{person} wrote to {other} that the {object} at {place} needed new bolts and a coat of paint.",
    "The council met {few} times in {month} and spoke of little but the price of {goods}.",
    "Nobody on {street} could remember who had paid for the {object}, although {person} claimed to know.",
    "{person} and {other} measured the depth of the water at {place} and found it {few} feet lower than in {year}.",
    "A cart loaded with {goods} overturned near {place}, and {many} people came to help.",
    "The {guild} voted to repair the {object} before winter, by {few} votes.",
    "It was {weather} that kept the boats at {place}, not the quarrel between {person} and {other}.",
    "When the {object} was shown on {street} in {year}, {many} visitors signed the book.",
    "{person} kept a diary of every load of {goods} that left {place} that {month}.",
    "The old map of {place} shows a well, a chapel and {few} barns where {street} is today.",
    "Because of {weather}, the market for {goods} was moved from {place} to {street}.",
    "{other} taught {person} how to splice a line, how to read the clouds and how to sell {goods}.",
    "In the report of {year} the {guild} counts {many} members, {few} of them under age.",
    "A letter found behind the {object} mentions {person}, a debt of {many} shillings and {weather}.",
    "Children from {street} collected {goods} for the feast in {month} and were given {few} coins each.",
    "The inspector praised the {object}, blamed the roof, and went back to {place} before dark.",
    "For {few} years {person} had asked for a second {object}, and for {few} years {other} had refused.",
    "The night watch at {place} saw a light in {month} {year}, and {weather} followed.",
    "Each autumn the {guild} lends {many} sacks to farmers near {place}, to be returned with {goods}.",
    "What {person} said about {other} on {street} was printed in {year}, with {few} mistakes.",
    "The price of {goods} doubled within {few} days and fell again after {weather}.",
    "They carried the {object} from {street} to {place} on rollers, which took {many} hours.",
)
TASKS = {"retrieval": _retrieval, "multi_hop": _multi_hop, "summarisation": _summarisation}
