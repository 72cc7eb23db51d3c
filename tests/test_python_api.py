"""`eagle3_cli.load` and what it gives: on tiny models, and on an engine that takes notes of what it is handed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import eagle3_cli.engine
from eagle3_cli import Lora, Pair, load
from eagle3_cli.engine.types import Piece, Statistics
from eagle3_cli.errors import BusyError, Eagle3Error, FileError, InputError, OptionError, PromptError
from eagle3_cli.registry import Registered
from eagle3_cli.settings import Limits, RuntimeSettings, SamplingSettings

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "python.md"
RUNTIME = {**tiny.EXACT, "ctx_size": 512, "batch": 64, "threads": 1}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
RAW: dict[str, Any] = {**GREEDY, "raw": True}  # a template ends every prompt alike, and the tiny target looks there


@pytest.fixture
def open_pair(tiny_target, tiny_drafters):
    """open_pair(drafter's name or None, **options of load) -> Pair; closed after the test."""
    opened = []

    def open_one(draft: str | None = "good", **options: Any) -> Pair:
        path = tiny_drafters[draft].path if draft else None
        opened.append(load(tiny_target.path, path, **{**RUNTIME, **options}))
        return opened[-1]

    yield open_one
    for pair in opened:
        pair.close()


@dataclass
class NoteTaker:
    """An engine that answers "ok" and remembers what it was asked."""

    asked: list[Any] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)

    def render(self, messages):
        return [len(messages), *messages[-1]["content"].encode()]

    def tokenize(self, text):
        return list(text.encode())

    def effective(self, sampling):
        return replace(sampling, seed=7) if sampling.seed is None else sampling

    def stream(self, tokens, sampling, limits, watch):
        self.asked.append((tokens, sampling, limits, watch))
        yield Piece("ok", 3, finish_reason="length")

    def close(self):
        pass


@pytest.fixture
def engine():
    return NoteTaker()


@pytest.fixture
def pair(engine):
    with Pair(engine) as opened:
        yield opened


# ---- the package ------------------------------------------------------------------------------------------


def test_importing_the_package_loads_no_model_code():
    heavy = "{'llama_cpp', 'numpy', 'click', 'jinja2', 'eagle3_cli.engine'}"
    code = f"import sys, eagle3_cli, eagle3_cli.api; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_package_has_every_name_that_it_lists_and_no_other():
    assert {name: hasattr(eagle3_cli, name) for name in eagle3_cli.__all__} == dict.fromkeys(eagle3_cli.__all__, True)
    with pytest.raises(AttributeError, match="'eagle3_cli' has no attribute 'unload'"):
        _ = eagle3_cli.unload


def test_the_examples_of_the_guide_run(tiny_target, tiny_drafters, tmp_path, monkeypatch, capsys):
    (tmp_path / "llama.gguf").symlink_to(tiny_target.path)
    (tmp_path / "llama-eagle3.gguf").symlink_to(tiny_drafters["good"].path)
    monkeypatch.chdir(tmp_path)
    real = eagle3_cli.engine.load_engine  # one thread: others would wait for a core that another program has
    monkeypatch.setattr(
        "eagle3_cli.engine.load_engine", lambda pair, runtime, told: real(pair, replace(runtime, threads=1), told)
    )
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert len(examples) > 5
    namespace: dict[str, Any] = {}
    for number, example in enumerate(examples, 1):
        exec(compile(example, f"docs/python.md, example {number}", "exec"), namespace)
    assert capsys.readouterr().out.strip()


def test_the_guide_names_every_setting():
    text = GUIDE.read_text("utf-8")
    names = [f.name for kind in (SamplingSettings, Limits, RuntimeSettings) for f in fields(kind)]
    assert [name for name in names if f"`{name}`" not in text] == []


# ---- load -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "enabled", "lookup", "nodes"),
    [
        ({"draft": "good"}, True, True, "auto"),
        ({"draft": "good", "lookup": False}, True, False, "auto"),
        ({"draft": "good", "nodes": 8, "depth": 4, "width": 4}, True, False, 8),
        ({"draft": None}, True, True, "auto"),
        ({"draft": None, "lookup": False}, False, False, None),
    ],
)
def test_what_is_proposed_follows_from_the_files_and_lookup(open_pair, options, enabled, lookup, nodes):
    opened = open_pair(**options)
    assert (opened.settings["lookup"], opened.settings["draft_tokens"]) == (lookup, nodes)
    assert opened.statistics.enabled == enabled
    assert opened.statistics.reason == (None if enabled else "no drafter was given")


