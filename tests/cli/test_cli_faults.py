"""Streams, disks, caches and memories that fail: one message, an exit code, and no half-written file."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3_cli import prompt
from eagle3_cli.__main__ import run
from eagle3_cli.engine.budget import Machine
from eagle3_cli.engine.costs import CPU_DRAFTER_PRIOR, CPU_PRIOR
from eagle3_cli.engine.learned import cache_folder, keep, recall
from eagle3_cli.errors import FileError, LlamaError
from eagle3_cli.folders import LARGEST

sys.path.append(str(Path(__file__).parents[1] / "convert"))


def one_message(err: str) -> str:
    """The only message on stderr."""
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    return errors[0].removeprefix("error: ")


# ---- streams ----------------------------------------------------------------------------------------------


def shell(environment, words, *arguments, **options):
    """Run `words` in a shell, where "$@" is the command."""
    settings = {"capture_output": True, "timeout": 60, "env": environment, **options}
    return subprocess.run(["sh", "-c", words, "sh", *arguments], **settings)


@pytest.mark.parametrize(
    ("closing", "out", "flags"),
    [
        ("2>&-", b"Hi\n", ()),
        (">&-", b"", ()),
        (">&- 2>&-", b"", ("--json",)),
        ("<&-", b"Hi\n", ()),
        ("<&- 2>&-", b"Hi\n", ("--json",)),
        ("<&- >&- 2>&-", b"", ()),
    ],
)
def test_closed_streams_do_not_matter(command, environment, closing, out, flags):
    result = shell(environment, f'exec "$@" {closing}', *command('[["Hi"]]', "generate", "x", "--stats", *flags))
    assert result.returncode == 0
    assert b"Traceback" not in result.stderr
    if flags and out:
        assert json.loads(result.stdout)["text"] == "Hi"
    else:
        assert result.stdout == out


@pytest.mark.parametrize(("closing", "code"), [("2>&-", 2), (">&- 2>&-", 2), ("<&- >&-", 2)])
def test_an_error_without_a_stream_for_it_keeps_its_exit_code(command, environment, closing, code):
    result = shell(environment, f'exec "$@" {closing}', *command('[["Hi"]]', "generate", "x", "--temp", "warm"))
    assert (result.returncode, result.stdout) == (code, b"")


def test_the_number_of_a_closed_stream_is_not_given_to_a_file(environment, tmp_path):
    """Else what a library prints to stderr would land in a file that we write."""
    code = (
        "import os, sys; from eagle3_cli.__main__ import _open_closed_streams; _open_closed_streams(); "
        "handle = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); os.write(2, b'printed by a library'); "
        "sys.exit(handle)"
    )
    path = tmp_path / "written"
    result = shell(environment, 'exec "$@" <&- >&- 2>&-', sys.executable, "-c", code, str(path))
    assert result.returncode == 3
    assert path.read_bytes() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("generate", "x"), 1, "stdout: No space left on device."),
        (("generate", "x", "--json"), 1, "stdout: No space left on device."),
        (("chat",), 1, "stdout: No space left on device."),
        (("--version",), 1, "stdout: No space left on device."),
        (("--help",), 2, "a file or stream: cannot be written: No space left on device."),
        (("generate", "--help"), 2, "a file or stream: cannot be written: No space left on device."),
    ],
)
def test_a_full_stdout_is_one_message(process, args, code, message):
    with open("/dev/full", "wb") as full:
        result = process('[["Hi"]]', *args, capture_output=False, stdout=full, stderr=subprocess.PIPE, input=b"hi\n")
    assert (result.returncode, one_message(result.stderr.decode())) == (code, message)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_a_full_stderr_does_not_matter(process):
    with open("/dev/full", "wb") as full:
        result = process('[["Hi"]]', "generate", "-p", "x", "--stats", capture_output=False, stdout=subprocess.PIPE,
                         stderr=full)  # fmt: skip
    assert (result.returncode, result.stdout) == (0, b"Hi\n")


@pytest.mark.parametrize("args", ["generate -p x", "generate -p x --json", "chat", "--version"])
def test_a_reader_that_takes_one_byte(command, environment, args):
    words = f'{{ echo hi | "$@" {args}; echo $? >&2; }} | head -c 1'
    result = shell(environment, words, *command('[["Hi", " there"]]'))
    assert len(result.stdout) == 1
    assert result.stderr == b"0\n"


@pytest.mark.parametrize("args", [("generate",), ("generate", "-"), ("generate", "-f", "-"), ("chat",)])
def test_an_endless_stdin_ends_at_a_limit(eagle3, monkeypatch, args):
    class Endless(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            buffer[:] = b"y" * len(buffer)
            return len(buffer)

    monkeypatch.setattr(prompt, "LARGEST", 1 << 20)
    result = eagle3(*args, stdin=io.TextIOWrapper(io.BufferedReader(Endless()), encoding="utf-8"))
    assert (result.code, result.out) == (2, "")
    assert one_message(result.err).endswith("expected at most 1 MiB of text, got more.")
    assert not eagle3.engines or not eagle3.engine.prompts


def test_a_program_that_prints_for_ever_is_no_prompt(command, environment):
    """The real limit, with little memory."""
    words = 'ulimit -v 1000000; yes | "$@"'
    result = shell(environment, words, *command('[["Hi"]]', "generate"))
    assert (result.returncode, result.stdout) == (2, b"")
    assert one_message(result.stderr.decode()) == "stdin: expected at most 64 MiB of text, got more."


@pytest.mark.parametrize("flag", ["-f", "--grammar-file", "--json-schema-file"])
def test_an_endless_file_is_refused(eagle3, monkeypatch, flag):
    monkeypatch.setattr(prompt, "LARGEST", 1 << 20)
    result = eagle3("generate", "-p", "x", flag, "/dev/zero")
    assert (result.code, result.out) == (2, "")
    assert one_message(result.err) == f"{flag} /dev/zero: expected at most 1 MiB of text, got more."


def test_a_text_of_exactly_the_limit_is_read(eagle3, monkeypatch, tmp_path):
    monkeypatch.setattr(prompt, "LARGEST", 1000)
    (tmp_path / "a").write_text("x" * 1000)
    assert eagle3("generate", "--raw", "-f", str(tmp_path / "a")).code == 0
    assert eagle3.engine.prompts == ["x" * 1000]
    (tmp_path / "a").write_text("x" * 1001)
    assert eagle3("generate", "--raw", "-f", str(tmp_path / "a")).code == 2


@pytest.mark.parametrize("args", [("generate",), ("chat",)])
def test_a_stdin_that_cannot_be_read_is_one_message(command, environment, tmp_path, args):
    result = shell(environment, f'exec "$@" 0>{tmp_path}/new', *command('[["Hi"]]', *args))
    assert (result.returncode, result.stdout) == (2, b"")
    assert "stdin" in one_message(result.stderr.decode())


def test_chat_without_a_stdin_says_nothing(command, environment):
    result = shell(environment, 'exec "$@" <&-', *command('[["Hi"]]', "chat"))
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


# ---- disks ------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """disk(KiB or "ro") -> a folder on a file system of its own, so large or read-only; skips where it cannot."""
    mounted = []

    def mount(what):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        size = "ro" if what == "ro" else f"size={what}k"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("needs the right to mount a file system")
        mounted.append(folder)
        return folder

    with contextlib.suppress(FileNotFoundError):
        yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def conversion(tmp_path):
    """conversion(folder) -> arguments of a conversion into it."""
    import checkpoints

    source = checkpoints.write(tmp_path / "checkpoint", checkpoints.tensors())
    target = checkpoints.write_target(tmp_path / "target.gguf")
    return lambda folder: ["convert", str(source), "--target", str(target), "-o", str(folder / "o.gguf")]


@pytest.mark.parametrize(("what", "reason"), [(64, "No space left on device"), ("ro", "Read-only file system")])
def test_convert_on_a_disk_that_cannot_be_written(disk, conversion, capsys, monkeypatch, what, reason):
    monkeypatch.setattr("eagle3_cli.convert.output.check_space", lambda *_: None)  # the disk fills up meanwhile
    folder = disk(what)
    assert run(conversion(folder)) == 2
    out, err = capsys.readouterr()
    assert (out, list(folder.iterdir())) == ("", [])
    assert one_message(err) == f"{folder / 'o.gguf'}: cannot be written: {reason}."


def test_convert_sees_before_it_begins_that_the_disk_is_full(disk, conversion, capsys):
    folder = disk(64)
    assert run(conversion(folder)) == 2
    assert "are needed and" in one_message(capsys.readouterr().err)


def test_convert_under_a_limit_of_the_size_of_files(conversion, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        code = run(conversion(tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, list((tmp_path / "out").iterdir())) == (2, [])
    assert one_message(capsys.readouterr().err).endswith("o.gguf: cannot be written: File too large.")


def training(tiny_target, tmp_path, folder):
    """Arguments of a training that takes about a second."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(8)))
    flags = "--answer-tokens 12 --max-length 64 --draft-vocab 64 --aux-layers 2,3,4 --ttt-steps 2 --steps 2"
    flags += " --batch-tokens 128 --outtype f32 --precision no --threads 1 --states llama.cpp --compile off"
    files = ["--target", str(tiny_target.path), "--data", str(tmp_path / "prompts.jsonl"), "-o", str(folder)]
    return ["train", *files, *flags.split(), "-q"]


