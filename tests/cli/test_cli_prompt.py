"""Where the prompt comes from, and which text is refused."""

from __future__ import annotations

import pytest


def prompt_of(eagle3, *args, stdin=None):
    result = eagle3("generate", "--raw", *args, stdin=stdin)
    assert result.code == 0, result.err
    return eagle3.engine.prompts[-1]


def test_arguments_are_joined(eagle3):
    assert prompt_of(eagle3, "why", "is", "it") == "why is it"


def test_option_is_the_prompt(eagle3):
    assert prompt_of(eagle3, "-p", "why") == "why"


def test_piped_text_goes_before_the_argument(eagle3):
    assert prompt_of(eagle3, "Summarise:", stdin=b"some notes\n") == "some notes\n\nSummarise:"


def test_piped_text_alone_is_the_prompt(eagle3):
    assert prompt_of(eagle3, stdin=b"hi\n") == "hi"


def test_only_one_line_break_is_dropped(eagle3):
    assert prompt_of(eagle3, stdin=b"hi\n\n") == "hi\n"


def test_empty_pipe_does_not_matter(eagle3):
    assert prompt_of(eagle3, "hi", stdin=b"") == "hi"


def test_option_leaves_stdin_alone(eagle3):
    assert prompt_of(eagle3, "-p", "x", stdin=b"not this") == "x"


def test_file_leaves_stdin_alone(eagle3, tmp_path):
    (tmp_path / "a.txt").write_text("from a file\n")
    assert prompt_of(eagle3, "-f", str(tmp_path / "a.txt"), "x", stdin=b"not this") == "from a file\n\nx"


def test_files_come_in_order_and_dash_is_stdin(eagle3, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    got = prompt_of(eagle3, "-f", str(tmp_path / "a.txt"), "-f", "-", "-p", "end", stdin=b"piped")
    assert got == "a\n\npiped\n\nend"


def test_dash_as_the_prompt_is_stdin(eagle3):
    assert prompt_of(eagle3, "-", stdin=b"piped") == "piped"


def test_windows_text_becomes_the_same_prompt(eagle3):
    assert prompt_of(eagle3, stdin=b"\xef\xbb\xbfone\r\ntwo\r\n") == "one\ntwo"


def test_template_is_used_unless_raw(eagle3):
    eagle3("generate", "hi", "--system", "be brief")
    assert eagle3.engine.prompts == ["<system>be brief<user>hi"]


@pytest.mark.parametrize(
    ("args", "stdin", "words"),
    [
        ([], None, "no prompt"),
        ([], b"", "no prompt"),
        ([""], None, "empty"),
        (["-p", ""], None, "empty"),
        (["-p", " \n"], None, "empty"),
        ([], b"\n", "no prompt"),
        (["-"], b"", "empty"),
        (["-p", "x", "y"], None, "already given"),
        ([], b"a\0b", "stdin: expected text, got a NUL character at offset 1"),
        ([], b"caf\xe9", "stdin: expected UTF-8 text, got byte 0xe9 at offset 3"),
        (["caf\udce9"], None, "expected UTF-8"),
        (["-f", "/no/such/file"], None, "-f /no/such/file: No such file"),
        (["-f", "/"], None, "-f /: Is a directory"),
        (["x", "--system", "\udce9"], None, "--system: expected UTF-8"),
    ],
)
def test_unusable_prompt_is_refused_before_loading(eagle3, args, stdin, words):
    result = eagle3("generate", *args, stdin=stdin)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert not eagle3.engines


def test_closed_stdin_is_no_prompt(eagle3, monkeypatch):
    monkeypatch.setattr("eagle3_cli.prompt.sys.stdin", None)
    from eagle3_cli.errors import OptionError
    from eagle3_cli.prompt import PromptSource, read_prompt

    with pytest.raises(OptionError, match="no prompt"):
        read_prompt(PromptSource())


def test_empty_file_is_empty(eagle3, tmp_path):
    (tmp_path / "empty").write_text("")
    assert "empty" in eagle3("generate", "-f", str(tmp_path / "empty")).err
