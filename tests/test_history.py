"""What was typed, from one chat to the next: private, bounded, and nothing that a chat depends on."""

from __future__ import annotations

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_cli.history import LARGEST, LONGEST, HistoryFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "history.jsonl"


@given(st.lists(st.text()))
def test_entries_come_back_in_their_order(path, entries):
    path.unlink(missing_ok=True)
    for entry in entries:
        HistoryFile(path).add(entry)
    assert HistoryFile(path).read() == entries


def test_it_belongs_to_the_user_alone(path):
    before = os.umask(0)
    try:
        HistoryFile(path).add("a")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("use", [lambda file: file.add("b"), lambda file: file.read()])
def test_one_that_others_may_read_becomes_private(path, use):
    HistoryFile(path).add("a")
    path.chmod(0o644)
    use(HistoryFile(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_not_followed(path):
    path.parent.mkdir()
    precious = path.with_name("precious")
    precious.write_text('"secret"\n')
    path.symlink_to(precious)
    file = HistoryFile(path)
    file.add("more")
    assert file.read() == []
    assert precious.read_text() == '"secret"\n'


def test_a_pipe_is_not_waited_for(path):
    path.parent.mkdir()
    os.mkfifo(path)
    HistoryFile(path).add("a")
    assert HistoryFile(path).read() == []


@pytest.mark.parametrize("place", [os.devnull, f"{os.devnull}/history", "/proc/no/history"])
def test_a_place_that_takes_no_file_is_no_fault(place):
    from pathlib import Path

    HistoryFile(Path(place)).add("a")
    assert HistoryFile(Path(place)).read() == []


def test_damaged_lines_are_passed_over(path):
    path.parent.mkdir()
    path.write_bytes(b'"a"\n"\\ud800"\n{"b": 1}\n\xff\xfe\n3\n' + b"[" * 50_000 + b'\n\n"c"\n"torn')
    assert HistoryFile(path).read() == ["a", "c"]


def test_a_torn_line_does_not_take_the_next_but_one_with_it(path):
    path.parent.mkdir()
    path.write_bytes(b'"torn')
    HistoryFile(path).add("lost")
    HistoryFile(path).add("kept")
    assert HistoryFile(path).read() == ["kept"]


def test_what_was_pasted_at_length_is_not_kept(path):
    HistoryFile(path).add("x" * (LONGEST + 1))
    HistoryFile(path).add("x" * LONGEST)
    assert [len(entry) for entry in HistoryFile(path).read()] == [LONGEST]


def test_a_large_file_is_cut_to_its_newest_lines(path):
    path.parent.mkdir()
    lines = [json.dumps(f"{number} {'x' * 1000}") for number in range(2 * LARGEST // 1000)]
    path.write_text("\n".join(lines) + "\n")
    found = HistoryFile(path).read()
    assert found == [json.loads(line) for line in lines][-len(found) :]
    assert 1000 < len(found) < len(lines)
    assert path.stat().st_size <= LARGEST
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert HistoryFile(path).read() == found
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_another_users_file_is_left_alone(path, monkeypatch):
    HistoryFile(path).add("a")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    HistoryFile(path).add("b")
    assert HistoryFile(path).read() == []
    assert path.read_text() == '"a"\n'
