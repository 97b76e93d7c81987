"""The page about a run; its whole contents are looked at in tests/programs."""

from types import SimpleNamespace

import pytest

from specdraft import summary
from specdraft.provenance import provenance

MS = {"draft_ms": 2.0, "head_ms": 0.5, "verify_ms": 30.0, "sample_ms": 0.1, "target_ms": 25.0}
FOUND = {
    **dict.fromkeys(("speedup", "speedup_low", "speedup_high", "tau", "tokens_per_second"), 1.5),
    **dict.fromkeys(("target_tokens_per_second", "minutes"), 1.0),
    **dict.fromkeys(("prompts", "temperature", "answer_tokens", "parameters", "head_parameters"), 2),
    **MS,
    "conditional_acceptance": [0.5, None],
    "match_rate": 1.0,
    "dtype": "float32",
    "draft": "chain of 2",
    "head": {"kind": "full", "rows": 1000, "width": 64},
    "held_out": {"hit": [0.5]},
    "training": {"epochs": 1, "tokens": 10, "minutes": 1},
    "provenance": provenance(),
}


@pytest.mark.parametrize(
    ("head_ms", "why", "cell"),
    [
        (0.5, "in 2.0 ms (the full head of 1,000 x 64 takes 0.5 of them)", "| 2.0 / 0.5 / 30.0 / 0.1 |"),
        (None, "in 2.0 ms (with a full head of 1,000 x 64)", "| 2.0 / - / 30.0 / 0.1 |"),
    ],
)
def test_the_time_in_the_head_is_told_where_it_is_known(head_ms, why, cell):
    found = {**FOUND, "head_ms": head_ms}
    assert why in summary.describe(SimpleNamespace(name="tiny"), found)
    assert cell in summary.table(found)
