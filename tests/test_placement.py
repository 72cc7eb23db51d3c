"""Which GPUs a pair is on, and which tensors stay elsewhere.  A build for the CPU has one kind of memory, so what is
about GPUs is checked up to what llama.cpp is told."""

from __future__ import annotations

import ctypes

import pytest
import tiny

from eagle3_cli import llama
from eagle3_cli.engine import load_engine
from eagle3_cli.errors import BackendError, FileError, OptionError
from eagle3_cli.llama import choose_devices, lib
from eagle3_cli.placement import Placement, buffers, placement
from eagle3_cli.settings import EVERY_LAYER, Limits, PairSettings, RuntimeSettings, SamplingSettings

GPUS = {"CUDA0": 11, "CUDA1": 12, "MTL0": 13}


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(llama, "gpu_devices", lambda: dict(GPUS))


def runtime(**fields) -> RuntimeSettings:
    return RuntimeSettings(ctx_size=64, threads=1, **fields)


# --- devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ([11, 12, 13], -1, "CUDA0,CUDA1,MTL0")),
        ({"device": "cuda"}, ([11, 12], -1, "CUDA0,CUDA1")),
        ({"device": "metal", "gpu_layers": 7}, ([13], 7, "MTL0")),
        ({"device": "CUDA1"}, ([12], -1, "CUDA1")),
        ({"device": "MTL0,CUDA0"}, ([13, 11], -1, "MTL0,CUDA0")),
        ({"split_mode": "none"}, ([11], -1, "CUDA0")),
        ({"split_mode": "none", "main_gpu": 2}, ([13], -1, "MTL0")),
        ({"device": "cuda", "split_mode": "none", "main_gpu": 1}, ([12], -1, "CUDA1")),
        ({"split_mode": "row", "main_gpu": 1}, ([11, 12, 13], -1, "CUDA0,CUDA1,MTL0")),
        ({"device": "cpu"}, ([], 0, "cpu")),
        ({"gpu_layers": 0}, ([11, 12, 13], 0, "cpu")),
    ],
)
def test_the_devices_of_the_settings(gpus, fields, expected):
    assert choose_devices(runtime(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"device": "CUDA2"}, BackendError, "expected GPUs among CUDA0, CUDA1, MTL0, got CUDA2"),
        ({"device": "CUDA0,Vulkan0"}, BackendError, "got Vulkan0"),
        ({"split_mode": "none", "main_gpu": 3}, OptionError, "--main-gpu 3: expected 0 to 2"),
        ({"device": "CUDA1", "split_mode": "none", "main_gpu": 1}, OptionError, "--main-gpu 1: expected 0 to 0"),
        ({"device": "cpu", "gpu_layers": 3}, OptionError, "--gpu-layers 3: has no effect with --device cpu"),
    ],
)
def test_devices_that_are_not_there(gpus, fields, error, message):
    with pytest.raises(error, match=message):
        choose_devices(runtime(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "gpu"}, "--device: expected one of auto, cpu, cuda, metal, got gpu"),
        ({"device": "CUDA0,"}, "--device"),
        ({"split_mode": "tensor"}, "--split-mode: expected one of none, layer, row, got tensor"),
        ({"tensor_split": (1.0, -1.0)}, "--tensor-split: expected a value from 0"),
        ({"tensor_split": (float("nan"),)}, "--tensor-split: expected a value from 0"),
        ({"tensor_split": (0.0, 0.0)}, "--tensor-split: expected a share above 0"),
        ({"tensor_split": (1.0, 1.0), "split_mode": "none"}, "--tensor-split: has no effect with --split-mode none"),
        ({"main_gpu": 0}, "--main-gpu: has no effect without"),
        ({"main_gpu": 0, "split_mode": "layer"}, "--main-gpu: has no effect without"),
        ({"main_gpu": -1, "split_mode": "row"}, "--main-gpu: expected a value from 0 to 255"),
        ({"cpu_moe": -2}, "--n-cpu-moe: expected a value from -1"),
        ({"override_tensor": ("blk",)}, "expected REGEX=BUFFER: there is no ="),
        ({"override_tensor": ("=CPU",)}, "expected REGEX=BUFFER: nothing on one side"),
        ({"override_tensor": ("blk=",)}, "expected REGEX=BUFFER: nothing on one side"),
        ({"override_tensor": ("blk(=CPU",)}, "expected REGEX=BUFFER: missing"),
    ],
)
def test_values_out_of_range_are_refused_before_anything_is_loaded(fields, message):
    with pytest.raises(OptionError, match=message):
        runtime(**fields)


