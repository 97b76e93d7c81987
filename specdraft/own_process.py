"""A call in a process of its own, for what is to be timed: one that has trained keeps a heap with thousands of gaps, in which small
allocations take several times as long (docs/log.md), and nobody decodes in such a process.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from specdraft.config import UserError

SECONDS_TO_END = 10.0  # for a process that has sent its result


def in_own_process(function: Callable, *arguments: Any) -> Any:
    """function(*arguments) in a new Python process, which ends with it, or with this one's interruption. All of them, and the result,
    are pickled.

    Raises:
        UserError, OSError: what the function raised.
        UserError: the process ended without a result (killed for memory, or after printing a traceback).
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(there, function, arguments), daemon=True)
    # ignored, which the new process inherits: Ctrl-C reaches both, and this one ends that one
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    there.close()
    try:
        result, error = here.recv()
        process.join(SECONDS_TO_END)
    except EOFError:
        process.join()
        raise UserError(
            f"the process that measures ended with exit code {process.exitcode} and without a result; if it was killed (-9), give it more "
            "memory; run the command again to measure once more"
        ) from None
    finally:
        process.terminate()
        process.join()
    if error is not None:
        raise error
    return result


def _send_result(there: Connection, function: Callable, arguments: tuple) -> None:
    try:
        sent = (function(*arguments), None)
    except (UserError, OSError) as error:
        sent = (None, error)
    sys.stdout.flush()
    there.send(sent)
