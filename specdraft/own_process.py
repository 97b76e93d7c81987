"""A call in a process of its own, for what is to be timed: one that has trained keeps a heap with thousands of gaps, in which small
allocations take several times as long (docs/log.md), and nobody decodes in such a process.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from specdraft.config import UserError


def in_own_process(function: Callable, *arguments: Any) -> Any:
    """function(*arguments) in a new Python process, which ends with it, or with this one's interruption. All of them, and the result,
    are pickled.

    Raises:
        UserError: what the function raised; or the process ended without a result (killed for memory, or after printing a traceback).
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(there, function, arguments), daemon=True)
    process.start()
    there.close()
    try:
        result, error = here.recv()
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the one that waits ends this one
    try:
        there.send((function(*arguments), None))
    except UserError as error:
        there.send((None, error))
