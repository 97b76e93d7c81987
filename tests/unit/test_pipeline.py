"""The main job's settings: what cannot work is refused before any work. The job itself: tests/programs/test_recipes.py."""

import math
import os

import psutil
import pytest

from specdraft.config import UserError
from specdraft.data.tasks import builtin_prompts, split_held_out
from specdraft.decoding.answers import AnswerConfig
from specdraft.job import choose_prompts, default_threads, training_limits
from specdraft.pipeline import MeasureConfig, RunConfig


@pytest.mark.parametrize(
    ("cores", "allowed", "processes", "threads"), [(8, 8, "1", 8), (8, 2, "1", 2), (8, 16, "2", 4), (8, 1, "2", 1)]
)
def test_threads_are_no_more_than_the_cores_that_the_process_may_use(monkeypatch, cores, allowed, processes, threads):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert default_threads() == threads


@pytest.mark.parametrize("setting", ["prompts", "max_new_tokens", "draft_length", "temperature"])
def test_measuring_that_cannot_work_is_refused_before_training(setting):
    with pytest.raises(UserError, match=f"{setting}: got -1"):
        MeasureConfig(**{setting: -1})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_prompts", 0), ("max_length", -5), ("threads", -1), ("cache_gb", -1.0), ("cache_gb", math.nan)]
    + [("answers_each", 0), ("minutes", 12.0), ("minutes", math.inf)]
    + [("target", "")]
    + [("name", name) for name in ("", "..", "a/b", "answers")],
)
def test_a_run_that_cannot_work_is_refused(setting, value):
    with pytest.raises(UserError, match=f"{setting}: got "):
        RunConfig(**{setting: value})


def test_several_greedy_answers_are_refused():
    with pytest.raises(UserError, match="answers_each: got 2"):
        RunConfig(answers=AnswerConfig(temperature=0))


def test_several_answers_to_a_training_prompt():
    """One behind the other, under ids of their own, so that they are run together; held-out prompts once."""
    config = RunConfig(max_prompts=60, answers_each=3, minutes=None, answers=AnswerConfig(temperature=1))
    train, held_out = choose_prompts(config, 1, 5)
    own, expected_held_out = split_held_out(builtin_prompts()[:60])
    assert held_out == expected_held_out[:5]
    assert len(train) == 3 * len(own)
    assert train[::3] == own
    assert len({prompt.id for prompt in train}) == len(train)
    assert [prompt.turns for prompt in train] == [prompt.turns for prompt in own for _ in range(3)]


@pytest.mark.parametrize(
    ("minutes", "own", "spent", "allowed"),
    [
        (22.5, None, 11.0, 11.5),
        (22.5, None, 6.0, 16.5),
        (22.5, None, 40.0, 10.5),  # another run had more time for the same answers; these are allowed 12
        (22.5, 5.0, 6.0, 5.0),
        (None, None, 6.0, None),
        (None, 5.0, 6.0, 5.0),
    ],
)
def test_training_has_the_minutes_that_answers_leave(minutes, own, spent, allowed):
    config = RunConfig(minutes=minutes)
    config.train.max_minutes = own
    assert training_limits(config, spent).max_minutes == allowed
