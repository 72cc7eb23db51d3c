"""A chat as somebody sees it: in tmux, which answers like a terminal and shows what is on its screen."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import time

import pytest

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


class Tmux:
    """A server of its own with one window of 80 columns."""

    def __init__(self, socket: str, environment: dict[str, str]) -> None:
        self.socket, self.environment = socket, environment

    def __call__(self, *args: str, input: str | None = None) -> str:
        command = ["tmux", "-S", self.socket, "-f", "/dev/null", *args]
        result = subprocess.run(command, input=input, text=True, capture_output=True, env=self.environment, timeout=30)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def start(self, command: list[str]) -> None:
        self("new-session", "-d", "-x", "80", "-y", "24", shlex.join(command) + "; echo left with $?; exec sleep 60")

    def keys(self, *keys: str) -> None:
        self("send-keys", *keys)

    def wait_for(self, text: str, seconds: float = 30.0) -> str:
        """The screen once it has the text."""
        end = time.monotonic() + seconds
        while text not in (screen := self("capture-pane", "-p")):
            assert time.monotonic() < end, f"no {text!r} on {screen}"
            time.sleep(0.05)
        return screen


@pytest.fixture
def tmux(tmp_path, environment):
    if len(str(tmp_path)) > 90:
        pytest.skip("the path of a socket cannot be so long")
    plain = {k: v for k, v in environment.items() if k not in ("PROMPT_TOOLKIT_NO_CPR", "NO_COLOR", "TMUX")}
    server = Tmux(str(tmp_path / "socket"), {**plain, "EAGLE3_CACHE": str(tmp_path / "cache")})
    yield server
    server("kill-server")


def test_a_paste_is_one_message_and_proposed_tokens_have_colours(tmux, command):
    tmux.start(command(json.dumps([["plain ", ["drafted", 1]], ["second answer"]]), "chat", "--show-drafts"))
    tmux.wait_for("\n>\n")
    tmux("load-buffer", "-", input="first line\nsecond line\n")
    tmux("paste-buffer", "-p")
    tmux.wait_for(". second line")
    tmux.keys("Enter")
    tmux.wait_for("tokens/s")
    assert "plain \x1b[32mdrafted" in tmux("capture-pane", "-e", "-p")
    tmux.keys("/sta", "Tab", "Enter")
    tmux.wait_for("1 turn")
    tmux.keys("C-d")
    tmux.wait_for("left with 0")


def test_ctrl_c_ends_an_answer_and_the_session_is_saved_with_a_completed_name(tmux, command, tmp_path):
    file = tmp_path / "conversation.json"
    file.write_text("old")
    tmux.start(command('[["<forever>"], ["second answer"]]', "chat"))
    tmux.wait_for("\n>\n")
    tmux.keys("hi", "Enter")
    tmux.wait_for("word word")
    tmux.keys("C-c")
    tmux.wait_for("(stopped)")
    tmux.keys("/retry", "Enter")
    tmux.wait_for("second answer")
    tmux.keys(f"/save --force {tmp_path}/conv", "Tab", "Enter")
    tmux.wait_for("(saved 1 turn in")
    tmux.keys("C-c")
    tmux.wait_for("(Ctrl-C again or Ctrl-D leaves)")
    tmux.keys("C-c")
    tmux.wait_for("left with 130")
    assert [m["content"] for m in json.loads(file.read_text())["messages"]] == ["hi", "second answer"]
