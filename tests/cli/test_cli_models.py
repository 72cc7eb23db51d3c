"""`eagle3 models`: names for pairs, where they are kept, and what `--target NAME` does."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_cli import registry
from eagle3_cli.errors import Eagle3Error, FileError, InputError
from eagle3_cli.registry import Registered


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The configuration folder of this test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "eagle3"


@pytest.fixture
def known():
    """Three models: with a drafter, with n-gram matches alone, with neither."""
    with registry.changed() as models:
        models["llama"] = Registered("/m/llama.gguf", "/m/draft.gguf")
        models["qwen"] = Registered("/m/qwen.gguf", "lookup")
        models["plain"] = Registered("/m/plain.gguf", None)


def pair_of(eagle3, *flags):
    result = eagle3("generate", "hi", *flags)
    assert result.code == 0, result.err
    pair = eagle3.engine.pair
    return str(pair.target), pair.draft and str(pair.draft)


# ---- add, list, remove ----


def test_a_pair_that_fits_is_added_with_absolute_paths(eagle3, monkeypatch, tiny_target, tiny_drafters, folder):
    monkeypatch.chdir(tiny_target.path.parent)
    drafter = tiny_drafters["good"].path
    result = eagle3("models", "add", "tiny", "--target", tiny_target.path.name, "--draft", drafter.name)
    assert (result.code, result.out) == (0, f"tiny: {tiny_target.path}, drafter {drafter}\n")
    assert json.loads((folder / "models.json").read_text()) == {
        "format": 1,
        "models": {"tiny": {"target": str(tiny_target.path), "draft": str(drafter)}},
    }


def test_a_pair_that_does_not_fit_is_not_added(eagle3, tiny_target, tiny_drafters, folder):
    good = tiny_drafters["good"].path
    for flags, words in (
        (["--target", str(good), "--draft", str(good)], "is an EAGLE-3 drafter, but was given as the target"),
        (["--target", str(tiny_target.path), "--draft", str(tiny_target.path)], "is no EAGLE-3 drafter"),
        (["--target", "/no/such.gguf", "--no-draft"], "/no/such.gguf: no such file"),
        (["--target", str(tiny_target.path)], "--target: no drafter for this model"),
        (["--target", "t", "--no-draft", "--draft", "d"], "--no-draft: cannot be used with --draft"),
    ):
        result = eagle3("models", "add", "tiny", *flags)
        assert (result.code, result.out) == (2, "")
        assert words in result.err
    assert not folder.exists()


def test_a_name_is_replaced_only_by_force(eagle3, known, tiny_target):
    flags = ("models", "add", "llama", "--target", str(tiny_target.path), "--draft", "lookup")
    refused = eagle3(*flags)
    assert (refused.code, refused.out) == (2, "")
    assert "llama: there is a model of this name, /m/llama.gguf." in refused.err
    assert registry.find("llama").target == "/m/llama.gguf"
    assert eagle3(*flags, "--force").code == 0
    assert registry.find("llama") == Registered(str(tiny_target.path), "lookup")


@pytest.mark.parametrize("name", ["", "Llama", "-x", ".x", "a/b", "a b", "x.gguf", "lookup", "x" * 65, "ü"])
def test_what_is_no_name_is_refused(eagle3, name):
    assert not registry.is_name(name)
    result = eagle3("models", "add", "--target", "t.gguf", "--no-draft", "--", name)
    assert (result.code, result.out) == (2, "")


@pytest.mark.parametrize("name", ["a", "llama-3.1-8b", "0", "x" * 64, "q4_k_m", "a..b"])
def test_what_is_a_name(name):
    assert registry.is_name(name)


def test_list_shows_every_model_and_what_is_missing(eagle3, known, tiny_target):
    with registry.changed() as models:
        models["there"] = Registered(str(tiny_target.path), None)
    lines = eagle3("models", "list").out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "llama", "plain", "qwen", "there"]
    assert lines[1].split() == ["llama", "/m/llama.gguf", "/m/draft.gguf", "missing"]
    assert "missing" not in lines[4]
    found = json.loads(eagle3("models", "list", "--json").out)
    assert found["models"][0] == {
        "name": "llama", "target": "/m/llama.gguf", "draft": "/m/draft.gguf",
        "missing": ["/m/llama.gguf", "/m/draft.gguf"],
    }  # fmt: skip
    assert found["models"][1]["missing"] == ["/m/plain.gguf"]


def test_an_empty_list_prints_nothing_on_stdout(eagle3):
    result = eagle3("models", "list")
    assert (result.code, result.out, result.err) == (0, "", "")
    assert json.loads(eagle3("models", "list", "--json").out)["models"] == []


def test_remove_forgets_all_names_or_none(eagle3, known):
    result = eagle3("models", "remove", "llama", "lama")
    assert (result.code, result.out) == (2, "")
    assert "lama: no model is registered under this name." in result.err
    assert "There are llama, plain, qwen." in result.err
    assert set(registry.read()) == {"llama", "plain", "qwen"}
    assert eagle3("models", "remove", "llama", "qwen").code == 0
    assert set(registry.read()) == {"plain"}


# ---- where a pair is taken ----


def test_a_name_takes_its_drafter_along(eagle3, known):
    assert pair_of(eagle3, "--target", "llama") == ("/m/llama.gguf", "/m/draft.gguf")
    assert pair_of(eagle3, "--target", "qwen") == ("/m/qwen.gguf", None)
    assert eagle3.engine.pair.lookup
    assert eagle3.engine.pair.no_draft is None
    assert pair_of(eagle3, "--target", "plain") == ("/m/plain.gguf", None)
    assert eagle3.engine.pair.no_draft == "plain is registered without a drafter"


def test_draft_and_no_draft_are_stronger_than_what_is_registered(eagle3, known):
    assert pair_of(eagle3, "--target", "llama", "--draft", "e.gguf") == ("/m/llama.gguf", "e.gguf")
    assert pair_of(eagle3, "--target", "llama", "--no-draft") == ("/m/llama.gguf", None)
    assert eagle3.engine.pair.no_draft == "--no-draft"
    assert pair_of(eagle3, "--target", "plain", "--draft", "e.gguf") == ("/m/plain.gguf", "e.gguf")


def test_a_name_from_the_configuration_file_is_one_too(eagle3, known, monkeypatch, tmp_path):
    (tmp_path / "c.toml").write_text('target = "qwen"\ndraft = "other.gguf"\n')
    monkeypatch.setenv("EAGLE3_CONFIG", str(tmp_path / "c.toml"))
    assert pair_of(eagle3) == ("/m/qwen.gguf", "other.gguf")
    assert pair_of(eagle3, "--target", "llama") == ("/m/llama.gguf", "/m/draft.gguf")


def test_a_name_wins_over_a_file_and_a_path_is_always_the_file(eagle3, known, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").touch()
    assert pair_of(eagle3, "--target", "llama") == ("/m/llama.gguf", "/m/draft.gguf")
    assert pair_of(eagle3, "--target", "./llama", "--no-draft") == ("llama", None)
    assert pair_of(eagle3, "--target", str(tmp_path / "llama"), "--no-draft") == (str(tmp_path / "llama"), None)


def test_a_file_without_an_ending_needs_no_name(eagle3, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").touch()
    assert pair_of(eagle3, "--target", "model", "--no-draft") == ("model", None)


def test_an_unknown_name_is_bad_input(eagle3, known):
    result = eagle3("generate", "hi", "--target", "lama")
    assert (result.code, result.out) == (2, "")
    assert "--target lama: no such file, and no model is registered under this name." in result.err
    assert not eagle3.engines


def test_a_flag_without_effect_on_a_registered_pair_is_refused(eagle3, known):
    for name, flag in (("qwen", "--draft-width"), ("plain", "--draft-depth")):
        result = eagle3("generate", "hi", "--target", name, flag, "3")
        assert (result.code, result.out) == (2, "")
        assert f"{flag}: has no effect with" in result.err


def test_convert_inspect_and_train_take_a_registered_target(eagle3, known, monkeypatch):
    seen = []

    def look(source, target):
        seen.append(target)
        raise FileError("enough.")

    monkeypatch.setattr("eagle3_cli.inspection.inspect", look)
    monkeypatch.setattr("eagle3_cli.convert.convert", lambda settings, progress: look(None, settings.target))
    monkeypatch.setattr("eagle3_cli.train.train", lambda settings, hooks: look(None, settings.target))
    for args in (["inspect", "d.gguf"], ["convert", "c", "-o", "o"], ["train", "-o", "o"]):
        assert eagle3(*args, "--target", "llama").code == 2
    assert seen == [Path("/m/llama.gguf")] * 3


def test_a_command_without_a_name_does_not_read_the_list(eagle3, folder):
    folder.mkdir(parents=True)
    (folder / "models.json").write_text("{")
    assert pair_of(eagle3, "--target", "t.gguf", "--no-draft") == ("t.gguf", None)
    result = eagle3("generate", "hi", "--target", "llama")
    assert (result.code, result.out) == (2, "")
    assert f"{folder / 'models.json'}: expected JSON: " in result.err


# ---- the file ----

MODELS = '"models": {"a": {"target": "/t", "draft": null}}'
WRONG = [
    ("", "expected JSON: "),
    (b"\xff", "expected JSON: "),
    ("[" * 100_000, "expected JSON: "),
    (" " * (1 << 20) + "{}", "expected JSON: expected at most 1 MiB"),
    ("[]", 'expected {"format": 1, "models": {...}}'),
    ('{"format": 1}', 'expected {"format": 1, "models": {...}}'),
    (f'{{"format": 2, {MODELS}}}', "expected format 1, got 2."),
    (f"{{{MODELS}}}", "expected format 1, got null."),
    ('{"format": 1, "models": {"A": {}}}', "A: expected the name of a model."),
    ('{"format": 1, "models": {"a": []}}', "a: expected the keys target and draft."),
    ('{"format": 1, "models": {"a": {"target": "/t"}}}', "a: expected the keys target and draft."),
    ('{"format": 1, "models": {"a": {"target": 5, "draft": null}}}', "a: target: expected an absolute path, got 5."),
    ('{"format": 1, "models": {"a": {"target": "t", "draft": null}}}', "a: target: expected an absolute path"),
    ('{"format": 1, "models": {"a": {"target": "/t", "draft": "d"}}}', "a: draft: expected an absolute path"),
    ('{"format": 1, "models": {"a": {"target": "/t", "draft": []}}}', "a: draft: expected an absolute path"),
]


@pytest.mark.parametrize(("content", "words"), WRONG, ids=[str(content)[:40] for content, _ in WRONG])
def test_a_damaged_list_is_one_message_and_is_not_overwritten(eagle3, folder, content, words, tiny_target):
    folder.mkdir(parents=True)
    path = folder / "models.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    for args in (["list"], ["remove", "a"], ["add", "b", "--target", str(tiny_target.path), "--no-draft"]):
        result = eagle3("models", *args)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith(f"error: {path}: {words}")
    assert path.read_bytes() == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/.", max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.fixed_dictionaries({"format": st.just(1) | JSON, "models": st.dictionaries(st.text("abA", max_size=3), JSON)})
)
def test_no_list_does_anything_but_work_or_fail_with_a_message(value):
    try:
        found = registry._models(Path("models.json"), value)
    except FileError:
        return
    assert all(registry.is_name(name) and Path(model.target).is_absolute() for name, model in found.items())


def test_what_goes_wrong_in_between_changes_nothing(known):
    def half():
        with registry.changed() as models:
            models.clear()
            raise InputError("stop")

    with pytest.raises(InputError):
        half()
    assert len(registry.read()) == 3


def test_a_folder_that_cannot_be_written_is_one_message(eagle3, monkeypatch, tmp_path, tiny_target):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    result = eagle3("models", "add", "a", "--target", str(tiny_target.path), "--no-draft")
    assert (result.code, result.out) == (2, "")
    assert "models.json: cannot be written: Not a directory." in result.err
    assert registry.read() == {}


def test_without_a_home_there_are_no_models(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert registry.read() == {}
    with pytest.raises(Eagle3Error, match="cannot be written"), registry.changed():
        pass


def test_a_path_in_any_encoding_comes_back(known):
    odd = "/m/\udcff.gguf"  # what Python makes of a byte that is no UTF-8
    with registry.changed() as models:
        models["odd"] = Registered(odd, None)
    assert registry.find("odd").target == odd


def _add(names: list[str]) -> None:
    for name in names:
        with registry.changed() as models:
            models[name] = Registered(f"/m/{name}", None)


def test_processes_that_add_at_once_lose_nothing(folder):
    names = [[f"{who}-{i}" for i in range(12)] for who in "abc"]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add, args=(each,)) for each in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert set(registry.read()) == {name for each in names for name in each}
    assert sorted(path.name for path in folder.iterdir()) == ["models.json", "models.lock"]
