"""Where the page is written, and what it never replaces."""

from __future__ import annotations

import os

import click
import pytest
from click.testing import CliRunner
from traced import Words, traced

from eagle3_cli.commands.options import Command
from eagle3_cli.commands.trace_option import trace_option
from eagle3_cli.errors import FileError
from eagle3_cli.trace import Trace, check_writable


def test_the_page_is_written_whole(tmp_path):
    traced(tmp_path / "trace.html").write()
    text = (tmp_path / "trace.html").read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert text.endswith("</html>\n")
    assert os.listdir(tmp_path) == ["trace.html"]


def test_an_earlier_page_is_replaced(tmp_path):
    path = tmp_path / "trace.html"
    traced(path, title="first").write()
    check_writable(path)
    traced(path, title="second").write()
    assert "first</h2>" not in path.read_text("utf-8")


def test_another_file_is_refused_and_stays(tmp_path):
    path = tmp_path / "notes.html"
    path.write_text("<p>mine</p>")
    with pytest.raises(FileError, match=r"^--trace: .*notes\.html: expected a new file or an earlier trace"):
        check_writable(path)
    assert path.read_text() == "<p>mine</p>"


def test_a_directory_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(FileError, match="is a directory"):
        check_writable(tmp_path)
    with pytest.raises(FileError, match="No such file or directory"):
        check_writable(tmp_path / "none" / "trace.html")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="found another file"):
        check_writable(tmp_path / "pipe")


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(FileError, match="found another file"):
        check_writable(tmp_path / "link")


def test_a_page_that_cannot_be_written_is_one_message_and_leaves_nothing(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    trace = traced(folder / "trace.html")
    folder.rmdir()
    with pytest.raises(FileError, match="cannot be written: No such file"):
        trace.write()
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_where_nothing_was_answered(tmp_path):
    Trace(tmp_path / "trace.html", Words(bytes)).write()
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_no_unicode_can_be_a_title(tmp_path):
    traced(tmp_path / "trace.html", title=os.fsdecode(b"model-\xff.gguf")).write()
    assert r"model-\udcff.gguf" in (tmp_path / "trace.html").read_text("utf-8")


def test_tokens_are_spelled_while_the_model_is_there(tmp_path):
    trace = traced(tmp_path / "trace.html")
    trace.vocabulary = None
    trace.write()
    assert " quick" in (tmp_path / "trace.html").read_text("utf-8")


@click.command(cls=Command)
@trace_option
def command(trace):
    """Says what it got."""
    click.echo(trace)


def test_the_option_gives_a_path_or_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = CliRunner().invoke
    assert run(command, []).output == "\n"
    assert run(command, ["--trace", "~/trace.html"]).output == f"{tmp_path}/trace.html\n"


def test_the_option_refuses_before_the_command_runs(tmp_path):
    result = CliRunner().invoke(command, ["--trace", str(tmp_path)])
    assert isinstance(result.exception, FileError)
    assert result.output == ""


def test_the_option_has_no_variable_for_it_names_this_calls_own_file(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE3_TRACE", str(tmp_path / "trace.html"))
    assert CliRunner().invoke(command, []).output == "\n"
