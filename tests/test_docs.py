"""The documentation says what is there: links, commands and options, quoted messages, modules."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import click
import pytest

from eagle3_cli.cli import COMMANDS, cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])
GENERATED = ("help.md", "benchmarks.md", "benchmarks_amx.md")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page):
    text = page.read_text("utf-8")
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_index_leads_to_every_page():
    text = (DOCS / "README.md").read_text("utf-8")
    assert [path.name for path in DOCS.glob("*.md") if f"({path.name})" not in text and path.name != "README.md"] == []


# ---- commands ---------------------------------------------------------------------------------------------


@lru_cache
def options(name: str) -> frozenset[str]:
    """Every option of a command and of those below it."""
    with cli.make_context("eagle3", [], resilient_parsing=True) as context:
        found = cli.get_command(context, name)
        assert found is not None
        commands = [found, *(found.commands.values() if isinstance(found, click.Group) else ())]
    own = [text for each in commands for param in each.params for text in [*param.opts, *param.secondary_opts]]
    return frozenset([*own, "--help", "-h"])


def commands_in(text: str) -> list[tuple[str, list[str]]]:
    """(command, its options) of every `eagle3 COMMAND ...` in code, at the beginning of a line or in backticks."""
    code = "\n".join(re.findall(r"^(?: {4}|\t)(.*)$", text.replace("\\\n", " "), re.MULTILINE))
    code += "\n" + "\n".join(re.findall(r"`([^`\n]+)`", text))
    found = []
    for name, rest in re.findall(r"(?:^|[|&$] |\$ )eagle3 ([a-z]+)\b([^\n|#&]*)", code, re.MULTILINE):
        quoted = re.sub(r"\"[^\"]*\"|'[^']*'", "", rest)
        found.append((name, re.findall(r"(?<=\s)(--[a-z][a-z0-9-]*|-[a-zA-Z]+)(?=[\s=]|$)", quoted)))
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=named)
def test_every_command_exists_with_its_options(page):
    wrong = []
    for name, flags in commands_in(page.read_text("utf-8")):
        if name not in COMMANDS:
            wrong.append(name)
        else:
            wrong += [f"{name} {flag}" for flag in flags if flag not in options(name)]
    assert wrong == []


def test_commands_are_found_in_code_and_nowhere_else():
    code = "    $ cat x | eagle3 chat -n 5 --temp 0 \\\n        --raw | head -c 1\n    in the eagle3 graph\n"
    text = f"eagle3 decodes.\n\n{code}\n`eagle3 train --init` it\n"
    assert commands_in(text) == [("chat", ["-n", "--temp", "--raw"]), ("train", ["--init"])]


def test_every_make_target_exists():
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in (page for page in PAGES if page.name not in GENERATED):
        named_there = re.findall(r"(?:`|^ {4}|\" )make ([a-z][a-z-]*)", page.read_text("utf-8"), re.MULTILINE)
        assert set(named_there) <= rules, page.name


# ---- what is quoted ---------------------------------------------------------------------------------------


@lru_cache
def source() -> str:
    """All code, strings that are written in several pieces joined."""
    files = [*(ROOT / "eagle3_cli").rglob("*.py"), *(ROOT / "convert").glob("*.py")]
    return "\n".join(re.sub(r"\"\s*\n\s*f?\"", "", file.read_text("utf-8")) for file in files)


def test_the_messages_of_the_troubleshooting_page_are_in_the_code():
    text = (DOCS / "troubleshooting.md").read_text("utf-8")
    messages = re.findall(r"^\| (`[^|]*?`) \|", text, re.MULTILINE)
    assert len(messages) > 25
    lost = []
    for message in messages:
        for quoted in re.findall(r"`([^`]+)`", message):
            for part in re.split(r"\.\.\.|\d+|[\w-]+\.gguf", quoted):
                part = part.strip(" ,()")
                if len(part) > 8 and part not in source():
                    lost.append(part)
    assert lost == []


def test_the_map_of_the_code_names_every_module():
    text = (DOCS / "architecture.md").read_text("utf-8")
    folders = [ROOT / "eagle3_cli", ROOT / "eagle3_cli" / "engine", ROOT / "eagle3_cli" / "commands"]
    modules = [path.name for folder in folders for path in folder.glob("*.py") if not path.name.startswith("chat_")]
    assert [name for name in modules if name not in text and name != "__init__.py"] == []


def test_every_test_that_the_map_names_exists():
    text = (DOCS / "architecture.md").read_text("utf-8")
    assert [name for name in re.findall(r"`(tests/[^`:]*)`", text) if not any(ROOT.glob(name))] == []
