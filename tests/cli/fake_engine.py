"""A scriptable engine: says what it is told, remembers what it was asked.

In process the `eagle3` fixture puts it in place of `load_engine`.  For tests that need a real process, terminal or
pipe: `python fake_engine.py SCRIPT ARG...` runs the command line with it; SCRIPT is a JSON list.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle3_cli.engine.types import Likelihood, Piece, Statistics
from eagle3_cli.settings import PLACEMENT

FOREVER = "<forever>"  # a script item: " word" every few milliseconds, until closed


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass
class FakeEngine:
    """Token ids of a text are its UTF-8 bytes.  script: per answer a list of texts, exceptions or callables; a text may
    be a pair with what had proposed it."""

    script: list[Any]
    pair: Any = None
    runtime: Any = None
    prompts: list[str] = field(default_factory=list)
    sampling: Any = None
    limits: Any = None
    watch: Any = None
    calls: list[Any] = field(default_factory=list)  # (sampling, limits) of every answer
    closed: bool = False
    answers_closed: int = 0
    statistics: Statistics = field(default_factory=Statistics)

    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        tree = self.pair.tree(on_gpu=False)
        return {
            "target": str(self.pair.target),
            "draft": str(self.pair.draft) if self.pair.draft else None,
            "loras": [[str(lora.path), lora.scale] for lora in self.pair.loras],
            "chat_template_kwargs": self.pair.template_variables(),
            "lookup": self.pair.lookup,
            "ctx_size": self.runtime.ctx_size or 8192,
            "batch_size": self.runtime.batch,
            "threads": self.runtime.threads,
            "draft_threads": self.runtime.draft_threads,
            "gpu_layers": self.runtime.gpu_layers,
            "device": self.runtime.device,
            **{name: getattr(self.runtime, name) for name in PLACEMENT},
            "flash_attn": self.runtime.flash_attn,
            "mmap": self.runtime.mmap,
            "cache_type_k": self.runtime.cache_type_k,
            "cache_type_v": self.runtime.cache_type_v,
            "draft_depth": tree.depth,
            "draft_width": tree.width,
            "draft_tokens": "auto" if self.pair.nodes is None else tree.nodes,
            "feedback": self.pair.feedback,
        }

    def logit_gap(self, tokens: list[int], likelier: int, other: int) -> float:
        return 0.25

    def effective(self, sampling: Any) -> Any:
        return sampling if sampling.seed is not None else replace(sampling, seed=7)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        return list("".join(f"<{m['role']}>{m['content']}" for m in messages).encode())

    @property
    def decoder(self) -> Any:
        """Its model has the tokens: id 0 to 255 is a byte, any other prints nothing."""
        model = SimpleNamespace(
            piece=lambda token: bytes([token]) if token < 256 else b"", token_text=lambda token: f"<{token}>"
        )
        return SimpleNamespace(model=model, budget=None)

    def stream(self, prompt: list[int], sampling: Any, limits: Any, watch: Any = None) -> Iterator[Piece]:
        self.prompts.append(bytes(prompt).decode())
        self.sampling, self.limits, self.watch = sampling, limits, watch
        self.calls.append((sampling, limits))
        self.statistics = Statistics(
            enabled=self.pair.draft is not None, reason=self.pair.no_draft, prompt_tokens=len(prompt), prefill_s=0.5
        )
        return self._answer(self.script.pop(0) if self.script else ["ok"])

    def _answer(self, items: list[Any]) -> Iterator[Piece]:
        try:
            for item in self._expanded(items):
                if isinstance(item, BaseException):
                    raise item
                if callable(item):
                    item()
                    continue
                self._count()
                token = 100 + self.statistics.completion_tokens
                text, source = (item, 0) if isinstance(item, str) else item
                yield Piece(text, token, source, likelihood=self._likelihood(token))
            yield Piece("", None, finish_reason="stop")
        finally:
            self.answers_closed += 1

    def _likelihood(self, token: int) -> Likelihood | None:
        """Where it is asked for: the token's own, and those of the token itself, of id 300 and of id 226."""
        if self.watch is None or self.watch.likeliest is None:
            return None
        return Likelihood(-0.5, [(token, -0.5), (300, -1.5), (226, -2.5)][: self.watch.likeliest])

    def _expanded(self, items: list[Any]) -> Iterator[Any]:
        for item in items:
            while item == FOREVER:
                time.sleep(0.005)
                yield " word"
            yield item

    def _count(self) -> None:
        s = self.statistics
        s.completion_tokens += 1
        s.rounds, s.round_tokens, s.drafted, s.accepted, s.decode_s = 1, s.completion_tokens, 4, 3, 0.25

    def close(self) -> None:
        self.closed = True


def main(script: str, args: list[str]) -> None:
    """Run the command line in this process with a fake pair and a fake engine."""
    import types

    import eagle3_cli
    from eagle3_cli import __main__ as program
    from eagle3_cli import demo

    stub: Any = types.ModuleType("eagle3_cli.engine")  # in place of the real package: it need not load llama.cpp
    stub.__path__ = [str(Path(eagle3_cli.__file__).parent / "engine")]
    stub.load_engine = lambda pair, runtime, progress=None: FakeEngine(json.loads(script), pair, runtime)
    sys.modules["eagle3_cli.engine"] = stub
    demo.demo_target = lambda: Path("demo-target.gguf")
    demo.demo_drafter = lambda: Path("demo-drafter.gguf")
    sys.argv = ["eagle3", *args]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits it as ignored
    program.main()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
