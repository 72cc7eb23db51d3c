"""docs/help.md says what the commands say."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import click

from eagle3_cli.cli import COMMANDS, SETTINGS, cli
from eagle3_cli.commands.help import TOPICS, commands
from eagle3_cli.commands.help_pages import document

DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS / "help.md"
OURS = "eagle3"


def test_the_pages_are_up_to_date():
    assert PAGES.read_text("utf-8") == document(), "run: make help-pages"


def test_the_pages_have_every_command_and_topic():
    said = document()
    for name in (*COMMANDS, "models add", *(f"help {topic}" for topic in TOPICS)):
        assert f"\n## eagle3 {name}\n" in said


def test_the_pages_do_not_depend_on_the_environment(monkeypatch, tmp_path):
    before = document()
    (tmp_path / "c.toml").write_text("top-k = 5\n")
    for name, value in (("EAGLE3_CONFIG", str(tmp_path / "c.toml")), ("EAGLE3_TOP_K", "7"), ("COLUMNS", "60"),
                        ("XDG_CONFIG_HOME", str(tmp_path)), ("HOME", "/nowhere"), ("FORCE_COLOR", "1")):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert document() == before


# ---- docs/cli.md, the comparison ----


def flags(*wanted):
    """Every spelling of every option of these commands, or of all."""
    found = set()
    for name, command in commands(click.Context(cli, info_name="eagle3", **SETTINGS)):
        if not wanted or name in wanted:
            found |= {flag for option in command.params if isinstance(option, click.Option) for flag in option.opts}
    return found


def our_cells():
    """The cells of the column of eagle3, of every table."""
    cells, column = [], None
    for line in (DOCS / "cli.md").read_text("utf-8").splitlines():
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if "why" in row:
            column = next(i for i, cell in enumerate(row) if cell.split()[0] == OURS)
        elif not row:
            column = None
        elif column is not None:
            cells.append(row[column])
    return cells


def test_the_comparison_has_every_option_of_generate_and_chat():
    said = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", " ".join(our_cells())))
    long = {flag for flag in flags("generate", "chat") if flag.startswith("--")}
    assert long - said == set()


def test_the_comparison_names_no_option_that_there_is_not():
    said = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", " ".join(our_cells())))
    assert said - flags() - {"--help", "--version"} == set()


def test_every_row_has_a_cell_for_every_column():
    widths = [
        len(re.split(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        for line in (DOCS / "cli.md").read_text("utf-8").splitlines()
    ]
    pairs = itertools.pairwise(widths)
    assert all(a == b for a, b in pairs if a and b)


def test_what_others_can_do_and_eagle3_cannot_has_a_reason():
    for line in (DOCS / "cli.md").read_text("utf-8").splitlines():
        row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(row) > 2 and row[1] == "-":
            assert row[-1], row[0]
