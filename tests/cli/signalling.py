"""A signal that arrives at a chosen place of the real command line, on whatever models it is given.

In process: `strike(monkeypatch.setattr, "draft", signal.SIGINT)`.  As a process of its own:
`python signalling.py PLACE NUMBER ARG...` runs `eagle3 ARG...`.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable
from typing import Any

# place -> function that is struck, at which of its calls
PLACES = {
    "load": ("eagle3_cli.console:Console.progress", 3),  # called by the loader of llama.cpp
    "drafter": ("eagle3_cli.engine.load:_Loader._drafter", 1),
    "prefill": ("eagle3_cli.context:stop_wanted", 9),  # called by llama.cpp after a node of its graph
    "draft": ("eagle3_cli.engine.drafter:Eagle3Drafter.draft", 3),
    "verify": ("eagle3_cli.engine.target:Target.verify", 3),
    "commit": ("eagle3_cli.engine.target:Target.commit", 3),
    "print": ("eagle3_cli.console:Console.text", 4),
}


def strike(replace: Callable[[Any, str, Any], None], place: str, number: int, times: int = 1) -> None:
    """Let the signal arrive there; times: so often at once.  replace: setattr, or what undoes it in the end."""
    import importlib

    path, call = PLACES[place]
    module, name = path.split(":")
    owner: Any = importlib.import_module(module)
    *parents, name = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), itertools.count(1)

    def struck(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            for _ in range(times):
                signal.raise_signal(number)
        return original(*args, **kwargs)

    replace(owner, name, struck)


def main(place: str, number: str, args: list[str]) -> None:
    from eagle3_cli import __main__ as program

    strike(setattr, place, int(number))
    sys.argv = ["eagle3", *args]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits it as ignored
    program.main()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