def test_without_files_the_demo_pair_is_loaded(tiny_target, tiny_drafters, monkeypatch):
    monkeypatch.setattr("eagle3_cli.demo.demo_target", lambda: tiny_target.path)
    monkeypatch.setattr("eagle3_cli.demo.demo_drafter", lambda: tiny_drafters["good"].path)
    with load(**RUNTIME) as opened:
        assert opened.settings["target"] == str(tiny_target.path)
        assert opened.settings["draft"] == str(tiny_drafters["good"].path)


def test_a_registered_name_brings_its_drafter(monkeypatch):
    asked = []
    monkeypatch.setattr("eagle3_cli.engine.load_engine", lambda *what: asked.append(what[0]) or NoteTaker())
    known = {"llama": Registered("/m/t.gguf", "/m/d.gguf"), "alone": Registered("/m/t.gguf", "lookup")}
    monkeypatch.setattr("eagle3_cli.registry.find", known.get)
    for files in (("llama",), ("llama", "other.gguf"), ("alone",), (Path("llama"),)):
        load(*files)
    found = [(str(pair.target), pair.draft and str(pair.draft), pair.lookup) for pair in asked]
    assert found == [
        ("/m/t.gguf", "/m/d.gguf", True),
        ("/m/t.gguf", "other.gguf", True),
        ("/m/t.gguf", None, True),
        ("llama", None, True),
    ]


def test_adapters_are_files_or_files_with_a_scale(monkeypatch):
    asked = []
    monkeypatch.setattr("eagle3_cli.engine.load_engine", lambda *what: asked.append(what) or NoteTaker())
    load("t.gguf", "d.gguf", loras=["a.gguf", Lora(Path("b.gguf"), 0.5)], gpu_layers=None, mmap=False)
    ((settings, runtime, _),) = asked
    assert settings.loras == (Lora(Path("a.gguf")), Lora(Path("b.gguf"), 0.5))
    assert runtime == RuntimeSettings(mmap=False)


def test_where_tensors_go_is_taken_in_several_forms(monkeypatch):
    asked = []
    monkeypatch.setattr("eagle3_cli.engine.load_engine", lambda *what: asked.append(what[1]) or NoteTaker())
    load("t.gguf", "d.gguf", tensor_split=[3, 1], override_tensor=["a=CPU", "b=CPU"])
    load("t.gguf", "d.gguf", override_tensor="a=CPU")
    assert asked == [
        RuntimeSettings(tensor_split=(3.0, 1.0), override_tensor=("a=CPU", "b=CPU")),
        RuntimeSettings(override_tensor=("a=CPU",)),
    ]


def test_the_progress_of_both_files_is_told_and_what_it_raises_ends_the_load(tiny_target, tiny_drafters):
    told = []
    load(tiny_target.path, tiny_drafters["good"].path, progress=lambda *what: told.append(what), **RUNTIME).close()
    assert {name for name, _ in told} == {"target", "drafter"}
    assert told[-1] == ("drafter", 1.0)

    def refuse(name: str, done: float) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        load(tiny_target.path, progress=refuse, **RUNTIME)


@pytest.mark.parametrize(
    ("files", "options", "error", "message"),
    [
        (("absent.gguf",), {}, FileError, "absent.gguf: no such file"),
        ((None, "d.gguf"), {}, OptionError, "draft: needs target"),
        (("t.gguf", "d.gguf"), {"ctx": 5}, OptionError, "ctx: no such setting"),
        (("t.gguf", "d.gguf"), {"ctx_size": "5"}, OptionError, "ctx_size: expected a whole number, got '5'"),
        (("t.gguf", "d.gguf"), {"mmap": 0}, OptionError, "mmap: expected True or False, got 0"),
        (("t.gguf", "d.gguf"), {"threads": -1}, OptionError, "--threads: expected a value from 0 to 512, got -1"),
        (("t.gguf", "d.gguf"), {"tensor_split": "3,x"}, OptionError, "tensor_split: expected numbers, got '3,x'"),
        (("t.gguf", "d.gguf"), {"depth": 65}, OptionError, "--draft-depth: expected a value from 1 to 64, got 65"),
        (("t.gguf",), {"width": 2}, OptionError, "width: has no effect without a drafter"),
        (("t.gguf",), {"lookup": False, "nodes": 2}, OptionError, "nodes: has no effect without a drafter"),
    ],
)
def test_bad_input_of_load_is_one_error(tmp_path, monkeypatch, files, options, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(message)):
        load(*files, **options)


