"""benchmarks/goals.py: the document from results made by hand, what is measured again, and the flags.  No model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from eagle3_cli.bench.run import Sample
from eagle3_cli.errors import FileError, OptionError
from eagle3_cli.settings import TreeShape

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
goals, bars, page, measuring = (
    importlib.import_module(name) for name in ("goals", "goals_bars", "goals_document", "goals_measure")
)

MEANS = {"plain": 1.0, "auto": 1.5, "chain 1": 1.2, "tree 8": 1.3, "llama-server plain": 0.8,
         "llama-server draft-eagle3 n_max 2": 1.25, "llama-server ngram-cache": 1.6}  # fmt: skip
SETTINGS = {
    "machine": "A machine",
    "versions": {"eagle3": "1", "llama-cpp-python": "2", "python": "3", "numpy": "4"},
    "against": {"version": "b5"},
    "tasks": ["code", "rewriting"],
    "prompts_per_task": 7,
    "run": {"max_tokens": 90, "repeats": 3},
    "threads": 2,
    "ctx_size": 1024,
}
LABELS = {"q4_1": ("Q4_1", ""), "widened-bf16": ("BF16, widened", "0.9B weights, same answers")}


def row(contender, ratio, temperature, task=None):
    rate = {"tokens_per_second": 50 * ratio, "low": 49 * ratio, "high": 51 * ratio, "acceptance_length": 1 + ratio}
    return {"contender": contender, "temperature": temperature, "task": task, "speed_up": ratio, **rate}


def result(target="widened-bf16", means=MEANS, **more):
    """Both tasks have the ratios of the means, at temperature 0 and 1."""
    label, about = LABELS[target]
    each = [(name, ratio, t) for t in (0.0, 1.0) for name, ratio in means.items()]
    return {
        "format": measuring.FORMAT, "target": target, "label": label, "about": about, "settings": SETTINGS,
        "engine": "e", "geometric_mean": {"0.0": means, "1.0": means}, "rows": [row(*one) for one in each],
        "tasks": [row(*one, task) for task in SETTINGS["tasks"] for one in each],
        "overhead": [{"contender": "auto", "temperature": 0.0, "share": 0.025, "ms_per_round": 0.4}],
        "drafter_step": {"ms": 1.0, "low": 0.9, "high": 1.1, "plain_ms": 16.0},
        "llama_bench": {"tokens": 64, "ours": 99.0, "theirs": 100.0, "ratio": 0.99}, "seconds": 600.0, "duel": None,
        **more,
    }  # fmt: skip


def table(*results):
    """Goal -> (where, bar, measured, reached)"""
    rows = [goal.row().strip("| ").split(" | ") for goal in bars.goals(results)]
    return {name: tuple(rest) for name, *rest in rows if len(rest) > 2}


# ---- goals ----


@pytest.mark.parametrize(
    ("goal", "row"),
    [
        ("auto against the best fixed chain or tree",
         ("BF16, widened, temperature 0: tree 8", "at least 0.970x", "1.154x", "yes")),
        ("auto against the best of llama-server",
         ("BF16, widened, temperature 0: llama-server ngram-cache", "at least 1.000x", "0.938x", "no: 0 of 2")),
        ("auto against llama-server's best draft-eagle3, temperature 1",
         ("BF16, widened, temperature 1: llama-server draft-eagle3 n_max 2", "at least 1.150x", "1.200x", "yes")),
        ("auto against plain decoding, widened BF16, temperature 0",
         ("BF16, widened, temperature 0", "at least 1.400x", "1.500x", "yes")),
        ("auto against plain decoding, widened BF16, code, temperature 0",
         ("BF16, widened, code, temperature 0", "at least 2.000x", "1.500x", "no")),
        ("plain decoding against llama-server without speculation",
         ("BF16, widened, temperature 0", "at least 0.970x", "1.250x", "yes")),
        ("plain decoding against llama-bench", ("BF16, widened", "at least 0.970x", "0.990x", "yes")),
        ("auto's decode time outside llama.cpp, temperature 0", ("BF16, widened", "at most 3.0%", "2.5%", "yes")),
        ("the same a round", ("BF16, widened", "at most 0.30 ms", "0.40 ms", "no")),
    ],
)  # fmt: skip
def test_a_goal_shows_the_worst_figure_and_whether_it_reaches_the_bar(goal, row):
    assert table(result())[goal] == row


@pytest.mark.parametrize(("ratio", "reached"), [(1.0, "yes"), (0.985, "yes, within noise"), (0.97, "no: 4 of 8")])
def test_never_slower_than_plain_is_about_every_task_and_allows_for_noise(ratio, reached):
    slower = result("q4_1", {**MEANS, "auto": ratio})
    where, bar, measured, said = table(result(), slower)[
        "auto against plain decoding, each target, task and temperature"
    ]
    assert (where, bar) == ("Q4_1, code, temperature 0", "at least 1.000x (0.980x for noise)")
    assert (measured, said) == (f"{ratio:.3f}x", reached)


def duel(ratio, again=0.99):
    means = {"plain": 1.0, "auto": ratio, bars.AGAIN: again}
    run = {"settings": {**SETTINGS, "prompts_per_task": 9}, "seconds": 120.0}
    return result("q4_1", means) | run


def test_never_slower_than_plain_is_judged_by_the_duel_where_there_is_one():
    goal = "auto against plain decoding, each target, task and temperature"
    slow = result("q4_1", {**MEANS, "auto": 0.5})
    assert table(slow)[goal][2:] == ("0.500x", "no: 0 of 4")
    assert table({**slow, "duel": duel(1.1)})[goal][2:] == ("1.100x", "yes")


def test_a_duel_is_shown_beside_what_plain_decoding_differs_from_itself():
    text = page.document([result("q4_1", duel=duel(1.1))], None, "")
    assert "The duel: the first 9 prompts of each task, 90 tokens an answer, 3 repeats, 2 minutes." in text
    assert "| code | 0 | 50.0 | 2.10 | 1.100x | 0.990x |" in text
    assert "| all, mean | 1 |  |  | 1.100x | 0.990x |" in text
    assert "The duel" not in page.document([result("q4_1")], None, "")


def test_a_drafter_pass_is_scaled_to_what_plain_decoding_takes_on_the_demo_pair():
    goal = "a drafter pass over one row, scaled to 8 ms a token"
    where = "Q4_1: 1.00 ms where plain decoding takes 16.00"
    assert table(result("q4_1"))[goal] == (where, "at most 0.90 ms", "0.50 ms", "yes")


def test_what_was_not_measured_is_told():
    lines = page.document([result("q4_1", llama_bench=None)], None, "").splitlines()
    rest = " |  | at least 1.400x | not measured |  |"
    assert f"| auto against plain decoding, widened BF16, temperature 0{rest}" in lines
    assert "| plain decoding against llama-bench |  | at least 0.970x | not measured |  |" in lines


def test_a_combination_is_no_draft_eagle3_setting():
    assert bars.kind("llama-server draft-eagle3 n_max 2") == "server drafter"
    assert bars.kind("llama-server draft-eagle3+ngram-mod n_max 2") == "server"


# ---- the document ----


def test_the_page_has_the_goals_first_then_every_target_then_the_notes_as_they_are():
    text = page.document([result("q4_1"), result()], None, "## Notes\n\nAs   they are.\n")
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Benchmarks", "## Goals", "## Q4_1", "### Q4_1, temperature 0", "### Q4_1, temperature 1",
        "## BF16, widened (0.9B weights, same answers)", "### BF16, widened, temperature 0",
        "### BF16, widened, temperature 1", "## Notes",
    ]  # fmt: skip
    assert text.endswith("## Notes\n\nAs   they are.\n")
    assert "| tree 8 | 2.30 | 65.0 (63.7-66.3) | 1.30x |" in text
    assert "| code | 50.0 | 1.50x | 1.30x, tree 8 | 1.60x, ngram-cache |" in text
    assert "| auto | 0 | 2.5% | 0.40 ms |" in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))


def test_machines_and_versions_are_named_once_and_the_flag_replaces_the_machine():
    text = page.document([result("q4_1"), result()], None, "")
    assert text.count("- Machine: A machine.") == text.count("- eagle3 1, llama-cpp-python 2") == 1
    assert "- Machine: Another." in page.document([result()], "Another", "")


def test_a_task_without_a_rate_is_told():
    short = result()
    short["tasks"] = [row for row in short["tasks"] if (row["task"], row["temperature"]) != ("code", 1.0)]
    assert page.document([short], None, "").count("| code | no rate: some answers are one token |") == 1


# ---- the README ----


def test_the_readmes_sentence_comes_from_the_widened_target():
    said = page.sentence([result("q4_1"), result()], None).replace("\n", " ")
    assert "decodes 1.50 times as fast as without a drafter at temperature 0" in said
    assert "the best fixed setting (tree 8) gives 1.30 and llama.cpp's server (ngram-cache) 1.60 (A machine;" in said
    with pytest.raises(FileError, match="expected a result for widened-bf16 at temperature 0, got none"):
        page.sentence([result("q4_1")], None)


def test_only_what_stands_between_the_comments_is_replaced():
    before = f"One\n\n{page.OPENING}\nold\n{page.CLOSING}\n\nTwo\n"
    after = page.replaced("R.md", before, "new")
    assert after == before.replace("old", "new")
    for text in ("none", page.OPENING, page.CLOSING + page.OPENING, before + before):
        with pytest.raises(FileError, match=r"R\.md: expected <!-- benchmark --> and <!-- /benchmark --> once each"):
            page.replaced("R.md", text, "new")


def test_the_readme_has_both_comments():
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    assert "new" in page.replaced("README.md", readme, "new")


# ---- numbers from samples ----


def test_a_summary_has_rates_means_and_the_time_outside_llama_cpp():
    samples = [
        Sample(name, 0.0, 0, task, number, (5,) * 11, 10, seconds, other)
        for number, task in enumerate(("code", "chat"))
        for name, seconds, other in (("plain", 1.0, 0.02), ("auto", 0.5, 0.03), ("llama-server plain", 1.0, None))
    ]
    found = measuring.summary(samples)
    assert found["geometric_mean"][0.0]["auto"] == pytest.approx(2.0)
    assert [row["task"] for row in found["tasks"]] == ["code"] * 3 + ["chat"] * 3
    assert found["overhead"] == [
        {"contender": "plain", "temperature": 0.0, "share": pytest.approx(0.02), "ms_per_round": pytest.approx(2.0)},
        {"contender": "auto", "temperature": 0.0, "share": pytest.approx(0.06), "ms_per_round": pytest.approx(3.0)},
    ]


# ---- the command ----


@pytest.fixture
def command(tmp_path, monkeypatch):
    """goals.py with measuring replaced: (its exit code, the targets that were measured)"""
    files = {name: tmp_path / f"{name}.bin" for name in ("target", "drafter")}
    for name, path in files.items():
        path.write_text(name)
    monkeypatch.setattr(goals, "demo_target", lambda: files["target"])
    monkeypatch.setattr(goals, "demo_drafter", lambda: files["drafter"])
    monkeypatch.setattr(measuring, "write_variant", lambda source, path, *_: path.write_text("made"))
    monkeypatch.setattr(measuring, "server_version", lambda _: "b5")
    monkeypatch.setattr(measuring, "engine_digest", lambda: "e")
    output = tmp_path / "out"

    def run(*flags, fails=None):
        seen = []

        def measure(settings, prompts, learned, progress):
            assert settings.target.is_file()
            assert learned.parent == output / "learned"
            if learned.name == fails:
                raise KeyboardInterrupt
            seen.append(learned.name)
            progress(1, 1)
            names = ("geometric_mean", "rows", "tasks", "overhead", "drafter_step", "llama_bench", "seconds")
            return {name: result()[name] for name in names}

        def measure_duel(settings, *more):
            assert (settings.shapes, settings.against) == ((), None)
            measure(settings, *more)
            return {name: duel(1.1)[name] for name in ("geometric_mean", "rows", "tasks", "overhead", "seconds")}

        monkeypatch.setattr(measuring, "measure", measure)
        monkeypatch.setattr(measuring, "measure_duel", measure_duel)
        parts = () if "--part" in flags or "--only-report" in flags else ("--part", "contenders")
        return goals.main(["-o", str(output), *parts, *flags]), seen

    run.output, run.files = output, files
    return run


AGAINST = ("--against", "llama-server")
TWO = (*AGAINST, "--target", "q4_0", "--target", "q4_1")


def test_targets_come_in_their_own_order_with_results_variants_and_the_document(command, capsys):
    assert command(*TWO) == (0, ["q4_1", "q4_0"])
    assert sorted(path.name for path in command.output.iterdir()) == [
        "benchmarks.md", "q4_0.json", "q4_1.json", "targets",
    ]  # fmt: skip
    (made,) = (command.output / "targets").iterdir()
    assert made.name.startswith("q4_0-")
    found = json.loads((command.output / "q4_1.json").read_text())
    assert found["settings"]["run"]["prompts"]["count"] == 50
    assert list(found["settings"]["run"]["shapes"]) == ["chain 1", "chain 3", "tree 3", "tree 8", "tree 16", "tree 60"]
    assert capsys.readouterr().out == f"{command.output / 'benchmarks.md'}\n"


def test_the_same_command_goes_on_after_an_interruption(command, capsys):
    assert command(*TWO, fails="q4_0") == (130, ["q4_1"])
    assert "Interrupted. The same command goes on" in capsys.readouterr().err
    assert command(*TWO) == (0, ["q4_0"])
    assert command(*TWO) == (0, [])


def test_both_parts_of_every_target_are_measured_and_a_duel_can_come_later(command):
    both = ("--part", "contenders", "--part", "duel")
    assert command(*TWO, *both) == (0, ["q4_1", "q4_1-duel", "q4_0", "q4_0-duel"])
    assert command("--part", "duel", "--target", "q4_0", "-n", "8") == (0, ["q4_0-duel"])
    assert "The duel" in (command.output / "benchmarks.md").read_text()
    assert json.loads((command.output / "q4_0-duel.json").read_text())["settings"]["run"]["max_tokens"] == 8


def test_a_duel_alone_makes_no_document_and_says_so(command, capsys):
    assert command("--part", "duel", "--target", "q4_0") == (0, ["q4_0-duel"])
    out, err = capsys.readouterr()
    assert out == ""
    assert "no document: it needs a result of all contenders" in err


@pytest.mark.parametrize(
    "flags", [("-n", "8"), ("--repeats", "1"), ("--prompts-per-task", "2"), ("--shape", "3,1,3"), ("-t", "1"),
              ("--against-type", "none")]
)  # fmt: skip
def test_other_settings_are_measured_again(command, flags):
    assert command(*TWO, "-t", "2") == (0, ["q4_1", "q4_0"])
    assert command(*TWO, "-t", "2", *flags) == (0, ["q4_1", "q4_0"])


def test_another_drafter_is_measured_again_and_the_reason_is_told(command, capsys):
    command(*TWO)
    command.files["drafter"].write_text("better")
    assert command(*TWO)[1] == ["q4_1", "q4_0"]
    assert "made with other settings (drafter), so it is measured again" in capsys.readouterr().err


def test_a_result_of_another_engine_counts_and_is_told(command, monkeypatch, capsys):
    command(*TWO)
    monkeypatch.setattr(measuring, "engine_digest", lambda: "f")
    assert command(*TWO) == (0, [])
    assert "made before eagle3_cli/engine changed; remove it to measure again" in capsys.readouterr().err


def test_only_the_report_is_written_again_and_goes_where_it_is_told(command, tmp_path):
    command(*AGAINST, "--target", "widened-bf16")
    readme = tmp_path / "R.md"
    readme.write_text(f"{page.OPENING}\nold\n{page.CLOSING}\n")
    document = tmp_path / "d.md"
    flags = ("--only-report", "--document", str(document), "--readme", str(readme), "--machine", "Mine")
    assert command(*flags) == (0, [])
    assert "- Machine: Mine." in document.read_text()
    assert "1.50 times as fast" in readme.read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--part", "contenders"), "--against: expected the llama-server program."),
        (("--against", "http://h:1"), "every target needs servers of its own"),
        (("--only-report",), "expected results, got none."),
        (("--part", "duel", "--shape", "2,2,8"), "--shape: has no effect with --part duel."),
        (("--part", "duels"), "--part: expected one of contenders, duel, got duels."),
        (("--only-report", "--part", "duel"), "--part: has no effect with --only-report."),
        (("--only-report", "--repeats", "2"), "--repeats: has no effect with --only-report."),
        ((*AGAINST, "--target", "f32"), "--target: expected one of q4_1, q4_0, q8_0, bf16"),
        ((*AGAINST, "--prompts-per-task", "11"), "--prompts-per-task: expected a value from 1 to 10, got 11."),
        ((*AGAINST, "--shape", "2,2"), "--shape: expected DEPTH,WIDTH,NODES, got 2,2."),
        ((*AGAINST, "--shape", "2,2,8", "--shape", "4,4,8"), "--shape: expected one tree 8, got several"),
        ((*AGAINST, "--against-type", "draft-simple"), "an EAGLE-3 drafter does not"),
    ],
)
def test_bad_input_is_one_message(command, capsys, flags, said):
    assert command(*flags) == (2, [])
    assert said in capsys.readouterr().err


def test_a_damaged_or_old_result_is_named(command, capsys):
    command(*TWO)
    path = command.output / "q4_1.json"
    path.write_text('{"format": 0}')
    assert command(*TWO)[0] == 2
    assert f"{path}: expected format 1, got 0." in capsys.readouterr().err


def test_a_variant_is_made_once_for_each_source(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(measuring, "write_variant", lambda source, path, *how: (path.touch(), made.append(how)))
    target = next(target for target in measuring.TARGETS if target.name == "widened-bf16")
    paths = [measuring.variant(target, tmp_path / "s", tmp_path / "new", digest) for digest in ("aa", "aa", "bb")]
    assert made == [("bf16", 16384)] * 2
    assert paths[0] == paths[1] != paths[2]
    assert measuring.variant(measuring.TARGETS[0], tmp_path / "s", tmp_path / "new", "aa") == tmp_path / "s"


def test_what_budgets_learn_goes_to_the_targets_folder_and_nothing_of_it_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_CACHE", "before")
    with measuring.cache_at(tmp_path):
        assert measuring.os.environ["EAGLE3_CACHE"] == str(tmp_path)
    assert measuring.os.environ["EAGLE3_CACHE"] == "before"


def test_a_program_that_cannot_be_run_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"--against .*absent: cannot be run"):
        measuring.server_version(str(tmp_path / "absent"))


def test_the_machine_is_described_without_its_name():
    said = goals.machine_description()
    assert " cores" in said
    assert measuring.os.uname().nodename not in said.split()


def test_a_shape_out_of_range_is_refused():
    with pytest.raises(OptionError, match="--draft-depth"):
        TreeShape.parse("0,1,1")
