"""The main job's settings: what cannot work is refused before any work. The job itself: tests/programs/test_recipes.py."""

import math

import pytest

from specdraft.config import UserError
from specdraft.pipeline import MeasureConfig, RunConfig


@pytest.mark.parametrize("setting", ["prompts", "max_new_tokens", "draft_length", "temperature"])
def test_measuring_that_cannot_work_is_refused_before_training(setting):
    with pytest.raises(UserError, match=f"{setting}: got -1"):
        MeasureConfig(**{setting: -1})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_prompts", 0), ("max_length", -5), ("threads", -1), ("cache_gb", -1.0), ("cache_gb", math.nan)]
    + [("target", "")]
    + [("name", name) for name in ("", "..", "a/b", "answers")],
)
def test_a_run_that_cannot_work_is_refused(setting, value):
    with pytest.raises(UserError, match=f"{setting}: got "):
        RunConfig(**{setting: value})
