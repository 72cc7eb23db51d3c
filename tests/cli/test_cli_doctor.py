"""`eagle3 doctor`: what is found, what is said of it, and the exit code; `--version` beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiny

from eagle3_cli import devices, doctor, machine, needs, registry
from eagle3_cli.doctor import ADVICE, OK, PROBLEM, Finding
from eagle3_cli.errors import LlamaError
from eagle3_cli.machine import Memory
from eagle3_cli.needs import Sizes
from eagle3_cli.registry import Registered
from eagle3_cli.settings import PairSettings, RuntimeSettings

GB = 10**9


@pytest.fixture(autouse=True)
def calm(monkeypatch, tmp_path):
    """A machine with nothing to do, and folders of this test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(machine, "load", lambda: 0.0)
    monkeypatch.setattr(machine, "quota", lambda: None)


@pytest.fixture
def cache(eagle3, monkeypatch, tmp_path):
    """The cache folder; after `eagle3`, which takes the variables away."""
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pair(tiny_target, tiny_drafters):
    return ("--target", str(tiny_target.path), "--draft", str(tiny_drafters["good"].path))


def findings(eagle3, *flags, code=0):
    """name -> finding, of the JSON document."""
    result = eagle3("doctor", "--json", *flags)
    assert (result.code, result.err) == (code, "")
    document = json.loads(result.out)
    assert document["ok"] is (code == 0)
    return {each["name"]: each for each in document["findings"]}


# ---- the command ----


def test_all_is_well(eagle3, cache, pair):
    eagle3.script = [["a"] * 5] * 4
    result = eagle3("doctor", *pair)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    names = [line[9:].partition(":")[0] for line in lines if line[:1] != " "][:-1]
    assert names == ["llama.cpp", "configuration", "models", "cache", "device", "threads", "kernels", "huge pages",
                     "pair", "flash attention", "memory", "speed"]  # fmt: skip
    assert lines[-1].startswith("all is well")
    assert not any(line.startswith("problem") for line in lines)


def test_the_pair_is_measured_drafted_and_plain_each_after_an_answer_to_warm_up(eagle3, cache, pair):
    eagle3.script = [["a"] * n for n in (3, 8, 3, 4)]
    speed = findings(eagle3, *pair)["speed"]
    drafted, plain = eagle3.engines
    assert (drafted.pair.draft is not None, plain.pair.draft, plain.pair.lookup) == (True, None, False)
    assert [len(engine.prompts) for engine in eagle3.engines] == [2, 2]
    assert drafted.closed
    assert plain.closed
    assert speed["numbers"] == {"plain": 4 / 0.25, "drafted": 8 / 0.25}
    assert speed["said"] == "plain 16.0 tokens/s, drafted 32.0 tokens/s, 2.00 times as fast"


def test_whether_the_machine_is_busy_is_asked_before_it_is_measured(eagle3, cache, monkeypatch, pair):
    monkeypatch.setattr(machine, "load", lambda: 0.0 if eagle3.engines else 64.0)
    assert "measure again" in findings(eagle3, *pair)["speed"]["remedy"]
    monkeypatch.setattr(machine, "load", lambda: 64.0 if len(eagle3.engines) > 2 else 0.0)
    assert "measure again" not in str(findings(eagle3, *pair)["speed"]["remedy"])


def test_without_a_drafter_only_plain_decoding_is_measured(eagle3, cache, tiny_target):
    speed = findings(eagle3, "--target", str(tiny_target.path), "--no-draft")["speed"]
    assert len(eagle3.engines) == 1
    assert "nothing drafted" in speed["said"]


def test_no_speed_loads_nothing(eagle3, cache, pair):
    assert "speed" not in findings(eagle3, "--no-speed", *pair)
    assert not eagle3.engines


def test_an_engine_that_does_not_load_is_a_problem(eagle3, cache, pair):
    eagle3.load_error = LlamaError("target: no context.", "Try less.")
    speed = findings(eagle3, *pair, code=1)["speed"]
    assert (speed["status"], speed["said"], speed["remedy"]) == (PROBLEM, "target: no context.", "Try less.")


def test_a_pair_that_does_not_fit_is_a_problem_and_is_not_loaded(eagle3, cache, tiny_target):
    found = findings(eagle3, "--target", str(tiny_target.path), "--draft", str(tiny_target.path), code=1)
    assert found["pair"]["status"] == PROBLEM
    assert "is no EAGLE-3 drafter" in found["pair"]["said"]
    assert not {"speed", "memory"} & found.keys()
    assert not eagle3.engines


def test_a_missing_demo_pair_is_a_problem(eagle3, cache, monkeypatch):
    from eagle3_cli.errors import FileError

    def absent():
        raise FileError("demo model: absent.", "pip install")

    monkeypatch.setattr("eagle3_cli.demo.demo_target", absent)
    assert findings(eagle3, code=1)["pair"]["remedy"] == "pip install"


