"""Files of conversations: every shape that is read, and every fault with its line number."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from eagle3_cli.errors import FileError
from eagle3_cli.train.chats import OUT_OF_TURN, read_chats, summarise_chats
from eagle3_cli.train.prompts import held_out_prompts, prompts, without_data

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


def write(folder, *lines, name="chats.jsonl"):
    path = folder / name
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return path


def read(path, left_out=None):
    return list(read_chats(path, Counter() if left_out is None else left_out))


@pytest.mark.parametrize(
    ("line", "conversation"),
    [
        ({"messages": [SYSTEM, USER, ANSWER], "id": 7}, [SYSTEM, USER, ANSWER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, [USER]),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, [USER, ANSWER]),
        ({"prompt": "Hi"}, [USER]),
        ({"prompt": "Hi", "answer": "Hello"}, [USER, ANSWER]),
        ({"prompt": "Hi", "completion": "Hello"}, [USER, ANSWER]),
        ({"prompt": "Hi", "response": "Hello", "answer": None}, [USER, ANSWER]),
        ("Hi", [USER]),
    ],
)
def test_every_shape_of_a_line_is_read(tmp_path, line, conversation):
    assert read(write(tmp_path, line)) == [conversation]


def test_a_text_file_holds_one_user_turn_per_line(tmp_path):
    path = write(tmp_path, b'\xef\xbb\xbf"Hi" \r', b"", b'{"prompt": 1}', name="chats.txt")
    assert read(path) == [[{"role": "user", "content": '"Hi"'}], [{"role": "user", "content": '{"prompt": 1}'}]]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"Hello there", "one line of JSON"),
        (b'[{"prompt": "Hi"},', "one line of JSON"),
        (b"7", "expected {"),
        ({"text": "Hi"}, "expected {"),
        ({"messages": [USER], "prompt": "Hi"}, "expected {"),
        ({"messages": "Hi"}, "list of objects"),
        ({"messages": []}, "user's turn"),
        ({"messages": [SYSTEM]}, "user's turn"),
        ({"messages": [USER, {"role": "tool", "content": "7"}]}, "turn 2: expected role"),
        ({"conversations": [{"from": None, "value": "Hi"}]}, "turn 1: expected from"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "turn 2: expected text"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "an empty one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "turn 1: expected text"),
        ({"prompt": ""}, "prompt: expected text"),
        ({"prompt": "Hi", "answer": "a", "response": "b"}, "answer and response"),
        ({"prompt": "a\0b"}, "NUL"),
        ({"prompt": "\ud800"}, "UTF-8"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "one line of JSON"),
    ],
)
def test_a_fault_names_file_and_line(tmp_path, line, says):
    path = write(tmp_path, {"prompt": "fine"}, b"", line)
    with pytest.raises(FileError) as raised:
        read(path)
    assert f"{path}:3" in raised.value.message
    assert says in raised.value.message


@pytest.mark.parametrize("lines", [(), (b"", b"  ")])
def test_a_file_without_conversations_is_refused(tmp_path, lines):
    with pytest.raises(FileError, match="at least one conversation"):
        read(write(tmp_path, *lines))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileError, match="No such file"):
        read(tmp_path / "none.jsonl")


def test_conversations_out_of_turn_are_left_out_and_counted(tmp_path):
    path = write(tmp_path, {"messages": [ANSWER, USER]}, {"messages": [USER, USER]}, {"messages": [SYSTEM, USER]})
    left_out: Counter[str] = Counter()
    assert read(path, left_out) == [[SYSTEM, USER]]
    assert left_out == {OUT_OF_TURN: 2}


def test_nothing_but_left_out_conversations_is_refused_with_the_reason(tmp_path):
    with pytest.raises(FileError, match=OUT_OF_TURN):
        read(write(tmp_path, {"messages": [ANSWER, USER]}))


def test_lines_are_read_as_they_are_asked_for(tmp_path):
    chats = read_chats(write(tmp_path, {"prompt": "one"}, {"prompt": "two"}, b"broken"), Counter())
    assert len(list(islice(chats, 2))) == 2
    with pytest.raises(FileError):
        next(chats)


def test_the_summary_counts_the_whole_file(tmp_path):
    path = write(tmp_path, {"messages": [SYSTEM, USER, ANSWER, USER]}, {"prompt": "Hi"}, {"messages": [ANSWER, USER]})
    summary = summarise_chats(path)
    assert (summary.conversations, summary.user_turns, summary.with_system) == (2, 3, 1)
    assert summary.left_out == {OUT_OF_TURN: 1}


# --- the built-in prompts ------------------------------------------------------------------------------------


def words(conversations):
    return [{w.strip(".,:;?!'\"()`").lower() for m in c for w in m["content"].split()} for c in conversations]


def test_held_out_prompts_share_no_beginning_and_few_words_with_the_others():
    from eagle3_cli.bench.prompts import PROMPTS, TASKS

    others = [*prompts(), *([{"role": "user", "content": text}] for text in PROMPTS)]
    texts = [*(c[0]["content"] for c in others), *(text for texts in TASKS.values() for text in texts)]
    beginnings = {" ".join(text.split()[:3]).lower() for text in texts}
    assert not beginnings & {" ".join(c[0]["content"].split()[:3]).lower() for c in held_out_prompts()}
    for held_out in words(held_out_prompts()):
        for other in words(others):
            assert len(held_out & other) / min(len(held_out), len(other)) < 0.6


def test_without_data_every_built_in_prompt_comes_once_among_user_turns_to_be_written():
    conversations = list(without_data(400))
    given = [c for c in conversations if c[0]["content"]]
    assert given == prompts()
    assert {len(c) for c in conversations if not c[0]["content"]} == {1, 2}
    assert not any(m["content"] for c in conversations if not c[0]["content"] for m in c)