def test_a_misspelt_setting_is_told_the_right_one():
    with pytest.raises(OptionError) as caught:
        load("t.gguf", "d.gguf", thread=2)
    assert caught.value.hint == "Did you mean threads?"


# ---- answers ----------------------------------------------------------------------------------------------


def test_an_answer_is_that_of_the_engine_of_the_command_line(open_pair, open_engine):
    engine = open_engine("good")
    prompt = engine.render([{"role": "user", "content": "the hen"}])
    wanted = list(engine.stream(prompt, SamplingSettings(temperature=0.0), Limits(max_tokens=24)))
    found = list(open_pair().stream("the hen", **GREEDY))
    assert [(p.text, p.token, p.finish_reason) for p in found] == [(p.text, p.token, p.finish_reason) for p in wanted]
    assert len(found) == 24


def test_the_answer_does_not_depend_on_the_drafter(open_pair):
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "repeat_penalty": 1.2}
    with_drafter = open_pair("good", nodes=8, depth=4, width=4).answer("the hen", **settings)
    without = open_pair(None, lookup=False).answer("the hen", **settings)
    assert (with_drafter.text, with_drafter.tokens) == (without.text, without.tokens)
    assert with_drafter.statistics.accepted > without.statistics.accepted == 0


def test_an_answer_tells_what_the_stream_gave(open_pair):
    opened = open_pair()
    answer = opened.answer("the hen", **GREEDY)
    assert str(answer) == answer.text == "".join(piece.text for piece in answer.pieces)
    assert answer.tokens == tuple(piece.token for piece in answer.pieces)
    assert (answer.finish_reason, answer.statistics.completion_tokens) == ("length", 24)
    assert answer.statistics is opened.statistics
    assert repr(answer).count("\n") == 0
    assert "Piece" not in repr(answer)


def test_the_seed_of_an_answer_gives_it_again(open_pair):
    opened = open_pair("good", nodes=8, depth=4, width=4)
    first = opened.answer("the hen", temperature=1.5, max_tokens=24)
    assert opened.answer("the hen", temperature=1.5, max_tokens=24, seed=first.seed).tokens == first.tokens


def test_likelihoods_and_rounds_are_there_when_asked_for(open_pair):
    opened, rounds = open_pair("good", nodes=8, depth=4, width=4), []
    answer = opened.answer("the hen", likeliest=3, rounds=rounds.append, **GREEDY)
    for piece in answer.pieces:
        assert len(piece.likelihood.top) == 3
        assert piece.likelihood.top[0] == (piece.token, pytest.approx(piece.likelihood.logp))
    assert 1 + sum(len(record.verdict.tokens) for record in rounds) == 24
    assert opened.answer("the hen", **GREEDY).pieces[0].likelihood is None


def test_a_schema_shapes_the_answer(open_pair):
    answer = open_pair().answer("the hen", schema={"type": "boolean"}, temperature=0, max_tokens=60)
    assert json.loads(answer.text) in (True, False)


def test_tokens_and_their_bytes(open_pair):
    opened = open_pair(None)
    tokens = opened.tokenize("the hen")
    assert b"".join(map(opened.token_bytes, tokens)) == b"the hen"
    assert opened.token_bytes(tiny.IM_END) == b""
    with pytest.raises(InputError, match=f"expected an id from 0 to {tiny.VOCAB - 1}, got {tiny.VOCAB}"):
        opened.token_bytes(tiny.VOCAB)


def test_a_prompt_without_room_is_refused_before_the_first_piece(open_pair):
    opened = open_pair(None)
    stream = opened.stream([5] * 512)
    with pytest.raises(PromptError, match="the context holds 512"):
        next(stream)
    assert opened.answer("the hen", **GREEDY).text


