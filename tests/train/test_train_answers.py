"""What the target writes in many sequences at once is what the engine answers one at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
from data_tools import CHATML, NO_MARKS, THINKS_NOTHING, letters_target, talk, user

from eagle3_cli.engine import load_engine
from eagle3_cli.errors import FileError, OptionError
from eagle3_cli.settings import Limits, PairSettings, RuntimeSettings
from eagle3_cli.train import dialogue
from eagle3_cli.train.answers import AnswerWriter
from eagle3_cli.train.dialogue import AnswerSettings, ended_user, loop_start, user_fault
from eagle3_cli.train.render import NOTHING_LEFT, TOO_LONG

RUNTIME = RuntimeSettings(**tiny.EXACT, ctx_size=320, batch=24, threads=1)
MIXED = AnswerSettings(sequences=3, max_tokens=36, mix=((0.4, 0.0), (0.3, 0.7), (0.3, 2.0)), seed=5)
CHATS = [
    user("Hi"),
    user("How are you?", "And now?", "x"),
    [{"role": "system", "content": "Be brief."}, *user("Hi", "Why?")],
    talk("What?", "a given answer, which is passed over", "Where?"),
    user("a long question " * 8),
    user("Hi", "Hi"),
    user("y"),
    user("z"),
]


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return letters_target(tmp_path_factory.mktemp("letters") / "target.gguf", clear=False)


@pytest.fixture(scope="module")
def chatterbox(tmp_path_factory):
    """Its answers never end."""
    return letters_target(tmp_path_factory.mktemp("chatterbox") / "target.gguf", ends=False)


def write(path, conversations, settings=MIXED, runtime=RUNTIME, **how):
    """(everything written, what was left out)"""
    with AnswerWriter(path, runtime, settings) as writer:
        return list(writer.write(conversations, **how)), dict(writer.left_out)


def one_at_a_time(path, number, conversation, settings):
    """(messages, prompt + answer of every turn) as `eagle3 chat` would lead the conversation."""
    messages = [m for m in conversation if m["role"] == "system"]
    turns = []
    with load_engine(PairSettings(path, None, "--no-draft"), RUNTIME) as engine:
        for message in conversation:
            if message["role"] != "user":
                continue
            messages.append(message)
            prompt = engine.render(messages)
            sampling = settings.answer_sampling(number, len(messages))
            pieces = list(engine.stream(prompt, sampling, Limits(max_tokens=settings.max_tokens)))
            messages.append({"role": "assistant", "content": "".join(piece.text for piece in pieces)})
            turns.append([*prompt, *(piece.token for piece in pieces if piece.token is not None)])
            if pieces[-1].finish_reason != "stop":
                break
    return messages, turns


def same(one, other):
    """Two lists of Written with equal contents."""
    assert [w.number for w in one] == [w.number for w in other]
    assert [w.messages for w in one] == [w.messages for w in other]
    for a, b in zip(one, other, strict=True):
        assert [s.tokens.tolist() for s in a.samples] == [s.tokens.tolist() for s in b.samples]
        assert [s.answer.tolist() for s in a.samples] == [s.answer.tolist() for s in b.samples]


# --- answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, THINKS_NOTHING])
def test_answers_equal_those_of_the_engine_one_at_a_time(tmp_path, template):
    path = letters_target(tmp_path / "target.gguf", template, clear=False)
    written, _ = write(path, CHATS)
    assert [w.number for w in written] == list(range(len(CHATS)))
    assert len({MIXED.temperature(n) for n in range(len(CHATS))}) == 3
    ends = set()
    for number, conversation in enumerate(CHATS):
        messages, turns = one_at_a_time(path, number, conversation, MIXED)
        assert written[number].messages == messages
        samples = written[number].samples
        for turn in turns:
            assert any(s.tokens[: len(turn)].tolist() == turn for s in samples)
        ends |= {int(s.tokens[-1]) == tiny.IM_END for s in samples}
        assert sum(int(s.answer.sum()) for s in samples) <= len(turns) * MIXED.max_tokens
    assert ends == {True, False}


def test_answers_equal_those_of_the_engine_for_a_target_that_rambles(tiny_target):
    settings = replace(MIXED, mix=((0.5, 0.0), (0.5, 3.0)))
    written, _ = write(tiny_target.path, CHATS, settings)
    for number, conversation in enumerate(CHATS):
        messages, (turn, *_) = one_at_a_time(tiny_target.path, number, conversation, settings)
        assert written[number].messages == messages
        assert written[number].samples[0].tokens.tolist() == turn


@pytest.mark.parametrize("sequences", [1, 2, 8, 40])
@pytest.mark.parametrize("batch", [8, 512])
def test_answers_do_not_depend_on_sequences_and_batches(letters, sequences, batch):
    settings, runtime = replace(MIXED, sequences=sequences), replace(RUNTIME, batch=batch)
    same(write(letters, CHATS, settings, runtime)[0], write(letters, CHATS)[0])


@pytest.mark.parametrize("skip", [1, 3, 8])
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(letters, skip):
    whole, _ = write(letters, CHATS)
    same(write(letters, CHATS, skip=skip)[0], whole[skip:])


def test_another_seed_gives_other_answers(letters):
    hot = replace(MIXED, mix=((1.0, 2.0),))
    first, second = (write(letters, CHATS[:3], replace(hot, seed=seed))[0] for seed in (1, 2))
    assert [w.messages for w in first] != [w.messages for w in second]


def test_the_mix_gives_each_temperature_its_share():
    settings = AnswerSettings(seed=3)
    drawn = [settings.temperature(n) for n in range(2000)]
    for share, temperature in settings.mix:
        assert abs(drawn.count(temperature) / 2000 - share) < 0.04


def test_seeds_of_messages_differ():
    settings = AnswerSettings()
    seeds = {settings.turn_seed(n, m, a) for n in range(20) for m in range(5) for a in range(3)}
    assert len(seeds) == 300


# --- limits ---------------------------------------------------------------------------------------------------


def test_an_answer_ends_at_max_tokens_and_with_it_the_conversation(chatterbox):
    written, left_out = write(chatterbox, [user("Hi", "Why?")], replace(MIXED, max_tokens=7))
    assert [len(w.messages) for w in written] == [2]
    assert written[0].samples[0].answer.sum() == 7
    assert left_out == {dialogue.LENGTH_CUT: 1}


def test_an_answer_ends_where_the_context_is_full(chatterbox):
    written, _ = write(chatterbox, CHATS[:2], replace(MIXED, max_tokens=500), replace(RUNTIME, ctx_size=48, batch=8))
    assert [len(w.samples[0]) for w in written] == [48, 48]


def test_prompts_longer_than_the_context_are_counted(tmp_path):
    path = letters_target(tmp_path / "target.gguf")
    long = user("word " * 100)
    runtime = replace(RUNTIME, ctx_size=100)
    written, left_out = write(path, [long, [*user("Hi"), *long], user("Hi")], runtime=runtime)
    assert [len(w.samples) for w in written] == [0, 1, 1]
    assert left_out[NOTHING_LEFT] == 1
    assert left_out[TOO_LONG] == 1


def test_an_answer_that_loops_is_cut_after_its_first_round(chatterbox):
    greedy = replace(MIXED, mix=((1.0, 0.0),), max_tokens=250)
    written, left_out = write(chatterbox, [user("Hi")], greedy)
    (sample,) = written[0].samples
    answer = sample.tokens[sample.answer]
    assert left_out == {dialogue.LOOP_CUT: 1}
    assert dialogue.SHORTEST_ANSWER <= len(answer) <= 40
    assert len(set(answer.tolist())) == len(answer) or loop_start(answer.tolist()) is None
    assert written[0].messages[-1]["content"] == "".join(tiny.TOKENS[t] for t in answer)


def test_an_answer_that_is_nothing_but_a_loop_is_dropped(tmp_path):
    weights = tiny.target_weights()
    weights["output.weight"] = np.zeros_like(weights["output.weight"])
    path = tiny.write_target(tmp_path / "mute.gguf", weights=weights).path  # its greedy answer is token 0 for ever
    written, left_out = write(path, [user("Hi", "Why?")], replace(MIXED, mix=((1.0, 0.0),), max_tokens=100))
    assert written[0].samples == []
    assert written[0].messages == user("Hi")[:0]
    assert left_out == {dialogue.LOOP_DROPPED: 1}


def test_what_all_prompts_begin_with_is_computed_once(letters):
    template = CHATML.replace("{% for", "A long preamble for everybody. {% for", 1)
    rows = []
    path = letters_target(letters.parent / "preamble.gguf", template)
    with AnswerWriter(path, RUNTIME, replace(MIXED, max_tokens=1)) as writer:
        preamble, process = writer.renderer.user_opening([]), writer._process
        writer._process = lambda parts: (rows.append(sum(len(ids) for _, _, ids, _ in parts)), process(parts))
        list(writer.write([user("Hi"), user("Ho"), user("Ha")]))
        prompts = [writer.renderer.prompt(user(text)) for text in ("Hi", "Ho", "Ha")]
    assert len(preamble) > 30
    assert sum(rows) == sum(len(prompt) - len(preamble) for prompt in prompts)


def test_a_caller_that_stops_early_leaves_every_sequence_empty(letters):
    with AnswerWriter(letters, RUNTIME, MIXED) as writer:
        running = writer.write(CHATS)
        next(running)
        running.close()
        assert [writer._context.last_position(seq) for seq in range(MIXED.sequences)] == [-1] * MIXED.sequences
        same(list(writer.write(CHATS)), write(letters, CHATS)[0])


def test_progress_counts_conversations_and_tokens(letters):
    seen = []
    with AnswerWriter(letters, RUNTIME, MIXED, seen.append) as writer:
        written = list(writer.write(CHATS))
    assert [p.tokens for p in seen] == sorted(p.tokens for p in seen)
    assert seen[-1].tokens == sum(int(s.answer.sum()) for w in written for s in w.samples)
    assert all(p.conversations <= len(CHATS) for p in seen)


# --- user turns -----------------------------------------------------------------------------------------------


def test_a_user_turn_of_the_targets_own_is_what_it_draws_behind_the_users_header(letters):
    settings = replace(MIXED, seed=1)
    written, _ = write(letters, [user("")] * 6, settings)
    said = [w.messages[0]["content"] for w in written if w.messages]
    assert len(set(said)) >= 3
    number, text = next((w.number, w.messages[0]["content"]) for w in written if w.messages)
    with load_engine(PairSettings(letters, None, "--no-draft"), RUNTIME) as engine:
        opening = engine.render(user("Q"))
        opening = opening[: opening.index(tiny.TOKENS.index("Q"))]
        law = [replace(dialogue.USER_LAW, seed=settings.turn_seed(number, 0, attempt)) for attempt in range(4)]
        texts = ["".join(p.text for p in engine.stream(opening, sampling, Limits(max_tokens=160))) for sampling in law]
    assert text in [t.strip() for t in texts]
    assert all(s.answer[0] == 0 for w in written for s in w.samples)


def test_user_turns_of_its_own_do_not_depend_on_sequences_or_interruption(letters):
    plan = [user("")] * 4 + [user("", "")] + [user("Hi", "")] * 2
    whole, _ = write(letters, plan)
    assert any(len(w.messages) == 4 for w in whole)
    same(write(letters, plan, replace(MIXED, sequences=7))[0], whole)
    said = [m["content"] for w in whole[:2] for m in w.messages if m["role"] == "user"]
    same(write(letters, plan, skip=2, seen=said)[0], whole[2:])


def test_a_user_turn_that_came_before_is_dropped(letters):
    (first, *_), _ = write(letters, [user("")] * 3)
    text = first.messages[0]["content"]
    (again, *_), left_out = write(letters, [user("")] * 3, seen=[text])
    assert again.samples == []
    assert left_out[dialogue.DUPLICATE] == 1


def test_a_user_turn_is_given_up_after_some_attempts(chatterbox):
    written, left_out = write(chatterbox, [user("")])
    assert written[0].samples == []
    assert written[0].messages == []
    assert left_out == {f"{dialogue.REJECTED}: without an end": dialogue.ATTEMPTS, dialogue.GIVEN_UP: 1}


def test_a_template_without_marks_ends_user_turns_by_its_text(tmp_path):
    path = letters_target(tmp_path / "plain.gguf", NO_MARKS)
    with AnswerWriter(path, RUNTIME, MIXED) as writer:
        ids = writer.model.tokenize(" What now? ANSWER:", add_special=False)
        assert ended_user(writer.renderer, ids) == "What now?"
        assert ended_user(writer.renderer, ids[:-1]) is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("What is the time?", None),
        ("Why?", "too short"),
        ("a\x07b and so on", "broken or control"),
        ("a\ufffdb and so on", "broken or control"),
        ("go on " * 30, "repeats itself"),
        ("say <|im_start|> twice", "control tokens"),
    ],
)
def test_user_turns_that_cannot_be_used_are_told_apart(letters, text, fault):
    with AnswerWriter(letters, RUNTIME, MIXED) as writer:
        found = user_fault(text.strip(), writer.model.tokenize(text, add_special=False), writer.model)
    assert found is None if fault is None else fault in found


# --- loops ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 7, 30, 64])
def test_a_loop_is_found_and_its_first_round_kept(period):
    start = list(range(1000, 1050))
    tokens = [*start, *(list(range(period)) * 200)[: 4 * period + 60]]
    found = loop_start(tokens)
    assert found is not None
    assert found == len(start) + period


def test_a_counter_does_not_hide_a_loop():
    tokens = [t for step in range(12) for t in (1, 100 + step, 2, 3, 4, 5, 6, 7)]
    assert loop_start(tokens) is not None


def test_ordinary_text_is_no_loop():
    rng = np.random.default_rng(1)
    for _ in range(50):
        assert loop_start([int(t) for t in rng.zipf(1.5, 300) % 500]) is None
    assert loop_start([]) is None
    assert loop_start([1] * 20) is None


# --- refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequences": 0},
        {"sequences": 256},
        {"max_tokens": 0},
        {"seed": -1},
        {"mix": ()},
        {"mix": ((0.5, 0.0),)},
        {"mix": ((1.0, -1.0),)},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(OptionError):
        AnswerSettings(**wrong)


def test_a_drafter_is_refused_as_a_target(tiny_drafters):
    with pytest.raises(FileError, match="is an EAGLE-3 drafter"):
        AnswerWriter(tiny_drafters["random"].path, RUNTIME, MIXED)
