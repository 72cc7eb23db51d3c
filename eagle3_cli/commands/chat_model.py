"""`/model` in a chat: the loaded pair, in whose place another one can come."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from typing import Any

from ..console import Console
from ..errors import Eagle3Error, InputError
from ..settings import PairSettings, RuntimeSettings
from . import build
from .answer import Engine, loaded

DEMO = "demo"  # as a target: the pair that comes with eagle3
EXPECTED = "Expected TARGET [DRAFT]: two GGUFs, lookup or --no-draft in the place of the second, or demo."


class LoadedPair:
    """A pair and its engine.  As a context manager: loads it, and closes what is loaded in the end."""

    engine: Engine

    def __init__(self, flags: build.Flags, console: Console) -> None:
        self.flags, self.console = flags, console
        self.settings: PairSettings = build.pair_settings(flags)
        self.runtime: RuntimeSettings = build.runtime_settings(flags)
        self._open = ExitStack()

    def __enter__(self) -> LoadedPair:
        self.engine = self._open.enter_context(loaded(self.settings, self.runtime, self.console))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def description(self) -> str:
        """Target and what drafts for it."""
        pair = self.settings
        drafter = pair.draft or ("n-gram matches alone" if pair.lookup else f"none ({pair.no_draft})")
        return f"target {pair.target}, drafter {drafter}"

    def change(self, words: str) -> None:
        """Load the pair that the words name in the place of this one.  There need not be memory for both, so this one
        is closed first; it comes back where the other one cannot be loaded, or Ctrl-C stops that."""
        before, wanted = self.settings, build.pair_settings({**self.flags, **chosen(words)})
        check_files(wanted, self.runtime)  # the faults that cost no reload
        self._open.close()
        try:
            self.settings = wanted
            self.__enter__()
        except (Eagle3Error, KeyboardInterrupt) as error:
            self.settings = before
            self.__enter__()
            if isinstance(error, Eagle3Error):
                raise
            raise InputError("/model: stopped; the models are those from before.") from None


def chosen(words: str) -> dict[str, Any]:
    """The flags of a pair that the words of /model stand for.  InputError where they are none."""
    try:
        target, *rest = shlex.split(words)
    except ValueError as error:
        raise InputError(f"/model: {error}.", EXPECTED) from error
    pair: dict[str, Any] = {"target": None if target == DEMO else target, "draft": None, "no_draft": False}
    pair |= {"lora": (), "lora_scaled": (), "chat_template_kwargs": None}
    match rest:
        case _ if target.startswith("-"):
            pass
        case []:
            return pair
        case ["--no-draft"]:
            return {**pair, "no_draft": True}
        case ["--draft", draft]:
            return {**pair, "draft": draft}
        case [draft] if not draft.startswith("-"):
            return {**pair, "draft": draft}
    raise InputError(f"/model: got {words}.", EXPECTED)


def check_files(pair: PairSettings, runtime: RuntimeSettings) -> None:
    """The errors of `load_engine` that need no more than the files' headers."""
    from ..model_files import check_target, read_drafter

    check_target(pair.target, runtime.ctx_size)
    if pair.draft is not None:
        read_drafter(pair.draft, pair.target)