@pytest.mark.parametrize("size", [16, 200])
def test_train_on_a_disk_that_fills_up(disk, tiny_target, tmp_path, capsys, monkeypatch, size, one_thread):
    """With answers, states or a training state half written; whole files stay, the rest does not count."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 40))  # it fills up meanwhile
    folder = disk(size) / "o"
    code = run(training(tiny_target, tmp_path, folder))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "cannot be written: " in one_message(err)
    assert [p for p in folder.rglob("*") if ".part" in p.name or p.name.startswith(".state")] == []


def test_train_on_a_read_only_disk(disk, tiny_target, tmp_path, capsys, one_thread):
    folder = disk("ro") / "o"
    assert run(training(tiny_target, tmp_path, folder)) == 2
    assert one_message(capsys.readouterr().err) == f"{folder}: cannot be written: Read-only file system."


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EFBIG, errno.EIO])
def test_a_disk_fault_anywhere_is_no_bug_of_ours(eagle3, number):
    eagle3.load_error = OSError(number, os.strerror(number), "some/file")
    result = eagle3("generate", "x")
    assert (result.code, result.out) == (2, "")
    assert one_message(result.err) == f"some/file: cannot be written: {os.strerror(number)}."


# ---- the cache --------------------------------------------------------------------------------------------


def machine(level: float | None = None) -> Machine:
    made = Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR)
    if level is not None:
        for rows in (1, 2, 3, 4):
            made.target.learn(rows, level * rows)
        made.calibration("0").learn(1, -0.3, 0, True)
    return made


def fill(folder: Path) -> None:
    """Leave no room on its disk."""
    with contextlib.suppress(OSError), (folder / "rest").open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass


@pytest.mark.parametrize(("what", "reason"), [(64, "No space left on device"), ("ro", "Read-only file system")])
def test_a_cache_that_cannot_be_written_is_no_fault(disk, what, reason):
    folder = disk(what)
    fill(folder)
    path = folder / "cache" / "x.json"
    assert keep(path, machine(0.01)) == reason
    assert [p.name for p in folder.rglob("*") if p.is_file()] == ([] if what == "ro" else ["rest"])
    assert not recall(path, machine())


def test_a_full_cache_keeps_what_it_had(disk):
    folder = disk(64)
    assert keep(folder / "x.json", machine(0.01)) is None
    fill(folder)
    assert keep(folder / "x.json", machine(0.02)) == "No space left on device"
    assert recall(folder / "x.json", found := machine())
    assert found.as_dict() == machine(0.01).as_dict()
    assert sorted(p.name for p in folder.iterdir()) == ["rest", "x.json"]


def test_an_answer_does_not_depend_on_the_cache(tiny_target, disk, monkeypatch, capsys):
    args = ["generate", "--raw", "-p", "the hen", "--target", str(tiny_target.path), "--draft", "lookup", "-n", "5",
            "--temp", "0", "--threads", "1"]  # fmt: skip
    assert run(args) == 0
    out = capsys.readouterr().out
    for folder in (disk("ro"), disk("ro") / "none", Path("/dev/null"), Path("/dev/null/x")):
        monkeypatch.setenv("EAGLE3_CACHE", str(folder))
        assert run(args) == 0
        assert capsys.readouterr() == (out, "")


def test_without_a_home_nothing_is_kept(monkeypatch):
    for name in ("EAGLE3_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    path = cache_folder() / "x.json"
    assert keep(path, machine(0.01))
    assert not recall(path, machine())


def _write_states(path: Path, which: int, times: int) -> None:
    made = machine(0.01 * (which + 1))
    for _ in range(times):
        assert keep(path, made) in (None, "File exists")


def test_programs_that_share_a_cache_always_find_a_whole_state(tmp_path):
    path = tmp_path / "x.json"
    states = [machine(0.01 * (which + 1)).as_dict() for which in range(3)]
    assert keep(path, machine(0.01)) is None
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_states, args=(path, which, 60)) for which in range(3)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers) or not seen:
        found = machine()
        assert recall(path, found)
        assert found.as_dict() in states
        seen += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_what_a_killed_writer_left_does_not_hold_others(tmp_path):
    """A name that a process of the same number in another container may have taken."""
    path = tmp_path / "x.json"
    assert keep(path, machine(0.01)) is None
    (tmp_path / f".x.json.{os.getpid()}.part").write_text("left")
    assert keep(path, machine(0.02)) is None
    assert recall(path, found := machine())
    assert found.as_dict() == machine(0.02).as_dict()


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)


@pytest.mark.parametrize(
    "put",
    [
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("missing"),
        _huge,
        lambda path: path.write_bytes(b" " * LARGEST + b"{}"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text('{"a":' * 100_000),
        lambda path: path.write_text('{"format": ' + "9" * 100_000 + "}"),
        lambda path: path.write_text('{"format": 3, "machine": Infinity}'),
        lambda path: path.write_bytes(b"\xff\xfe{\0"),
    ],
    ids=["folder", "pipe", "endless", "loop", "dangling", "100 MB", "too large", "empty", "deep", "digits", "infinite",
         "utf-16"],
)  # fmt: skip
def test_whatever_is_in_place_of_a_cost_table_counts_for_nothing(tmp_path, put):
    path = tmp_path / "x.json"
    put(path)
    found = machine()
    assert not recall(path, found)
    assert found.as_dict() == machine().as_dict()
    if not path.is_dir():
        assert keep(path, machine(0.01)) is None
        assert recall(path, found)


def test_a_link_in_place_of_a_cost_table_is_replaced_not_followed(tmp_path):
    path, precious = tmp_path / "x.json", tmp_path / "precious"
    precious.write_text("mine")
    path.symlink_to(precious)
    assert keep(path, machine(0.01)) is None
    assert (precious.read_text(), path.is_symlink()) == ("mine", False)


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may read everything")
def test_a_cost_table_without_the_right_to_read_it(tmp_path):
    path = tmp_path / "x.json"
    keep(path, machine(0.01))
    path.chmod(0)
    assert not recall(path, machine())


def test_a_table_with_a_list_that_is_too_short_counts_for_nothing(tmp_path):
    path = tmp_path / "x.json"
    keep(path, machine(0.01))
    table = json.loads(path.read_text())
    table["machine"]["costs"]["0"]["target"]["seen"]["2"].pop()
    path.write_text(json.dumps(table))
    assert not recall(path, machine())


@pytest.mark.parametrize("worth", [(0.0, 1.0, 0.0), (1e-300, 1.0, 0.0), (1.0, 1e-300, 0.0), (0.0, 0.0, -1e9)])
def test_a_table_that_would_divide_by_zero_counts_for_nothing(tmp_path, worth):
    path = tmp_path / "x.json"
    made = machine(0.01)
    made.worth("0").tokens, made.worth("0").cost, made.worth("0").lost = worth
    keep(path, made)
    assert not recall(path, machine())


# ---- memory -----------------------------------------------------------------------------------------------


@pytest.fixture
def freed(monkeypatch):
    """What was made and not freed, while this is in use."""
    from eagle3_cli.llama import lib

    living: list[tuple[str, int]] = []
    address = lambda handle: ctypes.cast(handle, ctypes.c_void_p).value  # noqa: E731

    def making(kind, make):
        def made(*args):
            handle = make(*args)
            if handle:
                living.append((kind, address(handle)))
            return handle

        return made

    def freeing(kind, free):
        def gone(handle):
            living.remove((kind, address(handle)))
            free(handle)

        return gone

    for kind, make, free in (
        ("model", "llama_model_load_from_file", "llama_model_free"),
        ("context", "llama_init_from_model", "llama_free"),
    ):
        monkeypatch.setattr(lib, make, making(kind, getattr(lib, make)))
        monkeypatch.setattr(lib, free, freeing(kind, getattr(lib, free)))
    return living


def failing(monkeypatch, name: str, at: int) -> list[int]:
    """Let a function of llama.cpp return NULL from its call number `at` on, the first being 0; one item per call."""
    from eagle3_cli.llama import lib

    make, made = getattr(lib, name), []

    def fail(*args):
        made.append(1)
        return make(*args) if len(made) <= at else None

    monkeypatch.setattr(lib, name, fail)
    return made


@pytest.mark.parametrize("at", range(3))
def test_a_context_that_cannot_be_made_frees_what_was(open_engine, monkeypatch, freed, at):
    """The target's, the drafter's encoder's, the drafter's."""
    made = failing(monkeypatch, "llama_init_from_model", at)
    with pytest.raises(LlamaError, match=r"could not make a context of .* cells"):
        open_engine("good")
    assert (len(made), freed) == (at + 1, [])


@pytest.mark.parametrize("at", range(2))
def test_a_model_that_cannot_be_loaded_frees_what_was(open_engine, monkeypatch, freed, at):
    loaded = failing(monkeypatch, "llama_model_load_from_file", at)
    with pytest.raises(FileError, match=r"llama\.cpp cannot load it"):
        open_engine("good")
    assert (len(loaded), freed) == (at + 1, [])


LITTLE = """
import resource, sys
from eagle3_cli.__main__ import run
import eagle3_cli.engine
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + (int(sys.argv[1]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(run(sys.argv[2:]))
"""


def with_little_memory(environment, tiny_target, tiny_drafters, megabytes, *flags):
    """The answer of a child that may use so many megabytes more than it does after its imports."""
    pair = ["--target", str(tiny_target.path), "--draft", str(tiny_drafters["good"].path), "--draft-tokens", "8"]
    args = ["generate", "-p", "hi", "-n", "4", "--temp", "0", "--threads", "1", *pair, *flags]
    return subprocess.run(
        [sys.executable, "-c", LITTLE, str(megabytes), *args], capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=60, env={**environment, "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="Linux only")
def test_a_context_larger_than_the_memory_is_one_message(environment, tiny_target, tiny_drafters):
    result = with_little_memory(environment, tiny_target, tiny_drafters, 500, "--ctx-size", str(2**23))
    assert (result.returncode, result.stdout) == (1, "")
    assert one_message(result.stderr).startswith("target: llama.cpp could not make a context of 8388608 cells: ")
    assert "hint: Try a smaller --ctx-size" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512])
def test_with_little_memory_an_answer_comes_or_a_message(environment, tiny_target, tiny_drafters, megabytes):
    """The message is ours unless one of llama.cpp's small allocations fails, where it ends the process."""
    result = with_little_memory(environment, tiny_target, tiny_drafters, megabytes)
    assert (result.stdout == "") == (result.returncode != 0)
    if result.returncode == -signal.SIGABRT:
        assert "GGML_ASSERT(ctx->mem_buffer != NULL)" in result.stderr
    elif result.returncode:
        assert result.returncode in (1, 2)
        one_message(result.stderr)


def test_too_little_memory_for_python_is_one_message(eagle3):
    eagle3.load_error = MemoryError()
    result = eagle3("generate", "x")
    assert (result.code, result.out, one_message(result.err)) == (1, "", "there is not enough memory.")


# ---- docs/reliability.md ----------------------------------------------------------------------------------


def test_every_test_that_the_document_names_exists():
    root = Path(__file__).parents[2]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "docs" / "reliability.md").read_text("utf-8"))
    assert len(named) > 50
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (root / file).read_text("utf-8")]
    assert missing == []
