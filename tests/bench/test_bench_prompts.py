"""The prompts of eagle3 bench: the built-in tasks, and files."""

from __future__ import annotations

import json
import re
from itertools import combinations

import pytest

from eagle3_cli import prompt as texts_of_files
from eagle3_cli.bench.prompts import NAMES, PROMPTS, TASKS, Prompt, load_prompts
from eagle3_cli.errors import FileError, InputError, OptionError
from eagle3_cli.train import prompts as training

SHARED = 6  # consecutive words that no two prompts may have in common


def runs(text):
    """All sequences of so many consecutive words."""
    words = re.findall(r"[\w'.-]+", text.lower())
    return {tuple(words[i : i + SHARED]) for i in range(len(words) - SHARED + 1)}


def write(folder, *lines, name="own.jsonl"):
    path = folder / name
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


# ---- built-in ----


def test_mixed_comes_first_and_is_what_published_numbers_were_measured_with():
    assert tuple(TASKS) == ("mixed", *NAMES)
    assert TASKS["mixed"] == PROMPTS
    assert len(PROMPTS) == 8


@pytest.mark.parametrize("task", NAMES)
def test_a_task_has_ten_different_prompts_of_plain_ascii(task):
    assert len(set(TASKS[task])) == 10
    assert all(text.isascii() and text == text.strip() for text in TASKS[task])


@pytest.mark.parametrize(("task", "fewest", "most"), [("summarising", 60, 150), ("rewriting", 40, 120)])
def test_the_text_to_work_on_is_part_of_the_prompt(task, fewest, most):
    for prompt in TASKS[task]:
        assert fewest <= len(prompt.partition("\n\n")[2].split()) <= most, prompt


def test_no_prompt_shares_its_wording_with_one_of_training():
    turns = [m["content"] for c in (*training.prompts(), *training.held_out_prompts()) for m in c]
    known = set().union(*map(runs, turns))
    for text in (text for texts in TASKS.values() for text in texts):
        assert not runs(text) & known, text


def test_no_two_prompts_share_their_wording():
    for one, other in combinations([text for texts in TASKS.values() for text in texts], 2):
        assert not runs(one) & runs(other), (one, other)


# ---- choosing ----


def test_the_default_is_mixed():
    assert load_prompts(None) == tuple(Prompt("mixed", text) for text in PROMPTS)


def test_tasks_come_in_the_order_asked_for_and_each_once():
    found = load_prompts(None, ("rewriting", "code", "rewriting"))
    assert [prompt.task for prompt in found] == ["rewriting"] * 10 + ["code"] * 10


def test_all_is_the_five_tasks_without_mixed():
    assert list(dict.fromkeys(prompt.task for prompt in load_prompts(None, ("all",)))) == list(NAMES)
    assert len(load_prompts(None, ("all", "chat"))) == 50


def test_an_unknown_task_is_refused():
    with pytest.raises(OptionError, match=r"--task: expected one of mixed, chat, .*, all, got poetry\."):
        load_prompts(None, ("poetry",))


# ---- files ----


def test_a_file_may_name_tasks_and_its_own_name_is_the_default(tmp_path):
    path = write(tmp_path, {"prompt": "One"}, "", {"prompt": "Two", "task": "sums"}, name="mine.jsonl")
    assert load_prompts(path) == (Prompt("mine", "One"), Prompt("sums", "Two"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "own.jsonl:2: expected a JSON object, got 'no json'."),
        ([1], r'own.jsonl:2: expected \{"prompt": "..."\}, got \'\[1\]\'.'),
        ({"prompt": ""}, "own.jsonl:2: expected"),
        ({"text": "x"}, "own.jsonl:2: expected"),
        ({"prompt": "x", "task": 3}, "own.jsonl:2: task: expected a name, got 3."),
        ({"prompt": "x", "task": ""}, "own.jsonl:2: task: expected a name, got ''."),
        ({"messages": [{"role": "user", "content": "x"}]}, 'got a conversation \\("messages"\\).'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    with pytest.raises(FileError, match=said):
        load_prompts(write(tmp_path, {"prompt": "One"}, line))


def test_files_without_a_prompt_are_refused(tmp_path):
    with pytest.raises(FileError, match="expected at least one prompt, got none"):
        load_prompts(write(tmp_path, ""))
    with pytest.raises(FileError, match=r"--prompts .*absent.jsonl: No such file"):
        load_prompts(tmp_path / "absent.jsonl")


def test_a_file_larger_than_any_prompts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(texts_of_files, "LARGEST", 1000)
    with pytest.raises(InputError, match=r"--prompts .*own.jsonl: expected at most 0 MiB of text, got more"):
        load_prompts(write(tmp_path, {"prompt": "One " * 300}))
