"""A call in a process of its own: its result, its errors, and its death."""

import multiprocessing
import os
import signal
import time

import pytest

from specdraft.config import UserError, require_positive
from specdraft.own_process import in_own_process


def test_the_result_comes_from_another_process():
    assert in_own_process(os.getpid) != os.getpid()
    assert in_own_process(sorted, [3, 1, 2]) == [1, 2, 3]


def test_a_users_error_comes_back_as_it_is():
    with pytest.raises(UserError, match=r"^size: got -1, "):
        in_own_process(require_positive, {"size": -1})


@pytest.mark.parametrize(("how", "code"), [((os._exit, 3), "3"), ((int, "x"), "1"), ((signal.raise_signal, 9), "-9")])
def test_a_process_that_dies_is_told_of(how, code, capfd):
    with pytest.raises(UserError, match=f"exit code {code} and without a result"):
        in_own_process(*how)
    assert ("invalid literal" in capfd.readouterr().err) == (code == "1")  # a fault of ours is not hidden


def test_an_interruption_ends_it_too():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_own_process(time.sleep, 60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not multiprocessing.active_children()