# ---- what is handed on ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "raw", "tokens"),
    [
        ("Hi", False, [1, *b"Hi"]),
        ("Hi\r\n", True, [*b"Hi\n"]),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], False, [2, *b"Hi"]),
        (({"role": "user", "content": "Hi"},), False, [1, *b"Hi"]),
        ([4, 5, 6], False, [4, 5, 6]),
        (np.array([4, 5], np.int32), False, [4, 5]),
    ],
)
def test_a_prompt_is_a_message_a_conversation_or_tokens(pair, engine, prompt, raw, tokens):
    pair.answer(prompt, raw=raw)
    assert engine.asked[-1][0] == tokens
    assert all(type(token) is int for token in engine.asked[-1][0])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        (" \n", "the prompt is empty"),
        ("a\0b", "the prompt: expected text, got a NUL character at offset 1"),
        ([], "prompt: expected a list of messages, got []"),
        ({"role": "user", "content": "Hi"}, "prompt: message 1: expected an object with role and content"),
        ([{"role": "user"}], "prompt: message 1: expected content as text, got null"),
        (
            [{"role": "user", "content": "Hi"}, {"role": "user", "content": 5}],
            "prompt: message 2: expected content as text, got 5",
        ),
        ([{"role": "bot", "content": "Hi"}], "prompt: message 1: expected role as one of system, user, assistant"),
        ([{"role": "user", "content": "a\0"}], "prompt: message 1: expected text, got a NUL"),
        ([4, "x"], "prompt, place 1: expected a token id, got 'x'"),
        (b"Hi", "prompt: message 1: expected an object"),
    ],
)
def test_a_bad_prompt_is_refused_at_the_call(pair, engine, prompt, message):
    with pytest.raises(InputError, match=re.escape(message)):
        pair.stream(prompt)
    assert engine.asked == []


def test_settings_arrive_with_one_form_for_what_has_several(pair, engine):
    pair.answer(
        "Hi", temperature=1, top_k=np.int64(3), stop="\n", logit_bias={5: -1}, dry_sequence_breakers=["."], seed=9,
        max_tokens=2,
    )  # fmt: skip
    _, sampling, limits, watch = engine.asked[-1]
    assert sampling == SamplingSettings(
        temperature=1.0, top_k=3, logit_bias=((5, -1.0),), dry_sequence_breakers=(".",), seed=9
    )
    assert type(sampling.top_k) is int
    assert limits == Limits(max_tokens=2, stop=("\n",))
    assert (watch.likeliest, watch.rounds) == (None, None)


@pytest.mark.parametrize("kind", [SamplingSettings, Limits])
def test_every_setting_is_taken_with_its_default(pair, engine, kind):
    pair.answer("Hi", **{f.name: getattr(kind(), f.name) for f in fields(kind)})
    assert engine.asked[-1][1:3] == (SamplingSettings(seed=7), Limits())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "temprature: no such setting"),
        ({"temperature": "hot"}, "temperature: expected a number, got 'hot'"),
        ({"temperature": -1}, "--temp: expected a value from 0 to 100, got -1"),
        ({"temperature": float("nan")}, "--temp: expected a value from 0 to 100, got nan"),
        ({"top_k": 2.5}, "top_k: expected a whole number, got 2.5"),
        ({"top_k": True}, "top_k: expected a whole number, got True"),
        ({"top_k": None}, "top_k: expected a whole number, got None"),
        ({"grammar": 5}, "grammar: expected a text, got 5"),
        ({"stop": ["a", 1]}, "stop: expected texts, got ['a', 1]"),
        ({"stop": ""}, "--stop: expected a non-empty string"),
        ({"logit_bias": {"x": 1}}, "logit_bias: expected {token id: bias}, got {'x': 1}"),
        ({"max_tokens": 0}, "--max-tokens: expected a value at least 1, got 0"),
        ({"likeliest": -1}, "likeliest: expected a value at least 0, got -1"),
        ({"schema": {}, "grammar": "root ::= [a]"}, "schema: cannot be used with grammar"),
        ({"schema": {"enum": {1}}}, "schema: expected what JSON can say"),
    ],
)
def test_a_bad_setting_is_refused_at_the_call(pair, engine, options, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        pair.answer("Hi", **options)
    assert engine.asked == []


@pytest.mark.parametrize("prompt", [[4, 5], [{"role": "user", "content": "Hi"}]])
def test_raw_has_no_effect_on_anything_but_a_text(pair, prompt):
    with pytest.raises(OptionError, match="raw: has no effect"):
        pair.stream(prompt, raw=True)


# ---- one answer at a time ---------------------------------------------------------------------------------


def test_a_second_answer_is_refused_and_the_first_goes_on_unharmed(open_pair):
    opened = open_pair()
    wanted = opened.answer("the hen", **RAW).tokens
    first, waiting = opened.stream("the hen", **RAW), opened.stream("the hat", **RAW)
    tokens = [next(first).token]
    with pytest.raises(BusyError, match="one answer at a time"):
        opened.stream("the hat", **RAW)
    with pytest.raises(BusyError, match="one answer at a time"):
        next(waiting)
    tokens += [piece.token for piece in first]
    assert tuple(tokens) == wanted
    assert opened.answer("the hat", **RAW).tokens != wanted


def test_another_thread_is_refused_until_the_answer_is_closed(open_pair):
    opened = open_pair()
    wanted = opened.answer("the hat", **RAW).tokens
    with ThreadPoolExecutor(1) as pool:
        stream = opened.stream("the hen", **RAW)
        next(stream)
        with pytest.raises(BusyError):
            pool.submit(opened.answer, "the hat", **RAW).result()
        stream.close()
        assert pool.submit(opened.answer, "the hat", **RAW).result().tokens == wanted


def test_of_many_threads_each_is_answered_rightly_or_refused(open_pair):
    opened = open_pair()
    wanted = opened.answer("the hen", **RAW).tokens

    def ask(_: int) -> Any:
        try:
            return opened.answer("the hen", **RAW).tokens
        except BusyError:
            return None

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(ask, range(40)))
    assert wanted in found
    assert found <= {wanted, None}


