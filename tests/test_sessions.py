"""A saved conversation is a file that every reader of conversations takes."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_cli.errors import FileError, InputError
from eagle3_cli.messages import read_messages
from eagle3_cli.sessions import kept, load, save
from eagle3_cli.train.chats import read_chats


def said(*contents, system=None):
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents))]


TALK = said("one\ntwo", "a\u2028b \U0001f600 </script>", "three", "\x1b[2J", system="be brief")


def test_train_reads_what_was_saved(tmp_path):
    assert save(str(tmp_path / "chat.json"), TALK, replace=False) == 2
    left_out: Counter[str] = Counter()
    assert list(read_chats(tmp_path / "chat.json", left_out)) == [TALK]
    assert not left_out


def test_train_reads_several_of_them_joined(tmp_path):
    save(str(tmp_path / "a.json"), TALK, replace=False)
    save(str(tmp_path / "b.json"), said("x", "y"), replace=False)
    both = (tmp_path / "a.json").read_bytes() + (tmp_path / "b.json").read_bytes()
    (tmp_path / "both.jsonl").write_bytes(both)
    assert list(read_chats(tmp_path / "both.jsonl", Counter())) == [TALK, said("x", "y")]


def test_generate_and_chat_read_what_was_saved(tmp_path):
    file = str(tmp_path / "chat.json")
    save(file, TALK, replace=False)
    assert read_messages(file, "--messages") == load(file, "/load") == TALK


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0")).filter(str.strip).map(
    lambda text: text.replace("\r\n", "\n")
)  # fmt: skip


@given(st.lists(st.tuples(texts, texts), min_size=1), st.none() | texts)
def test_any_conversation_comes_back(tmp_path, turns, system):
    talk = said(*(text for turn in turns for text in turn), system=system)
    file = tmp_path / "chat.json"
    save(str(file), talk, replace=True)
    assert load(str(file), "/load") == talk
    assert list(read_chats(file, Counter())) == [talk]


def test_what_has_no_text_is_left_out():
    assert kept(said("one", " ", "two", "b", "three", system="\n")) == said("two", "b")
    assert kept(said("one", system="be brief")) == said(system="be brief")


@pytest.mark.parametrize("talk", [[], said("one"), said("one", ""), said(system="be brief")])
def test_nothing_to_save_leaves_no_file(tmp_path, talk):
    with pytest.raises(InputError, match="nothing to save"):
        save(str(tmp_path / "chat.json"), talk, replace=True)
    assert not list(tmp_path.iterdir())


def test_a_name_in_the_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/chat.json", TALK, replace=False)
    assert load("~/chat.json", "/load") == TALK
    assert (tmp_path / "chat.json").exists()


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "chat.json").symlink_to("precious")
    with pytest.raises(FileError, match="exists"):
        save(str(tmp_path / "chat.json"), TALK, replace=False)
    save(str(tmp_path / "chat.json"), TALK, replace=True)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "chat.json").is_symlink()


@pytest.mark.parametrize(
    ("name", "words"),
    [(".", "is a folder or a device"), ("chat.txt", "another ending than .txt"), ("no/chat.json", "cannot be written"),
     (os.devnull, "is a folder or a device")],
)  # fmt: skip
def test_places_that_take_no_conversation(tmp_path, name, words):
    with pytest.raises(FileError, match=re.escape(words)):
        save(str(tmp_path / name), TALK, replace=True)
    assert not list(tmp_path.iterdir())
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("nonsense", "expected one JSON document"),
        ("{}", "expected a list of messages"),
        ("[]", "expected a list of messages"),
        ('[{"role": "user"}]', "message 1: expected content"),
        ('[{"role": "assistant", "content": "a"}]', "message 1: expected role user, got assistant"),
        ('[{"role": "system", "content": "a"}]', "got a system message alone"),
        ('[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "user", "content": "c"}]',
         "message 3: expected role assistant, got user"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]',
         "message 2: expected role assistant, got system"),
        ('{"messages": []}\n{"messages": []}', "expected one JSON document"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_conversation_is_one_message(tmp_path, content, words):
    file = tmp_path / "chat.json"
    file.write_text(content)
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        load(str(file), "/load")
    assert caught.value.message.startswith(f"/load {file}: ")


def test_stdin_is_no_conversation_to_load():
    with pytest.raises(InputError, match="expected a file, got -"):
        load("-", "/load")