def test_bad_usage_is_no_finding(eagle3, cache):
    result = eagle3("doctor", "--draft-tokens", "999")
    assert (result.code, result.out) == (2, "")
    assert "--draft-tokens: expected" in result.err


def test_a_broken_configuration_file_is_a_problem_here_and_the_rest_is_told(eagle3, cache, monkeypatch, tmp_path, pair):
    path = tmp_path / "c.toml"
    path.write_text("[train]\nepochs = 'two'\n")
    monkeypatch.setenv("EAGLE3_CONFIG", str(path))
    found = findings(eagle3, "--no-speed", *pair, code=1)
    assert found["configuration"]["said"] == f"{path}: [train] epochs: expected a number, got 'two'."
    assert found["memory"]["status"] == OK
    path.write_text("=")
    assert findings(eagle3, "--no-speed", *pair, code=1)["configuration"]["status"] == PROBLEM
    path.write_text("threads = 1\n")
    found = findings(eagle3, "--no-speed", *pair)
    assert found["configuration"]["said"] == str(path)
    assert found["threads"]["said"].startswith("1 of ")


def test_a_registered_model_is_examined_by_its_name(eagle3, cache, tiny_target, tiny_drafters):
    with registry.changed() as models:
        models["tiny"] = Registered(str(tiny_target.path), str(tiny_drafters["good"].path))
        models["gone"] = Registered("/no/such.gguf", None)
    found = findings(eagle3, "--no-speed", "--target", "tiny")
    assert found["pair"]["said"] == "target.gguf: fits good.gguf"
    assert (found["models"]["status"], found["models"]["said"]) == (ADVICE, "files of gone are no longer there")
    assert "eagle3 models remove gone" in found["models"]["remedy"]


def test_a_damaged_list_of_models_is_a_problem(eagle3, cache, pair, tmp_path):
    (tmp_path / "config" / "eagle3").mkdir(parents=True)
    (tmp_path / "config" / "eagle3" / "models.json").write_text("{")
    assert findings(eagle3, "--no-speed", *pair, code=1)["models"]["status"] == PROBLEM


def test_a_broken_llama_cpp_is_said_and_nothing_else_is_tried(eagle3, cache, monkeypatch, pair):
    def broken():
        raise OSError("libllama.so: cannot open")

    monkeypatch.setattr("eagle3_cli.llama.system_info", broken)
    found = findings(eagle3, *pair, code=1)
    assert "cannot be loaded (OSError: libllama.so: cannot open)" in found["llama.cpp"]["said"]
    assert list(found) == ["llama.cpp", "configuration", "models", "cache"]
    assert "llama.cpp: cannot be loaded" in eagle3("--version").out


def test_a_remedy_stands_under_its_finding(eagle3, cache, monkeypatch, pair):
    monkeypatch.setattr(machine, "load", lambda: 64.0)
    lines = eagle3("doctor", "--no-speed", *pair).out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("advice   threads: "))
    assert lines[at + 1].startswith("         Other programs keep the processors busy")


# ---- single findings ----


def test_the_cache_can_be_written_or_it_is_a_problem(tmp_path):
    folder = tmp_path / "cache"
    assert doctor.cache(folder).status == OK
    (folder / "a.json").touch()
    assert doctor.cache(folder).said == f"{folder}, cost tables of 1 pair"
    assert [path.name for path in folder.iterdir()] == ["a.json"]
    (tmp_path / "file").touch()
    found = doctor.cache(tmp_path / "file" / "x")
    assert found.status == PROBLEM
    assert "EAGLE3_CACHE names another folder" in found.remedy


@pytest.mark.parametrize(
    ("used", "physical", "limit", "load", "words"),
    [
        (4, 4, None, None, None),
        (4, 4, 4.0, 1.9, None),
        (4, 4, 1.5, None, "give --threads 1"),
        (4, 4, 0.5, None, "give --threads 1"),
        (8, 4, None, None, "give --threads 4"),
        (4, 4, None, 2.1, "Other programs"),
    ],
)
def test_advice_about_threads(used, physical, limit, load, words):
    status, remedy = doctor.threads_advice(used, physical, limit, load)
    assert (status, remedy is None) == ((OK, True) if words is None else (ADVICE, False))
    assert words is None or words in remedy


@pytest.mark.parametrize(
    ("chosen", "mmap", "backend", "status"),
    [("always", False, "cpu", OK), ("madvise", True, "cpu", OK), ("never", False, "cpu", ADVICE),
     ("never", False, "CUDA0", OK), (None, False, "cpu", OK)],
)  # fmt: skip
def test_advice_about_huge_pages(monkeypatch, chosen, mmap, backend, status):
    monkeypatch.setattr(machine, "large_pages", lambda: chosen)
    assert doctor.pages(RuntimeSettings(mmap=mmap), backend).status == status