def test_an_answer_that_was_left_does_not_stand_in_the_way(open_pair):
    opened = open_pair()
    wanted = opened.answer("the hat", **RAW).tokens
    for _ in opened.stream("the hen", **RAW):
        break
    assert opened.answer("the hat", **RAW).tokens == wanted


def test_a_pair_may_be_loaded_and_used_in_another_thread(tiny_target, tiny_drafters):
    def work() -> tuple[int, ...]:
        with load(tiny_target.path, tiny_drafters["good"].path, **RUNTIME) as opened:
            return opened.answer("the hen", **RAW).tokens

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == work()


# ---- the end ----------------------------------------------------------------------------------------------


def test_a_closed_pair_says_so(open_pair):
    opened = open_pair()
    waiting = opened.stream("the hen", **RAW)
    opened.close()
    opened.close()
    for use in (
        lambda: opened.stream("the hen"),
        lambda: next(waiting),
        lambda: opened.tokenize("the hen"),
        lambda: opened.render([{"role": "user", "content": "the hen"}]),
        lambda: opened.token_bytes(1),
        lambda: opened.vocabulary,
    ):
        with pytest.raises(Eagle3Error, match="engine: is closed"):
            use()


def test_closing_ends_an_answer_that_was_begun(open_pair):
    opened = open_pair()
    stream = opened.stream("the hen", **RAW)
    next(stream)
    opened.close()
    assert list(stream) == []


def test_closing_while_an_answer_is_computed_is_refused_and_frees_nothing(open_pair):
    opened = open_pair()
    with pytest.raises(BusyError, match="an answer is being computed"):
        opened.answer("the hen", rounds=lambda _: opened.close(), **RAW)
    assert opened.answer("the hen", **RAW).text


# ---- a library, not a program -----------------------------------------------------------------------------


def test_no_signal_handler_is_touched(open_pair):
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    before, during = handlers(), []
    opened = open_pair()
    opened.answer("the hen", rounds=lambda _: during.append(handlers()), **GREEDY)
    assert during
    assert all(found == before for found in [*during, handlers()])


@pytest.fixture
def default_ctrl_c():
    """Python's own handler; a test run in the background inherits that Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_a_function_that_llama_cpp_calls_ends_the_load(open_pair, monkeypatch, default_ctrl_c, capfd):
    def struck(buffers: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("eagle3_cli.llama.ask_for", struck)
        with pytest.raises(KeyboardInterrupt):
            open_pair()
    assert capfd.readouterr() == ("", "")
    assert open_pair().answer("the hen", **GREEDY).text


def test_ctrl_c_is_a_keyboard_interrupt_and_the_next_answer_is_right(open_pair, default_ctrl_c):
    opened = open_pair()
    wanted = opened.answer("the hen", **GREEDY).tokens
    with pytest.raises(KeyboardInterrupt):
        opened.answer("the hen", rounds=lambda _: signal.raise_signal(signal.SIGINT), **GREEDY)
    assert opened.answer("the hen", **GREEDY).tokens == wanted


def test_nothing_is_printed(open_pair, capfd):
    open_pair().answer("the hen", **GREEDY)
    assert capfd.readouterr() == ("", "")
