"""The figure of a run: the same bytes for the same numbers, words for those who do not see it, and what is refused."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from eagle3_cli.bench import plot
from eagle3_cli.bench.breakdown import Costs
from eagle3_cli.bench.report import DepthCount, Row
from eagle3_cli.errors import FileError, OptionError

SVG = "{http://www.w3.org/2000/svg}"
DEPTHS = (DepthCount(1, 30, 40), DepthCount(2, 10, 30), DepthCount(3, 0, 0))
LEARNED = Costs(5.0, {1: 1.0, 33: 9.5, 4: 2.5}, {2: 0.15, 1: 0.1})


def row(contender, speed_up, temperature=0.0, task=None, depths=()):
    return Row(contender, temperature, 50.0, 40.0, 60.0, speed_up, 1.5, None, task, accepted_by_depth=depths)


TABLE = [
    row(name, ratio, temperature, depths=depths)
    for temperature in (0.0, 1.0)
    for name, ratio, depths in (("plain", 1.0, ()), ("auto", 1.25, DEPTHS), ("chain 3", 0.75, DEPTHS[:1]))
]
TASKS = [replace(each, task=task) for task in ("code", "chat") for each in TABLE]


def drawn(folder, table=TABLE, tasks=TASKS, learned=LEARNED, name="x.svg"):
    plot.draw(folder / name, table, tasks, learned)
    return (folder / name).read_bytes()


def test_the_same_numbers_draw_the_same_bytes_whatever_the_users_style_is(tmp_path, monkeypatch):
    import matplotlib as mpl

    first = drawn(tmp_path)
    monkeypatch.setitem(mpl.rcParams, "axes.titleweight", "bold")
    assert drawn(tmp_path, name="again.svg") == first
    assert drawn(tmp_path, learned=replace(LEARNED, draft={1: 0.2})) != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.svg", "x.svg"]


def test_it_has_three_panels_a_title_and_a_description_with_all_numbers(tmp_path):
    root = ET.fromstring(drawn(tmp_path))
    groups = [group.get("id", "") for group in root.iter(f"{SVG}g")]
    assert [name for name in groups if name.startswith("axes")] == ["axes_1", "axes_2", "axes_3"]
    title, description = root[:2]
    assert (title.tag, description.tag) == (f"{SVG}title", f"{SVG}desc")
    assert "eagle3 bench" in title.text
    assert description.text == plot.describe(TABLE, TASKS, LEARNED)
    for words in (
        "code, temperature 0: auto 1.25.",
        "chat, temperature 1: chain 3 0.75.",
        "auto at temperature 1: 0.75, 0.33, none.",
        "target: 1 rows 1.00, 4 rows 2.50, 33 rows 9.50.",
        "drafter: 1 rows 0.10, 2 rows 0.15.",
    ):
        assert words in description.text
    assert "plain 1.00" not in description.text


@pytest.mark.parametrize(("change", "words"), [
    ({"learned": None}, "auto has measured nothing"),
    ({"learned": Costs(5.0, {}, {})}, "auto has measured nothing"),
    ({"table": [replace(each, accepted_by_depth=()) for each in TABLE]}, "nothing was drafted"),
])  # fmt: skip
def test_a_panel_without_numbers_says_so(tmp_path, change, words):
    assert f"<!-- {words} -->".encode() in drawn(tmp_path, **change)
    assert f"<!-- {words} -->".encode() not in drawn(tmp_path)


def test_plain_decoding_alone_and_a_run_without_tasks_are_drawn(tmp_path):
    ET.fromstring(drawn(tmp_path, TABLE[:1], []))
    assert "temperature 0: auto 1.25." in plot.describe(TABLE, TABLE, None)
    ET.fromstring(drawn(tmp_path, TABLE, []))


def test_names_are_shown_as_they_are_whatever_they_hold(tmp_path):
    names = ("$\\frac$", "<&>", "a\x00b\ud800", "x" * 200)
    root = ET.fromstring(drawn(tmp_path, tasks=[row("auto", 1.0, task=name) for name in names]))
    description = root[1].text
    for shown in ("$\\frac$, temperature", "<&>, temperature", "a?b?, temperature", "x" * 200):
        assert shown in description


def test_more_contenders_than_colours_look_different(tmp_path):
    many = [row(f"tree {n}", 1.0 + n / 100, depths=DEPTHS) for n in range(20)]
    ET.fromstring(drawn(tmp_path, many, many))
    looks = {(plot.COLOURS[n % len(plot.COLOURS)], plot.HATCHES[n // len(plot.COLOURS)]) for n in range(20)}
    assert len(looks) == 20


def test_where_no_figure_can_be_written(tmp_path):
    plot.check(tmp_path / "x.SVG")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match=r"--plot: expected a file name that ends in \.svg, got x\.pdf\."):
        plot.check(tmp_path.__class__("x.pdf"))
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(FileError, match=r"folder\.svg: is a directory, expected a file name\."):
        plot.check(tmp_path / "folder.svg")
    with pytest.raises(FileError, match=r"absent: expected a folder that can be written, got: No such file"):
        plot.check(tmp_path / "absent" / "x.svg")
    with pytest.raises(FileError, match=r"absent/x\.svg: cannot be written: No such file"):
        drawn(tmp_path, name="absent/x.svg")


def test_a_failure_leaves_an_old_figure_as_it_was(tmp_path, monkeypatch):
    before = drawn(tmp_path)
    monkeypatch.setattr(plot, "_svg", lambda *_: "no bytes")
    with pytest.raises(TypeError):
        drawn(tmp_path)
    assert (tmp_path / "x.svg").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]
