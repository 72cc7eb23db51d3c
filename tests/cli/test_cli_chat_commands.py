"""What the commands of a chat do, in a pipe and for somebody who types."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_engine import Terminal
from hypothesis import given
from hypothesis import strategies as st

from eagle3_cli.commands import chat_settings
from eagle3_cli.commands.chat_commands import ALIASES, COMMANDS, Called, Said, parse
from eagle3_cli.commands.chat_model import chosen
from eagle3_cli.commands.chat_stats import report
from eagle3_cli.engine.types import Statistics
from eagle3_cli.errors import FileError, InputError
from eagle3_cli.settings import Limits, SamplingSettings


@pytest.fixture
def piped(eagle3):
    """piped(lines, *flags) -> the result of a chat with these lines."""

    def chat(*lines, flags=()):
        return eagle3("chat", *flags, stdin="\n".join(lines).encode())

    return chat


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


# ---- lines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("hi", Said("hi")),
        ("  hi ", Said("hi")),
        ("\n  first\n    second\n\n", Said("  first\n    second")),
        ("/etc/hosts is what?", Said("/etc/hosts is what?")),
        ("/tmp is full", Said("/tmp is full")),
        ("/set temperature 1", Called("/set", "temperature 1")),
        (" /undo ", Called("/undo", "")),
        ("/system first\nsecond", Called("/system", "first\nsecond")),
        ("/load my chat.json", Called("/load", "my chat.json")),
        ('"""/exit"""', Said("/exit")),
        ('"""\n/exit\n  now\n"""', Said("/exit\n  now")),
        ('"""a""" and """b"""', Said('"""a""" and """b"""')),
        ('""" """', None),
        (" ", None),
        *((alias, Called(name, "")) for alias, name in ALIASES.items()),
    ],
)
def test_what_a_line_asks_for(line, meant):
    assert parse(line, quotes=True) == meant


def test_in_a_pipe_quotes_are_a_part_of_the_message():
    assert parse('"""/exit"""', quotes=False) == Said('"""/exit"""')


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/rest", "/rest: no such command"),
        ("/rest now", "/rest: no such command"),
        ("/retry please", "/retry: expected nothing behind it, got please"),
    ],
)
def test_a_slip_is_an_error_that_says_how_to_send_it(line, words):
    with pytest.raises(InputError, match=words) as caught:
        parse(line, quotes=True)
    assert (caught.value.hint is not None) == (" " in line)


@given(st.text())
def test_any_text_is_a_message_a_command_or_an_error(text):
    try:
        asked = parse(text, quotes=True)
    except InputError:
        return
    if isinstance(asked, Called):
        assert asked.name in COMMANDS
    else:
        assert asked is None or (asked.text.strip() and asked.text in text)


def test_help_lists_every_command(typing):
    err = typing("/help").err
    assert all(name in err for name in (*COMMANDS, *ALIASES))


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_three_words_leave(piped, word):
    assert piped("hi", word, "more").out == "Hello world\n"


def test_files_go_before_the_next_message_and_only_that(piped, eagle3, tmp_path):
    (tmp_path / "a b.txt").write_text("Rain.\n\nSnow.\n")
    (tmp_path / "c.txt").write_text("Sun.\n")
    piped(f"/read {tmp_path}/a b.txt", f"/read {tmp_path}/c.txt", "Summarise.", "/reset", "two")
    assert eagle3.engine.prompts == ["<user>Rain.\n\nSnow.\n\nSun.\n\nSummarise.", "<user>two"]
    piped(f"/read {tmp_path}/c.txt", "/reset", "three")
    assert eagle3.engine.prompts[-1] == "<user>three"


def test_clear_is_reset(piped, eagle3):
    piped("one", "/clear", "two")
    assert eagle3.engine.prompts[-1] == "<user>two"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/load", "/load: expected the name of a file"),
        ("/load /no/such", "/load /no/such: No such file"),
        ("/save", "/save: expected the name of a file"),
        ("/read", "/read: expected the name of a file"),
        ("/read /no/such", "/read /no/such: No such file"),
        (f"/read {os.devnull}", "is empty"),
        ("/undo", "there is no message yet"),
        ("/retry", "there is no message yet"),
        ("/set temp", "/set: expected a name and a value, got temp"),
        ("/set heat 1", "/set heat: no such setting"),
        ("/model --draft", "Expected TARGET [DRAFT]"),
        ("/undo it", "expected nothing behind it"),
    ],
)
def test_a_command_that_fails_ends_a_pipe_and_not_a_person(piped, typing, line, words):
    result = piped(line, "hi")
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    result = typing(line, "hi")
    assert (result.code, result.out) == (0, "Hello world\n")
    assert words in result.err


# ---- what was said ----------------------------------------------------------------------------------------


def test_system_replaces_the_system_message_and_keeps_what_was_said(piped, eagle3):
    piped("one", "/system be brief", "two", "/system none", "three", flags=("--system", "be kind"))
    assert [prompt.split("<user>")[0] for prompt in eagle3.engine.prompts] == [
        "<system>be kind",
        "<system>be brief",
        "",
    ]
    assert eagle3.engine.prompts[2].startswith("<user>one<assistant>")


def test_system_alone_shows_it(piped):
    result = piped("/system", "/system be brief", "/system")
    assert result.err == "(no system message)\nbe brief\n"


def test_a_changed_system_message_survives_a_reset(piped, eagle3):
    piped("one", "/system be brief", "/reset", "two")
    assert eagle3.engine.prompts[-1] == "<system>be brief<user>two"


def test_undo_takes_a_message_and_its_answer_back(piped, eagle3):
    eagle3.script = [["a"], ["b"], ["c"]]
    piped("one", "two", "/undo", "three")
    assert eagle3.engine.prompts[-1] == "<user>one<assistant>a<user>three"


def test_retry_answers_the_same_message_once_more(piped, eagle3):
    eagle3.script = [["a"], ["b"], ["c"]]
    assert piped("one", "/retry", "two").out == "a\nb\nc\n"
    assert eagle3.engine.prompts == ["<user>one", "<user>one", "<user>one<assistant>b<user>two"]


@pytest.mark.parametrize("leave", [(interrupt, interrupt), ()])
def test_a_retry_that_is_stopped_before_it_begins_keeps_the_answer(typing, eagle3, leave):
    eagle3.script = [["a"], [*leave, "b"], ["c"]]
    typing("one", "/retry", "two")
    kept = "a" if leave else "b"
    assert eagle3.engine.prompts[-1] == f"<user>one<assistant>{kept}<user>two"


def test_a_retry_that_cannot_differ_says_so(typing, eagle3, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    typing("one", "/retry", flags=("--temp", "0"))
    assert "the answer will be the same: temperature is 0" in screen.getvalue()


@pytest.fixture
def editor(tmp_path, monkeypatch):
    """An editor that puts a text into its file, and keeps what was in it."""
    seen = tmp_path / "seen"

    def use(text, code=0):
        program = tmp_path / "editor"
        program.write_text(
            f"#!{sys.executable}\nimport sys\nname = sys.argv[-1]\nopen({str(seen)!r}, 'w').write(open(name).read())\n"
            f"if {text!r} is not None:\n    open(name, 'w').write({text!r})\nsys.exit({code})\n"
        )
        program.chmod(0o700)
        monkeypatch.setenv("VISUAL", str(program))
        return seen

    return use


def test_edit_replaces_the_last_message_by_what_the_editor_leaves(typing, eagle3, editor):
    eagle3.script = [["a"], ["b"], ["c"]]
    seen = editor("deux\n")
    typing("one", "two", "/edit")
    assert seen.read_text() == "two\n"
    assert eagle3.engine.prompts[-1] == "<user>one<assistant>a<user>deux"


def test_edit_without_a_message_begins_one(typing, eagle3, editor):
    editor("first")
    typing("/edit")
    assert eagle3.engine.prompts == ["<user>first"]


@pytest.mark.parametrize("text", ["", None])
def test_edit_that_leaves_nothing_changes_nothing(typing, eagle3, editor, text):
    editor(text)
    typing("one", "/edit", "two")
    assert eagle3.engine.prompts[-1] == "<user>one<assistant>Hello world<user>two"


def test_an_editor_that_fails_is_one_message(typing, eagle3, editor):
    editor("x", code=3)
    result = typing("one", "/edit", "two")
    assert result.code == 0
    assert "error: /edit: " in result.err
    assert "<user>one<assistant>Hello world<user>two" in eagle3.engine.prompts


def test_edit_needs_a_terminal(piped):
    result = piped("one", "/edit")
    assert result.code == 2
    assert "/edit: needs somebody at a terminal" in result.err


# ---- files ------------------------------------------------------------------------------------------------


def test_a_saved_conversation_goes_on_in_another_chat(piped, eagle3, tmp_path):
    file = str(tmp_path / "my chat.json")
    eagle3.script = [["a"], ["b"]]
    piped("one", "two", f"/save {file}", flags=("--system", "be brief"))
    eagle3.script = [["c"]]
    piped(f"/load {file}", "three")
    assert eagle3.engine.prompts == ["<system>be brief<user>one<assistant>a<user>two<assistant>b<user>three"]


def test_save_alone_saves_in_the_same_file_again(piped, eagle3, tmp_path):
    file = tmp_path / "chat.json"
    result = piped("one", f"/save {file}", "two", "/save")
    assert (result.code, result.err) == (0, "")
    assert [m["content"] for m in json.loads(file.read_text())["messages"] if m["role"] == "user"] == ["one", "two"]


def test_save_replaces_another_file_only_if_forced(piped, typing, tmp_path):
    file = tmp_path / "chat.json"
    file.write_text("mine")
    result = piped("one", f"/save {file}")
    assert result.code == 2
    assert "exists" in result.err
    assert "--force" in result.err
    assert file.read_text() == "mine"
    assert piped("one", f"/save --force {file}").code == 0
    assert json.loads(file.read_text())["messages"][0]["content"] == "one"


def test_a_loaded_question_without_an_answer_is_answered(piped, eagle3, tmp_path):
    file = tmp_path / "q.json"
    file.write_text('{"messages": [{"role": "user", "content": "why?"}]}')
    eagle3.script = [["because"], ["so"]]
    assert piped(f"/load {file}", "more").out == "because\nso\n"
    assert eagle3.engine.prompts[-1] == "<user>why?<assistant>because<user>more"


def test_thinking_is_not_put_back_into_the_conversation(piped, eagle3):
    eagle3.script = [["<think>", "hm", "</think>", "yes"], ["no"]]
    result = piped("one", "two")
    assert (result.out, result.err) == ("yes\nno\n", "hm\n")
    assert eagle3.engine.prompts[-1] == "<user>one<assistant>yes<user>two"
    eagle3.script = [["<think>", "hm", "</think>", "yes"]]
    assert piped("one", flags=("--hide-thinking",)).err == ""


# ---- settings and numbers ---------------------------------------------------------------------------------


def test_set_changes_the_next_answers(piped, eagle3):
    piped("/set temp 0.5", "/set max-tokens 9", "/set seed 4", "/set top_k 3", "hi")
    assert eagle3.engine.sampling == SamplingSettings(temperature=0.5, seed=4, top_k=3)
    assert eagle3.engine.limits == Limits(max_tokens=9)


def test_set_alone_lists_every_setting(piped):
    lines = piped("/set").err.splitlines()
    assert [line.split()[0] for line in lines] == list(chat_settings.KINDS)
    values = {line.split()[0]: line.split()[1] for line in lines}
    assert (values["temperature"], values["top_k"], values["seed"]) == ("0.8", "40", "-1")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", "hot", "/set temperature: expected a number, got hot"),
        ("temperature", "1000", "/set temperature: expected a value from 0 to 100, got 1000"),
        ("temperature", "nan", "expected a value"),
        ("top_k", "1.5", "expected a whole number"),
        ("max_tokens", "0", "/set max_tokens: expected a value at least 1, got 0"),
        ("grammar", "x", "no such setting"),
        ("dry_sequence_breakers", "x", "no such setting"),
        ("samplers", "top_k;best", "/set samplers: expected one of penalties, dry"),
    ],
)
def test_a_bad_setting_is_refused_by_its_name_here(name, value, words):
    with pytest.raises(InputError, match=words):
        chat_settings.changed(name, value, SamplingSettings(), Limits())


@pytest.mark.parametrize("name", chat_settings.KINDS)
def test_every_setting_can_be_changed_and_unset_ones_stay(name):
    before = SamplingSettings(dry_multiplier=1.0, repeat_penalty=1.1)
    text, value = {"adaptive_decay": ("0.5", 0.5), "samplers": ("top-p;temp", ("top_p", "temperature"))}.get(
        name, ("1", 1)
    )
    sampling, limits, said = chat_settings.changed(name, text, before, Limits())
    assert said.partition(" (")[0] == f"{name}: {';'.join(value) if isinstance(value, tuple) else value}"
    if name == "max_tokens":
        assert (sampling, limits) == (before, Limits(max_tokens=1))
    else:
        assert (sampling, limits) == (replace(before, **{name: value}), Limits())


@pytest.mark.parametrize(
    ("name", "sampling", "idle"),
    [
        ("top_k", SamplingSettings(temperature=0), True),
        ("typical", SamplingSettings(temperature=0), True),
        ("seed", SamplingSettings(temperature=0), True),
        ("seed", SamplingSettings(), False),
        ("min_p", SamplingSettings(mirostat=2), True),
        ("mirostat_lr", SamplingSettings(), True),
        ("mirostat_lr", SamplingSettings(mirostat=2), False),
        ("top_k", SamplingSettings(), False),
        ("dry_base", SamplingSettings(), True),
        ("dry_multiplier", SamplingSettings(), False),
        ("repeat_last_n", SamplingSettings(), True),
        ("repeat_last_n", SamplingSettings(presence_penalty=1), False),
    ],
)
def test_a_setting_without_effect_is_told(name, sampling, idle):
    assert ("no effect" in chat_settings.changed(name, "1", sampling, Limits())[2]) is idle


@pytest.mark.parametrize("name", ["seed", "max_tokens"])
def test_minus_one_is_what_it_is_on_the_command_line(name):
    sampling, limits, _ = chat_settings.changed(name, "-1", SamplingSettings(seed=1), Limits(max_tokens=1))
    assert (sampling.seed if name == "seed" else limits.max_tokens) is None


def test_stats_tell_depths_sources_time_and_context():
    numbers = Statistics(
        enabled=True, prompt_tokens=30, completion_tokens=12, rounds=4, round_tokens=12, drafted=16, accepted=8,
        depth_tried=[4, 3, 0], depth_accepted=[3, 1, 0], sizes={4: 4}, drafted_from={1: 10, 2: 6},
        accepted_from={1: 7, 2: 1}, decode_s=2.0, target_s=1.0, drafter_s=0.5, sampler_s=0.1,
    )  # fmt: skip
    text = "\n".join(report(numbers, cells=100, turns=2))
    assert "acceptance length 3.00" in text
    assert "accepted by depth: 1: 75% of 4, 2: 33% of 3\n" in text
    assert "rounds by draft size: 4: 4\n" in text
    assert "proposed by: drafter 10 (7 accepted), lookup 6 (1 accepted)" in text
    assert "time: 2.00 s, target 50%, drafter 25%, sampler 5%, other 20%" in text
    assert text.endswith("context: 42 of 100 tokens, 2 turns")


def test_stats_before_the_first_answer_say_so(piped):
    assert piped("/stats").err == "no answer yet\n"


def test_stats_go_to_stderr(piped):
    result = piped("hi", "/stats")
    assert result.out == "Hello world\n"
    assert "context: 10 of 8192 tokens, 1 turn" in result.err


# ---- models -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_files(monkeypatch):
    """The pairs of these tests are no files; what is asked for is in the list."""
    asked = []
    monkeypatch.setattr("eagle3_cli.commands.chat_model.check_files", lambda pair, runtime: asked.append(pair))
    return asked


def test_model_changes_the_pair_and_keeps_the_conversation(piped, eagle3, no_files):
    eagle3.script = [["a"], ["b"]]
    result = piped("one", "/model new.gguf new-draft.gguf", "two", "/model")
    assert (result.code, result.out) == (0, "a\nb\n")
    assert result.err == "target new.gguf, drafter new-draft.gguf\n"
    old, new = eagle3.engines
    assert (old.closed, new.closed) == (True, True)
    assert new.prompts == ["<user>one<assistant>a<user>two"]
    assert (str(new.pair.target), str(new.pair.draft)) == ("new.gguf", "new-draft.gguf")


@pytest.mark.parametrize(
    ("words", "target", "draft", "lookup", "why"),
    [
        ("t.gguf d.gguf", "t.gguf", "d.gguf", True, None),
        ("t.gguf --draft d.gguf", "t.gguf", "d.gguf", True, None),
        ("'my t.gguf' lookup", "my t.gguf", None, True, None),
        ("t.gguf --no-draft", "t.gguf", None, False, "--no-draft"),
        ("demo", "demo-target.gguf", "demo-drafter.gguf", True, None),
    ],
)
def test_the_words_of_model_are_those_of_the_command_line(piped, eagle3, no_files, words, target, draft, lookup, why):
    assert piped(f"/model {words}").code == 0
    pair = eagle3.engine.pair
    assert (str(pair.target), pair.draft and str(pair.draft), pair.lookup, pair.no_draft) == (
        target,
        draft,
        lookup,
        why,
    )
    assert no_files == [pair]


def test_a_model_without_a_drafter_says_what_to_give(piped, no_files):
    result = piped("/model t.gguf")
    assert result.code == 2
    assert "--draft lookup, or --no-draft" in result.err


@pytest.mark.parametrize("words", ["a b c", "t.gguf --draft", "t.gguf -x", "'t.gguf"])
def test_other_words_are_refused(words):
    with pytest.raises(InputError, match="/model"):
        chosen(words)


def test_flags_of_the_first_pair_that_are_no_files_stay(piped, eagle3, no_files):
    piped("/model t.gguf lookup", flags=("--lora", "a.gguf", "-c", "512", "--draft-depth", "3"))
    pair = eagle3.engine.pair
    assert (pair.loras, pair.depth, eagle3.engine.runtime.ctx_size) == ((), 3, 512)


def test_a_file_that_is_none_costs_no_reload(typing, eagle3):
    result = typing("/model /no/such.gguf --no-draft", "hi")
    assert (result.code, result.out) == (0, "Hello world\n")
    assert "/no/such.gguf" in result.err
    assert len(eagle3.engines) == 1


@pytest.mark.parametrize("fault", [FileError("broken."), KeyboardInterrupt()])
def test_a_pair_that_cannot_be_loaded_leaves_the_one_before(typing, eagle3, no_files, monkeypatch, fault):
    load, faults = eagle3.load, [None, fault, None]

    def loading(pair, runtime, progress=None):
        eagle3.load_error = faults.pop(0)
        return load(pair, runtime, progress)

    monkeypatch.setattr("eagle3_cli.engine.load_engine", loading)
    eagle3.script = [["a"], ["b"]]
    result = typing("one", "/model t.gguf lookup", "two", "/model")
    assert (result.code, result.out) == (0, "a\nb\n")
    assert ("broken." if isinstance(fault, FileError) else "stopped") in result.err
    assert "target demo-target.gguf, drafter demo-drafter.gguf" in result.err
    assert eagle3.engine.prompts == ["<user>one<assistant>a<user>two"]


# ---- the trace --------------------------------------------------------------------------------------------


def test_the_trace_is_one_page_of_the_whole_conversation(piped, eagle3, tmp_path):
    file = tmp_path / "chat.html"
    eagle3.script = [["first answer"], ["second answer"]]
    assert piped("one", "two", flags=("--trace", str(file))).code == 0
    text = file.read_text()
    assert text.count("<html") == 1
    assert "Turn 1" in text
    assert "Turn 2" in text
    assert stat.S_ISREG(file.stat().st_mode)
    assert eagle3.engine.watch.rounds is not None


def test_a_trace_that_cannot_be_written_any_more_does_not_end_the_chat_of_a_person(
    typing, piped, monkeypatch, tmp_path
):
    from eagle3_cli.trace import Trace

    def full(_):
        raise FileError("--trace: no space.")

    monkeypatch.setattr(Trace, "write", full)
    flags = ("--trace", str(tmp_path / "chat.html"))
    result = typing("one", "two", flags=flags)
    assert (result.code, result.err.count("no space")) == (0, 1)
    assert piped("one", "two", flags=flags).code == 2


def test_a_new_model_spells_the_traced_tokens(piped, eagle3, no_files, tmp_path, monkeypatch):
    from fake_engine import FakeEngine

    spelt = []
    model = lambda self: SimpleNamespace(piece=lambda token: spelt.append((str(self.pair.target), token)) or b"x")  # noqa: E731
    monkeypatch.setattr(FakeEngine, "decoder", property(lambda self: SimpleNamespace(model=model(self))))
    piped("one", "/model t.gguf lookup", "two", flags=("--trace", str(tmp_path / "chat.html")))
    assert ("demo-target.gguf", 101) in spelt
    assert ("t.gguf", 101) in spelt
