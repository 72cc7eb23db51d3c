"""Grammars and JSON schemas, tried in a confined process before llama.cpp parses them in this one.

llama.cpp's parser recurses into brackets and rules, so a deep grammar overflows the stack; it looks for left recursion,
but takes a rule that is empty only through another one for one that is not, and then the first letter of such a rule
never comes; and it prints a grammar that it refuses to stderr.  llama-cpp-python's conversion of schemas repeats what a
schema says it should repeat.  Each ends or fills a process, so a process is what it gets.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from . import confined
from .errors import OptionError

ROOT = "root"
# What stands in quotes, in brackets or behind # says nothing about a grammar's form; each ends with the text at last.
_CONTENT = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\r\n]*', re.DOTALL)
_RULE = re.compile(r"([a-zA-Z0-9-]+)[ \t]*::=")
_ALL = "all-of-the-rules-above"
_HINT = "It must be GBNF with a rule named root."


def from_schema(schema: str, converter: Path) -> str:
    """GBNF for a JSON schema.  converter: llama-cpp-python's llama_grammar.py.  OptionError if it cannot be had."""
    try:
        return str(confined.run("eagle3_cli.grammars:convert", {"schema": schema, "converter": str(converter)}))
    except confined.Refused as error:
        raise OptionError(f"--json-schema: cannot be turned into a grammar: {error}.") from error
    except confined.Stopped as error:
        raise OptionError(
            f"--json-schema: cannot be turned into a grammar: that takes more than {confined.LIMITS}.",
            "Look for large numbers (minLength, maxItems, {n} in a pattern) and for deep nesting.",
        ) from error


@lru_cache(maxsize=2)  # every answer asks anew
def check(grammar: str, library: str) -> None:
    """OptionError unless llama.cpp can parse a grammar and begin each of its rules.  library: the path of libllama."""
    form = _CONTENT.sub(" ", grammar)
    if not form.strip():
        raise OptionError("--grammar: is empty.", _HINT)
    if "<" in form or "!" in form:
        # llama.cpp lets a token pass that begins with letters of the grammar and reaches into a token element, and
        # then ends the process, because nothing follows it
        raise OptionError(
            "--grammar: token elements (<[5]>, <think>, !<[5]>) are not supported.",
            "Write the token's text in quotes.",
        )
    rules = sorted(set(_RULE.findall(form)))
    try:
        reason = confined.run("eagle3_cli.grammars:parse", {"grammar": grammar, "rules": rules, "library": library})
    except confined.Stopped as error:
        raise OptionError(
            f"--grammar: parsing it takes more than {confined.LIMITS}.",
            "Look for a rule that begins with itself and for brackets in brackets.",
        ) from error
    except confined.Refused as error:
        raise OptionError(f"--grammar: llama.cpp cannot parse it: {error}.", _HINT) from error
    if reason is not None:
        raise OptionError(f"--grammar: llama.cpp cannot parse it{reason and ': '}{reason}.", _HINT)


# ---- in the confined process ------------------------------------------------------------------------------


def convert(task: Mapping[str, Any]) -> str:
    """See `from_schema`.  The converter is a file that needs no other: its whole package takes half a second."""
    spec = importlib.util.spec_from_file_location("llama_grammar", task["converter"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return str(module.json_schema_to_gbnf(task["schema"]))
    except MemoryError:
        raise
    except Exception as error:  # the converter raises bare ValueError, KeyError, AssertionError, ...
        raise confined.Refused(f"{type(error).__name__}: {error}") from error


def parse(task: Mapping[str, Any]) -> str | None:
    """What llama.cpp has against a grammar, one line; None: nothing.  The second time all rules are begun at once."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    library = ctypes.CDLL(task["library"])
    make, free = library.llama_sampler_init_grammar, library.llama_sampler_free
    make.restype, make.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    grammar = task["grammar"]
    with_all = f"{grammar}\n{_ALL} ::= {' | '.join(task['rules'])}\n"
    with _reasons() as said:
        os.dup2(said.fileno(), 2)  # the parser prints its reasons
        for text, root in ((grammar, ROOT), (with_all, _ALL)):
            made = make(None, text.encode(), root.encode())
            if not made:
                said.seek(0)
                return _first_line(said.read(1000).decode("utf-8", "replace"))
            free(made)
    return None


def _reasons() -> IO[bytes]:
    """A file for them; where none can be written there are none."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return open(os.devnull, "rb+")


def _first_line(said: str) -> str:
    lines = said.strip().splitlines()
    return lines[0].rpartition("error parsing grammar: ")[2][:200].strip().rstrip(".") if lines else ""
