"""The page in a real browser: what the script shows, by pointer, keys and address."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess

import pytest
from outline import Outline
from traced import HOSTILE, answer, traced

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=2000",
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """browse(fragment, script) -> the elements as they are in the end.  script runs behind the page's own, in a copy
    without the policy that forbids it."""
    folder = tmp_path_factory.mktemp("page")
    trace = traced(folder / "trace.html", title=HOSTILE, prompt=HOSTILE)
    answer(trace, "second turn")
    trace.write()

    @functools.cache
    def open_page(fragment="", script=None):
        path = folder / "trace.html"
        if script is not None:
            html = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text("utf-8"))
            path = folder / "driven.html"
            path.write_text(html.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
        command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri() + fragment]
        done = subprocess.run(command, capture_output=True, timeout=60, check=True)
        return Outline(done.stdout.decode())

    return open_page


def shown(outline):
    """Names of the rounds that the panels show, one per answer."""
    return re.findall(r"The prompt|Round \d+ of \d+", outline.within("h3"))


def test_at_first_the_round_with_most_accepted_is_shown_with_its_tree(browse):
    outline = browse()
    assert shown(outline) == ["Round 1 of 3", "Round 1 of 3"]
    assert [a["class"] for tag, a in outline.tags if tag == "g"][:6] == [
        "node root target",
        "node accepted drafter",
        "node accepted both",
        "node refused lookup",
        "node refused drafter",
        "node drawn target",
    ]


def test_the_address_chooses_a_round(browse):
    outline = browse("#answer=2&round=2")
    assert shown(outline) == ["Round 1 of 3", "Round 2 of 3"]
    assert "Nothing was proposed." in outline.within("li")


def test_every_token_of_the_answer_is_a_button_in_order_with_its_source(browse):
    tokens = [a for a in browse().having("role") if a["role"] == "button"]
    assert [token["class"].split()[1] for token in tokens[:8]] == [
        "target", "drafter", "both", "target", "target", "lookup", "lookup", "target",
    ]  # fmt: skip
    assert sum(token["tabindex"] == "0" for token in tokens) == 2, "one stop of the Tab key for each answer"


def test_every_round_is_told_in_words(browse):
    labels = [a["aria-label"] for a in browse().having("data-round")]
    assert labels[1] == "Round 1 of 3: 3 tokens, 2 of 4 proposals accepted, 25.0 ms"


def test_a_hostile_answer_is_shown_and_runs_nothing(browse):
    outline = browse()
    assert outline.within("title").startswith("eagle3 trace")
    assert "img" not in {tag for tag, _ in outline.tags}
    assert "<img src=x" in outline.within("span", "token target")


def test_the_tree_is_also_a_nested_list(browse):
    said = browse().within("span")
    assert ", by the drafter, 60% after its parent, 60% for the whole path, accepted" in said
    assert ", drawn by the target, not proposed there" in said


def test_what_a_round_cost_stands_beside_plain_decoding(browse):
    outline = browse()
    assert "verifying 5 rows 20.0 ms" in outline.within("span")
    assert "25.0 ms30.0 ms" in outline.within("b")


WALK = """
  const seen = [];
  document.querySelector(".round.shown .token").focus();
  for (const key of %s) {
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    seen.push(document.querySelector("h3").textContent);
  }
  document.title = JSON.stringify([seen, document.activeElement.textContent]);
"""
STEPS = {
    "ArrowRight": "Round 2 of 3",
    "ArrowLeft": "Round 1 of 3",
    "End": "Round 3 of 3",
    "Home": "The prompt",
}


def test_keys_walk_from_round_to_round_and_take_the_focus_along(browse):
    outline = browse(script=WALK % json.dumps(list(STEPS)))
    seen, focused = json.JSONDecoder().raw_decode(outline.within("title"))[0]  # titles of boxes follow
    assert seen == list(STEPS.values())
    assert focused == "The"


POINT = """
  const [first, second] = [...document.querySelectorAll(".answer")].map((s) => s.querySelectorAll(".round"));
  const over = (round) => round.firstChild.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  first[3].firstChild.click();
  over(first[2]);
  setTimeout(() => over(second[2]), 500);
"""


def test_the_pointer_shows_a_round_unless_a_click_holds_another(browse):
    outline = browse(script=POINT)
    assert shown(outline) == ["Round 3 of 3", "Round 2 of 3"]
    assert outline.within("span", "held") == "held"