def test_memory_that_does_not_suffice_is_a_problem(monkeypatch, tiny_target, tiny_drafters):
    settings = PairSettings(tiny_target.path, tiny_drafters["good"].path)
    runtime = RuntimeSettings(ctx_size=512)
    for available, status in ((GB, OK), (100_000_000, PROBLEM), (None, OK)):
        monkeypatch.setattr(machine, "memory", lambda available=available: Memory(2 * GB, available))
        found = doctor.memory(settings, runtime, "cpu")
        assert found.status == status
        assert found.numbers["free"] == available
        assert (found.remedy is not None) == (status == PROBLEM)


def test_memory_of_a_gpu_is_that_of_the_device(monkeypatch, tiny_target):
    gpu = devices.Device("CUDA0", "a GPU", True, 50_000_000, GB)
    monkeypatch.setattr(devices, "devices", lambda: [gpu])
    settings = PairSettings(tiny_target.path, None)
    found = doctor.memory(settings, RuntimeSettings(), "CUDA0")
    assert (found.status, found.numbers["free"]) == (PROBLEM, 50_000_000)
    assert "--gpu-layers" in found.remedy
    assert doctor.memory(settings, RuntimeSettings(gpu_layers=1), "CUDA0").status == OK


@pytest.mark.parametrize(
    ("plain", "drafted", "drafts", "status", "words"),
    [
        (10.0, 15.0, True, OK, "1.50 times as fast"),
        (10.0, 10.1, True, ADVICE, "1.01 times as fast"),
        (10.0, 8.0, True, ADVICE, "0.80 times as fast"),
        (10.0, None, False, OK, "nothing drafted"),
        (10.0, None, True, OK, "too short"),
        (None, None, True, OK, "too short"),
    ],
)
def test_what_is_said_of_speed(plain, drafted, drafts, status, words):
    found = doctor.speed(plain, drafted, drafts)
    assert found.status == status
    assert words in found.said
    assert found.numbers == {"plain": plain, "drafted": drafted}


def test_numbers_of_a_busy_machine_are_no_reason_to_change_anything():
    found = doctor.speed(10.0, 1.0, True, disturbed=True)
    assert found.status == ADVICE
    assert "measure again" in found.remedy


def test_flash_attention_is_told_and_advised_against_on_a_cpu():
    assert doctor.flash_attention(RuntimeSettings(), "cpu").said == "auto, here off"
    assert doctor.flash_attention(RuntimeSettings(flash_attn="on"), "cpu").status == ADVICE
    assert doctor.flash_attention(RuntimeSettings(flash_attn="on"), "CUDA0").status == OK


def test_a_device_that_is_not_there_is_a_problem(monkeypatch):
    found, backend = doctor.device(RuntimeSettings(device="cuda"))
    assert (found.status, backend) == (PROBLEM, "cpu")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    found, _ = doctor.device(RuntimeSettings())
    assert found.status == ADVICE
    assert "-DGGML_CUDA=on" in found.remedy
    assert doctor.device(RuntimeSettings(device="cpu"))[0].status == OK


def test_the_verdict_counts():
    fine, hint, bad = Finding("a", "x"), Finding("b", "x", ADVICE, "y"), Finding("c", "x", PROBLEM, "y")
    assert doctor.verdict([fine]) == "all is well"
    assert doctor.verdict([fine, hint]) == "all is well, 1 piece of advice"
    assert doctor.verdict([bad, hint, hint]) == "1 problem, 2 pieces of advice"
    assert doctor.verdict([bad, bad]) == "2 problems"


# ---- how much memory ----

SMALL = Sizes(2, 64, 4, (2, 1), 16, 8, 128, 1000, 2048)


def test_the_cache_holds_keys_and_values_of_every_layer():
    assert needs.cache_bytes(SMALL, 100, "f16", "f32") == 100 * (2 + 1) * (16 * 2 + 8 * 4)
    assert needs.cache_bytes(SMALL, 32, "q8_0", "q4_0") == round(32 * 3 * (16 * 34 / 32 + 8 * 18 / 32))


def test_scores_take_room_unless_it_is_flash_attention():
    rows, cells = 10, 512
    more = needs.working_bytes(SMALL, cells, rows, flash=False) - needs.working_bytes(SMALL, cells, rows, flash=True)
    assert more == 4 * rows * cells * SMALL.heads


