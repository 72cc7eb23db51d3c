"""Run the command line and turn whatever ends it into an exit code.

0 ok (also when the reader closed the pipe), 1 failed, 2 usage or bad input, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP.
`EAGLE3_DEBUG=1` shows the traceback of every error.  `python -m eagle3_cli` is the same as `eagle3`.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .interrupt import Terminated, listen, stop_listening

if TYPE_CHECKING:
    import click

    from .console import Console

INTERRUPTED = 130
BY_SIGNAL = 128  # plus its number, as a shell says it
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def main() -> None:
    """The `eagle3` command."""
    try:
        _open_closed_streams()
        listen()
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # during the imports, or while an error was being reported
        code = INTERRUPTED
    except Terminated as signal:
        code = BY_SIGNAL + signal.number
    finally:
        stop_listening()
    sys.exit(code)


def _open_closed_streams() -> None:
    """Connect closed ones of stdin, stdout and stderr with nothing.  Otherwise the next file to be opened gets the
    number, and what a library prints goes into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code.  Nothing but `KeyboardInterrupt` and `Terminated` escapes, and
    those only while another error is being reported."""
    from .console import Console

    console = Console()
    try:
        return _invoke(list(args), console)
    except KeyboardInterrupt:
        console.clear_progress()
        return INTERRUPTED
    except Terminated as signal:
        console.clear_progress()
        return BY_SIGNAL + signal.number
    except BrokenPipeError:
        return 0
    except Exception as error:
        return _report(error, console)
    finally:
        _flush()


def _invoke(args: list[str], console: Console) -> int:
    """click without its own error handling, which would print and exit in its own way."""
    import click

    from .cli import cli

    if "_EAGLE3_COMPLETE" in os.environ:  # asked by a shell's completion script
        from .completion import register

        register()
        cli.main(args, prog_name="eagle3")
    try:
        with cli.make_context("eagle3", args, obj=console) as context:
            cli.invoke(context)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        return _report_usage(error, console)
    return 0


def _report_usage(error: click.ClickException, console: Console) -> int:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2+: the message is the help page
        console.report(message)
    else:
        console.error(message, f"{context.command_path} --help lists what it takes." if context else None)
    return error.exit_code


def _report(error: Exception, console: Console) -> int:
    from .errors import Eagle3Error

    debug = os.environ.get("EAGLE3_DEBUG", "") not in ("", "0")
    if debug:
        import traceback

        console.traceback("".join(traceback.format_exception(error)))
    if isinstance(error, Eagle3Error):
        console.error(error.message, error.hint)
        return error.exit_code
    if isinstance(error, OSError) and error.errno in DISK_FAULTS:
        where = error.filename or "a file or stream"
        console.error(f"{where}: cannot be written: {error.strerror}.", "Free some space, or write somewhere else.")
        return 2
    if isinstance(error, MemoryError):
        console.error("there is not enough memory.", "Try a smaller --ctx-size or --batch-size.")
        return 1
    hint = None if debug else "This is a bug in eagle3. Run again with EAGLE3_DEBUG=1 and report what it prints."
    console.error(f"internal error: {type(error).__name__}: {error}", hint)
    return 1


def _flush() -> None:
    """Flush both streams now, where a failure can still be handled, not at the interpreter's exit."""
    from .console import silence

    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            silence(stream)


if __name__ == "__main__":
    main()