# --- what llama.cpp is told -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A header of a model whose layers 1 and 2 have experts."""
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("experts") / "moe.gguf"
    writer = GGUFWriter(path, "qwen3moe")
    names = ["token_embd.weight", "blk.0.ffn_up.weight", "blk.10.ffn_up.weight"]
    for layer in (1, 2):
        names += [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("up", "down", "gate")]
    names += ["blk.2.ffn_gate_inp.weight", "blk.2.ffn_gate_up_exps.weight", "blk.2.ffn_up_shexp.weight"]
    for name in names:
        writer.add_tensor(name, tiny.np.zeros((2, 2), "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, names


def placed(path, names, **fields) -> dict[str, str]:
    """Tensor -> kind of memory, by the first override that matches."""
    import re

    kinds = {address: name for name, address in buffers().items()}
    found = placement(runtime(**fields), path, "CUDA0,CUDA1").overrides
    return {
        name: next(kinds[buffer] for pattern, buffer in found if re.search(pattern, name))
        for name in names
        if any(re.search(pattern, name) for pattern, _ in found)
    }


def test_all_experts_stay_with_the_cpu(experts):
    path, names = experts
    routed = {name for name in names if "exps" in name}
    assert placed(path, names, cpu_moe=EVERY_LAYER) == dict.fromkeys(routed, "CPU")


def test_experts_of_the_first_layers_stay_with_the_cpu(experts):
    path, names = experts
    assert placed(path, names, cpu_moe=2) == dict.fromkeys((n for n in names if "blk.1.ffn" in n), "CPU")
    assert placed(path, names, cpu_moe=3) == placed(path, names, cpu_moe=EVERY_LAYER)
    assert placed(path, names, cpu_moe=0) == placed(path, names) == {}


def test_tensors_by_name(experts):
    path, names = experts
    assert placed(path, names, override_tensor=(r"blk\.10\.=CPU",)) == {"blk.10.ffn_up.weight": "CPU"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cpu_moe": 1}, "--n-cpu-moe 1: moe.gguf has no experts in these layers"),
        ({"override_tensor": ("blk=VRAM",)}, "expected one of CPU.* behind =, got VRAM"),
        ({"override_tensor": (r"blk\.3\.=CPU",)}, r"moe.gguf has no tensor whose name matches blk\\.3\\."),
        ({"tensor_split": (1.0,)}, "--tensor-split: expected 2 numbers, one for each of CUDA0, CUDA1, got 1"),
    ],
)
def test_what_has_no_effect_on_this_target_is_refused(experts, fields, message):
    with pytest.raises(OptionError, match=message):
        placement(runtime(**fields), experts[0], "CUDA0,CUDA1")


def test_cpu_moe_needs_experts(tiny_target):
    with pytest.raises(OptionError, match=r"--cpu-moe: target\.gguf has no experts"):
        placement(runtime(cpu_moe=EVERY_LAYER), tiny_target.path, "CUDA0")


@pytest.mark.parametrize(
    ("flag", "fields"),
    [
        ("--split-mode", {"split_mode": "layer"}),
        ("--split-mode", {"split_mode": "none", "main_gpu": 0}),
        ("--tensor-split", {"tensor_split": (1.0,)}),
        ("--cpu-moe", {"cpu_moe": EVERY_LAYER}),
        ("--n-cpu-moe", {"cpu_moe": 2}),
    ],
)
def test_without_a_gpu_they_have_no_effect(tiny_target, flag, fields):
    with pytest.raises(OptionError, match=f"{flag}: has no effect, for no layer is on a GPU"):
        load_engine(PairSettings(tiny_target.path, None, lookup=True), runtime(device="cpu", **fields))


def test_the_parameters_of_the_load():
    params = lib.llama_model_default_params()
    cpu = buffers()["CPU"]
    kept = Placement(lib.LLAMA_SPLIT_MODE_ROW, (3.0, 1.0), 1, (("a", cpu), ("b", cpu))).apply(params)
    assert (params.split_mode, params.main_gpu, params.tensor_split[:3]) == (2, 1, [3.0, 1.0, 0.0])
    pairs = (ctypes.c_void_p * 6).from_address(params.tensor_buft_overrides)
    assert [ctypes.string_at(pairs[0]), pairs[1], ctypes.string_at(pairs[2]), pairs[3]] == [b"a", cpu, b"b", cpu]
    assert pairs[4:6] == [None, None]
    del kept


def test_as_usual_nothing_is_told():
    before, params = lib.llama_model_default_params(), lib.llama_model_default_params()
    Placement().apply(params)
    assert bytes(params) == bytes(before)


# --- a real load ------------------------------------------------------------------------------------------------


def answer(target, draft, **fields) -> list[int | None]:
    pair = PairSettings(target, draft, nodes=8)
    with load_engine(pair, runtime(**tiny.EXACT, **fields)) as engine:
        greedy = SamplingSettings(temperature=0.0)
        return [piece.token for piece in engine.stream([5, 6, 7], greedy, Limits(20, ignore_eos=True))]


def test_a_pair_with_tensors_elsewhere_says_the_same(tiny_target, tiny_drafters):
    pair = tiny_target.path, tiny_drafters["good"].path
    assert answer(*pair, override_tensor=(r"blk\.1\.ffn.*=CPU", "output=CPU")) == answer(*pair)


def test_an_expression_that_llama_cpp_does_not_know_ends_with_a_message(tiny_target):
    """Python's have more forms than C++'s."""
    with pytest.raises(FileError, match=r"llama\.cpp cannot load it"):
        answer(tiny_target.path, None, override_tensor=(r"(?P<layer>blk)\.1=CPU",))
