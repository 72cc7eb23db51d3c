"""How a script of this folder ends."""

from __future__ import annotations

from collections.abc import Callable

from eagle3_cli.console import Console
from eagle3_cli.errors import Eagle3Error

INTERRUPTED = 130


def exit_code(console: Console, work: Callable[[], object]) -> int:
    """Do the work, say in one message what stopped it.  0 done, 1 failed, 2 bad input, 130 Ctrl-C."""
    try:
        work()
    except Eagle3Error as error:
        console.error(error.message, error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        console.report("Interrupted. The same command goes on from what is done.")
        return INTERRUPTED
    return 0
