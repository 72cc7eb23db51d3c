"""What `eagle3 doctor` looks at: the installation, this machine, and whether a pair will run well on it.

Each function looks at one thing and returns findings; what it needs to know comes from the modules that do the work, so
that a finding says what will happen.  Nothing is loaded here: how fast the pair is, the command measures itself.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from . import config, machine, registry
from .errors import Eagle3Error, InputError
from .folders import cache_folder
from .settings import PairSettings, RuntimeSettings

OK, ADVICE, PROBLEM = "ok", "advice", "problem"
BUSY = 0.5  # of the processors in use by others, from where on a measurement is not worth much
REINSTALL = "Install it again: pip install --force-reinstall --no-cache-dir 'llama-cpp-python>=0.3.36,<0.4'"


@dataclass(frozen=True)
class Finding:
    """name     what was looked at
    said     what was found
    status   ok; advice, where it could be better; problem, where something will fail or is not what was asked for
    remedy   what to do about it
    numbers  what was measured or estimated, for JSON
    """

    name: str
    said: str
    status: str = OK
    remedy: str | None = None
    numbers: Mapping[str, float | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        numbers = {"numbers": dict(self.numbers)} if self.numbers else {}
        return {"name": self.name, "status": self.status, "said": self.said, "remedy": self.remedy, **numbers}


def fault(name: str, error: Eagle3Error) -> Finding:
    return Finding(name, error.message, PROBLEM, error.hint)


# ---- the installation --------------------------------------------------------------------------------------


def llama_cpp(found: Mapping[str, str]) -> Finding:
    """found: as `versions.bug_report` tells it."""
    package = f"llama-cpp-python {found['llama-cpp-python']}"
    if "backends" not in found:
        return Finding("llama.cpp", f"{package} {found['llama.cpp']}", PROBLEM, REINSTALL)
    build = f"{found['build']}, " if found["build"] else ""
    return Finding("llama.cpp", f"{package}, {build}backends {found['backends']}")


def kernels() -> Finding:
    from .probe import AMX_NOTE, amx_crashes

    if amx_crashes():
        return Finding("kernels", "AMX kernels crash, so they are not used", ADVICE, AMX_NOTE)
    return Finding("kernels", "llama.cpp's matrix kernels run")


def configuration(root: click.Context) -> Finding:
    path = config.config_file()
    if path is None:
        return Finding("configuration", f"none; {config.default_file()} would be read")
    try:
        config.check(path, root)
    except InputError as error:
        return fault("configuration", error)
    return Finding("configuration", str(path))


def models() -> Finding:
    try:
        known = registry.read()
    except InputError as error:
        return fault("models", error)
    lost = [name for name, model in sorted(known.items()) if model.missing]
    if lost:
        said = f"files of {', '.join(lost)} are no longer there"
        remedy = f"eagle3 models remove {' '.join(lost)}, or add them again with --force."
        return Finding("models", said, ADVICE, remedy)
    return Finding("models", f"{len(known)} registered in {registry.registry_file()}" if known else "none registered")


def cache(folder: Path | None = None) -> Finding:
    """Whether what is learned about a pair can be kept, and for how many pairs it is."""
    folder = cache_folder() if folder is None else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        tables = len(list(folder.glob("*.json")))
    except OSError as error:
        remedy = "What is learned about a pair's speed is lost with each call. EAGLE3_CACHE names another folder."
        return Finding("cache", f"{folder}: cannot be written: {error.strerror or error}", PROBLEM, remedy)
    return Finding("cache", f"{folder}, cost tables of {tables} {'pair' if tables == 1 else 'pairs'}")


# ---- the machine -------------------------------------------------------------------------------------------


def device(runtime: RuntimeSettings) -> tuple[Finding, str]:
    """Also the backend's name, as `choose_devices` tells it; "cpu" where there is none as was asked for."""
    from .devices import devices
    from .llama import choose_devices

    try:
        _, _, backend = choose_devices(runtime)
    except InputError as error:
        return fault("device", error), "cpu"
    gpus = [each for each in devices() if each.is_gpu]
    if backend == "cpu":
        unused = _unused_gpu() if not gpus and runtime.device == "auto" else None
        return Finding("device", f"CPU, {machine.processor()}", ADVICE if unused else OK, unused), backend
    told = (f"{each.name} {each.description}, {machine.size(each.free)} of {machine.size(each.total)} free"
            for each in gpus if each.name in backend.split(","))  # fmt: skip
    return Finding("device", "; ".join(told)), backend


def _unused_gpu() -> str | None:
    if not (shutil.which("nvidia-smi") or os.path.exists("/dev/nvidia0")):
        return None
    return (
        "There is an NVIDIA GPU, but this llama-cpp-python is built without CUDA: reinstall it with"
        ' CMAKE_ARGS="-DGGML_CUDA=on" pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python'
        " llama-cpp-python."
    )


def threads(runtime: RuntimeSettings) -> Finding:
    from .llama import physical_cores

    physical, logical, limit, load = physical_cores(), machine.allowed_cores(), machine.quota(), machine.load()
    used = runtime.threads or physical
    said = f"{used} of {physical} physical cores, {logical} logical"
    said += f", load {load:.1f}" if load is not None else ""
    return Finding("threads", said, *threads_advice(used, physical, limit, load))


def busy(load: float | None, physical: int) -> bool:
    """Whether other programs take so much of the processors that a measurement is not worth much."""
    return load is not None and load > BUSY * physical


