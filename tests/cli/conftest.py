"""The command line in this process, with a fake engine and a scripted stdin."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Terminal

from eagle3_cli.__main__ import run

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_engine.py")


@dataclass
class Result:
    code: int
    out: str
    err: str


@dataclass
class Program:
    """`eagle3(*args)` runs the command line; `script` is what the engine will say, `engines` what was loaded."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    script: list[Any] = field(default_factory=lambda: [["Hello", " world"]])
    engines: list[FakeEngine] = field(default_factory=list)
    load_error: BaseException | None = None

    def load(self, pair: Any, runtime: Any, progress: Callable[[str, float], None] | None = None) -> FakeEngine:
        if progress:
            progress("target", 0.5)
        if self.load_error:
            raise self.load_error
        self.engines.append(FakeEngine(self.script, pair, runtime))
        return self.engines[-1]

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def __call__(self, *args: str, stdin: bytes | io.TextIOBase | None = None) -> Result:
        """stdin: None is a terminal, bytes are piped in."""
        stream: Any = Terminal() if stdin is None else stdin
        if isinstance(stdin, bytes):
            stream = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        self.monkeypatch.setattr(sys, "stdin", stream)
        code = run(args)
        out, err = self.capsys.readouterr()
        return Result(code, out, err)


@pytest.fixture
def eagle3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    for name in [name for name in os.environ if name.startswith("EAGLE3_")]:
        monkeypatch.delenv(name)
    program = Program(monkeypatch, capsys)
    monkeypatch.setattr("eagle3_cli.engine.load_engine", program.load)
    monkeypatch.setattr("eagle3_cli.demo.demo_target", lambda: Path("demo-target.gguf"))
    monkeypatch.setattr("eagle3_cli.demo.demo_drafter", lambda: Path("demo-drafter.gguf"))
    return program


@pytest.fixture
def command() -> Callable[..., list[str]]:
    """The argument list of a real process: `command('[["Hi"]]', "generate", "x")`."""
    return lambda script, *args: [sys.executable, str(FAKE), script, *args]


@pytest.fixture
def environment() -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("EAGLE3_") or k == "EAGLE3_CACHE"}
    # a terminal of a test does not tell where its cursor is
    return {**plain, "PYTHONPATH": str(ROOT), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}


@pytest.fixture
def process(command: Callable[..., list[str]], environment: dict[str, str]) -> Callable[..., Any]:
    """Run a real process to its end: `process(script, *args, input=b"...")`."""

    def run_it(script: str, *args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        settings = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 60, "env": environment, **options}
        if "input" in options:
            settings.pop("stdin")
        return subprocess.run(command(script, *args), **settings)

    return run_it


HEAVY = (
    "numpy",
    "gguf",
    "llama_cpp",
    "jinja2",
    "torch",
    "prompt_toolkit",
    "rich",
    "eagle3_cli._native",
    "eagle3_cli.llama",
)
IMPORTED = f"""if True:
    import sys
    from eagle3_cli.__main__ import run
    code = run(sys.argv[1:])
    print(sorted({set(HEAVY)} & set(sys.modules)), file=sys.stderr)
    sys.exit(code)
"""


@pytest.fixture
def light(environment: dict[str, str]) -> Callable[..., str]:
    """light(*args) -> stdout of a real process, which must end well, say nothing else and import no model code."""

    def run_it(*args: str) -> str:
        command = [sys.executable, "-c", IMPORTED, *args]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert (result.returncode, result.stderr) == (0, "[]\n")
        return result.stdout

    return run_it


@pytest.fixture
def typing(eagle3, monkeypatch):
    """typing(*lines, flags=()) -> the result of a chat with a person who types these."""

    def chat(*lines, flags=()):
        waiting = list(lines)

        def ask(*_):
            if not waiting:
                raise EOFError
            return waiting.pop(0)

        monkeypatch.setattr("eagle3_cli.commands.chat_input._ask", ask)
        return eagle3("chat", *flags)

    return chat