def test_sizes_are_those_of_the_header(tiny_target, tiny_drafters):
    sizes = needs.read_sizes(tiny_target.path)
    config = tiny.TARGET
    assert (sizes.layers, sizes.width, sizes.heads) == (config.layers, config.width, config.heads)
    assert sizes.kv_heads == (config.kv_heads,) * config.layers
    assert (sizes.key, sizes.value, sizes.feed_forward) == (config.head_dim, config.head_dim, config.ffn)
    assert sizes.vocabulary == tiny.VOCAB
    assert needs.read_sizes(tiny_drafters["good"].path).layers == 1


@pytest.mark.parametrize(("heads", "kv_heads"), [(0, None), (None, None), (4, [0])])
def test_layers_without_attention_need_no_cache(tmp_path, heads, kv_heads):
    keys = {"llama__attention__head_count": heads, "llama__attention__head_count_kv": kv_heads}
    model = tiny.write_target(tmp_path / "recurrent.gguf", **keys)
    assert needs.cache_bytes(needs.read_sizes(model.path), 512, "f16", "f16") == 0


def test_a_pair_needs_more_than_its_target_and_a_longer_context_more_still(tiny_target, tiny_drafters):
    alone = needs.of_pair(PairSettings(tiny_target.path, None), RuntimeSettings(ctx_size=512), False)
    both = PairSettings(tiny_target.path, tiny_drafters["good"].path)
    short, long = (needs.of_pair(both, RuntimeSettings(ctx_size=cells), False) for cells in (512, 2048))
    assert alone.total < short.total < long.total
    assert short.weights == tiny_target.path.stat().st_size + tiny_drafters["good"].path.stat().st_size == long.weights


# ---- the machine, from what Linux says ----


def test_memory_is_what_the_system_says_within_a_container():
    found = machine.memory_of("MemTotal:  1000 kB\nMemFree: 5 kB\nMemAvailable:   600 kB\n")
    assert found == Memory(1_024_000, 614_400)
    assert machine.limited(found, "max\n", "5", "") == found
    assert machine.limited(found, "500000\n", "200000", "anon 5\n") == Memory(500_000, 300_000)
    assert machine.limited(found, "500000", "400000", "active_file 100000\ninactive_file 50000\n") == Memory(
        500_000, 250_000
    )
    assert machine.limited(found, "9000000", "0", "") == found
    assert machine.limited(found, "100", "900", "") == Memory(100, 0)
    assert machine.limited(Memory(), "100", "", "") == Memory(100, 100)


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("5", None), ("5 0", None), ("x y", None)],
)
def test_quota_of_a_container(text, limit):
    assert machine.quota_of(text) == limit


def test_processor_name():
    assert machine.processor_name("processor: 0\nmodel name\t: A Chip: 5\nmodel name\t: B\n") == "A Chip: 5"
    assert machine.processor_name("processor: 0\n") == ""


def test_sizes_in_words():
    assert (machine.size(14_800_000), machine.size(1_250_000_000)) == ("14.8 MB", "1.25 GB")
    assert machine.in_words(Memory()) == "unknown"
    assert machine.in_words(Memory(2 * GB, GB)) == "2.00 GB, 1.00 GB available"


def test_the_library_names_backends_and_devices():
    assert "CPU" in devices.backends()
    assert any(device.name == "CPU" and not device.is_gpu and device.total > 0 for device in devices.devices())


# ---- --version ----


def test_version_names_machine_build_and_files(eagle3, cache, monkeypatch, tmp_path):
    said = eagle3("--version").out
    names = [line.partition(":")[0] for line in said.splitlines()]
    assert names[0].startswith("eagle3 ")
    for name in ("python", "platform", "system", "processor", "cores", "memory", "llama-cpp-python", "llama.cpp",
                 "build", "backends"):  # fmt: skip
        assert name in names
    assert f"cache: {cache}\n" in said
    assert f"config: none ({tmp_path / 'config' / 'eagle3' / 'config.toml'} is not there)\n" in said
    monkeypatch.setenv("EAGLE3_CONFIG", "mine.toml")
    assert "config: mine.toml\n" in eagle3("--version").out


def test_an_older_library_without_a_version_is_no_error(monkeypatch):
    def absent(*_):
        raise LlamaError("llama.cpp: the installed library does not export it.")

    monkeypatch.setattr(devices, "function", absent)
    assert devices.build() == ""


def test_what_the_system_does_not_tell_is_no_error(monkeypatch):
    monkeypatch.setattr(machine, "MEMINFO", Path("/no/such"))
    monkeypatch.setattr(machine, "CGROUP", Path("/no/such"))
    monkeypatch.setattr(machine, "LARGE_PAGES", Path("/no/such"))
    assert machine.memory().available is None
    assert machine.large_pages() is None
    assert machine.allowed_cores() >= 1
    if sys.platform == "linux":
        assert machine.processor()