def threads_advice(used: int, physical: int, limit: float | None, load: float | None) -> tuple[str, str | None]:
    """Status and remedy.  limit: processors that a container may use; load: processors in use."""
    if limit is not None and used > limit:
        return ADVICE, f"The container may use {limit:g} processors: give --threads {max(1, int(limit))}."
    if used > physical:
        return ADVICE, f"More threads than physical cores mostly slow decoding down: give --threads {physical}."
    if busy(load, physical):
        return ADVICE, "Other programs keep the processors busy; decoding is slower while they run."
    return OK, None


def pages(runtime: RuntimeSettings, backend: str) -> Finding:
    chosen = machine.large_pages()
    if chosen is None or backend != "cpu":
        return Finding("huge pages", "do not matter here")
    if chosen == "never":
        remedy = "Decoding looks up every page it reads: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("huge pages", "switched off by the system", ADVICE, remedy)
    if runtime.mmap:
        return Finding("huge pages", f"{chosen}; weights that are mapped from the file have none, --no-mmap gives them")
    return Finding("huge pages", chosen)


# ---- the pair ----------------------------------------------------------------------------------------------


def pair(settings: PairSettings, runtime: RuntimeSettings) -> Finding:
    """Whether the files are what they should be and belong together, by their headers."""
    from .lora import check_lora
    from .model_files import check_target, read_drafter

    try:
        check_target(settings.target, runtime.ctx_size)
        for lora in settings.loras:
            check_lora(lora.path, settings.target)
        if settings.draft:
            read_drafter(settings.draft, settings.target)
    except InputError as error:
        return fault("pair", error)
    adapters = f" with {len(settings.loras)} adapters" if settings.loras else ""
    drafter = f"fits {settings.draft.name}" if settings.draft else settings.no_draft or "n-gram matches, no drafter"
    return Finding("pair", f"{settings.target.name}{adapters}: {drafter}")


def memory(settings: PairSettings, runtime: RuntimeSettings, backend: str) -> Finding:
    from .devices import devices
    from .needs import of_pair

    try:
        needs = of_pair(settings, runtime, on_gpu=backend != "cpu")
    except InputError as error:
        return fault("memory", error)
    said = (
        f"about {machine.size(needs.total)} needed: weights {machine.size(needs.weights)}, cache"
        f" {machine.size(needs.cache)} ({needs.cells} tokens), working space {machine.size(needs.working)}"
    )
    if backend == "cpu":
        free, where = machine.memory().available, "available"
    else:
        free, where = sum(each.free for each in devices() if each.name in backend.split(",")), "free on the device"
    numbers = {**asdict(needs), "total": needs.total, "free": free}
    if free is None:
        return Finding("memory", said, numbers=numbers)
    said += f"; {machine.size(free)} {where}"
    partly = backend != "cpu" and (runtime.gpu_layers not in (None, -1) or runtime.cpu_moe or runtime.override_tensor)
    if needs.total <= free or partly:
        return Finding("memory", said, numbers=numbers)
    smaller = "Give a smaller --ctx-size, a packed --cache-type-k and --cache-type-v, or a smaller model"
    more = "." if backend == "cpu" else "; or --gpu-layers or --n-cpu-moe."
    return Finding("memory", said, PROBLEM, smaller + more, numbers)


def flash_attention(runtime: RuntimeSettings, backend: str) -> Finding:
    chosen = runtime.flash_attention(on_gpu=backend != "cpu")
    if backend == "cpu" and chosen == "on" and runtime.flash_attn == "on":
        remedy = "On a CPU it is slower; leave it out unless answers must be equal with and without a drafter."
        return Finding("flash attention", "on", ADVICE, remedy)
    return Finding("flash attention", chosen if runtime.flash_attn != "auto" else f"auto, here {chosen}")


# ---- speed -------------------------------------------------------------------------------------------------


def speed(plain: float | None, drafted: float | None, drafts: bool, disturbed: bool = False) -> Finding:
    """plain, drafted: tokens per second; None where an answer was too short to tell.  disturbed: other programs kept
    the processors busy, so that the numbers say little."""
    numbers = {"plain": plain, "drafted": drafted}
    if plain is None or (drafts and drafted is None):
        return Finding("speed", "the answers were too short to measure", numbers=numbers)
    if drafted is None:
        return Finding("speed", f"plain {plain:.1f} tokens/s, nothing drafted", numbers=numbers)
    said = f"plain {plain:.1f} tokens/s, drafted {drafted:.1f} tokens/s, {drafted / plain:.2f} times as fast"
    if disturbed:
        remedy = "Other programs kept the processors busy meanwhile: measure again when they are done."
        return Finding("speed", said, ADVICE, remedy, numbers)
    if drafted >= 1.03 * plain:
        return Finding("speed", said, numbers=numbers)
    remedy = (
        "Drafting pays little or nothing for this text here: checking several tokens costs this machine about as much"
        " as computing them. auto then mostly decodes plainly; eagle3 bench measures with more prompts, and"
        " docs/budget.md says which models gain."
    )
    return Finding("speed", said, ADVICE, remedy, numbers)


def before_loading(pair_of: PairSettings, runtime: RuntimeSettings) -> Iterator[Finding]:
    """Everything about machine and pair, in the order of the report."""
    found, backend = device(runtime)
    yield found
    yield threads(runtime)
    yield kernels()
    yield pages(runtime, backend)
    checked = pair(pair_of, runtime)
    yield checked
    yield flash_attention(runtime, backend)
    if checked.status != PROBLEM:
        yield memory(pair_of, runtime, backend)


def verdict(findings: list[Finding]) -> str:
    """The report's last line."""
    problems, advice = (sum(f.status == status for f in findings) for status in (PROBLEM, ADVICE))
    found = [f"{problems} {_plural(problems, 'problem')}" if problems else "all is well"]
    found += [f"{advice} {_plural(advice, 'piece')} of advice"] if advice else []
    return ", ".join(found)


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
