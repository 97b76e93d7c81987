"""Streams of prompts: their order, and what is made of the lines."""

import pytest
from scripted import ScriptedDrafter, ScriptedTarget

from specdraft.decoding.bench import Request
from specdraft.decoding.measure import TARGET_ALONE, Contender
from specdraft.decoding.stream import Way, make_stream, plot, run_stream, summary, table, tokens_to_break_even, totals
from specdraft.decoding.vocab_policies import AllTokens


def requests(domain, count):
    return [Request(f"{domain}-{i}", domain, [i + 1, 2]) for i in range(count)]


def line(way, number, seconds, tokens=10, visit=0, **more):
    known = {"way": way, "number": number, "visit": visit, "domain": f"d{visit}", "tokens": tokens, "seconds": seconds}
    known |= {"rounds": 4, "emitted": 9, "tau": 9 / 4, "misses": 1, "live": 30.0, "is_same": True}
    return known | more


def test_domains_take_turns():
    stream = make_stream({"law": requests("law", 5), "code": requests("code", 4)}, per_visit=2)
    assert [one.request.id for one in stream] == [
        *("law-0", "law-1", "code-0", "code-1"),
        *("law-2", "law-3", "code-2", "code-3"),
    ]
    assert [one.visit for one in stream] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([1, 1, 1], 10),
        ([3, 1, 2], 20),  # behind, even after two, and still even at the end
        ([3, 3, 1], None),
        ([1, 4, 2], None),  # ahead at first, then overtaken
        ([5, 1, 0], 30),
    ],
)
def test_break_even_is_for_good(own, expected):
    lines = [line("own", i, seconds) for i, seconds in enumerate(own)]
    others = [line("other", i, 2) for i in range(3)]
    assert tokens_to_break_even(lines, others) == expected


def test_totals_are_over_rounds_tokens_and_seconds():
    lines = [line("a", 0, 2.0), line("a", 1, 3.0, tokens=40, rounds=1, emitted=5, tau=5.0, misses=0, live=10.0)]
    found = totals(lines)
    assert found == pytest.approx({"tau": 14 / 5, "miss_rate": 1 / 14, "live": 20.0, "tokens_per_second": 10.0})


def test_a_stream_is_lossless_and_every_way_has_a_line_for_every_prompt(tmp_path):
    target, lines = ScriptedTarget(seed=3), []
    told = []

    class Ear:
        def begin(self, texts):
            told.append(texts[0].tokens)

        def observe(self, rounds):
            pass

    class Warm(AllTokens):
        def __init__(self):
            super().__init__()
            self.prompts = []

        def begin(self, prompt, last, logits_of):
            self.prompts.append(prompt)

    drafter, warm = ScriptedDrafter(target.logits), Warm()
    ways = {
        "frozen": Way(Contender(drafter), warm_up=Contender(drafter, vocab_policy=warm)),
        "both": Way(Contender(drafter), Ear(), lambda: {"updates": len(told)}),
    }
    stream = make_stream({"law": requests("law", 2), "code": requests("code", 2)}, 1)
    run_stream(target, ways, stream, lines.append, max_new_tokens=12)
    assert [row["way"] for row in lines[:3]] == [TARGET_ALONE, "frozen", "both"]
    assert len(lines) == 4 * 3
    assert all(row["is_same"] for row in lines)
    assert told == [one.request.input_ids for one in stream]  # not the warm-up
    assert warm.prompts == [stream[0].request.input_ids]
    assert [row["updates"] for row in lines if row["way"] == "both"] == [1, 2, 3, 4]
    rows = {row["way"]: row for row in summary(lines, "frozen")}
    assert rows["frozen"]["tau"] > 3 > rows[TARGET_ALONE]["tau"] == 1
    assert rows["frozen"]["over_reference"] == 1
    assert rows["frozen"]["break_even"] == 12
    assert rows["both"]["updates"] == 4
    assert all(row["match_rate"] == 1 for row in rows.values())
    text = table(list(rows.values()), lines, "frozen")
    assert "over frozen" in text
    assert "| tau, misses | law | code | law | code |" in text
    assert plot(tmp_path / "curves.svg", lines)
    assert (tmp_path / "curves.svg").stat().st_size > 1000
