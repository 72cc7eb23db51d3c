"""Tiny models on disk, and engines that run them.  See tiny.py for what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

hypothesis_settings.register_profile(
    "eagle3",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
hypothesis_settings.load_profile("eagle3")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What budgets learn in tests stays among tests, and no user's configuration file or registered model counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.delenv("EAGLE3_CONFIG", raising=False)
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_target(model_folder: Path) -> tiny.TinyModel:
    return tiny.write_target(model_folder / "target.gguf")


@pytest.fixture(scope="session")
def tiny_drafters(model_folder: Path, tiny_target: tiny.TinyModel) -> dict[str, tiny.TinyModel]:
    """good: knows most of the target.  random, borrowing, narrow: useless.  end: proposes only end tokens."""
    return {
        "good": tiny.write_good_drafter(model_folder / "good.gguf", tiny_target.weights),
        "random": tiny.write_drafter(model_folder / "random.gguf"),
        "borrowing": tiny.write_borrowing_drafter(model_folder / "borrowing.gguf"),
        "narrow": tiny.write_narrow_drafter(model_folder / "narrow.gguf"),
        "end": tiny.write_end_drafter(model_folder / "end.gguf"),
    }


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread: tests share few cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run(tiny_target: tiny.TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of `eagle3 train` that was stopped where its training would begin.  To be read only."""
    import runs

    from eagle3_cli.train import train

    settings = runs.settings(tiny_target.path, tmp_path_factory.mktemp("run"), 24, held_out=0.1)
    with pytest.MonkeyPatch.context() as patch:
        runs.ask(patch, "why", "how so")
        patch.setattr("eagle3_cli.train.stages.Run.job", runs.stop)
        with pytest.raises(runs.Stopped):
            train(settings)
    return settings.output


@pytest.fixture
def open_engine(tiny_target: tiny.TinyModel, tiny_drafters: dict[str, tiny.TinyModel]) -> Iterator[Callable[..., Any]]:
    """open_engine(drafter name or None, (depth, width, nodes), **RuntimeSettings) -> Engine; closed after the test.

    One thread; a float32 KV cache without flash attention, so that batches of all widths give nearly the same logits.
    """
    from eagle3_cli.engine import load_engine
    from eagle3_cli.settings import PairSettings, RuntimeSettings

    opened = []

    def open_one(draft: str | None = None, shape: tuple[int, int, int] = (4, 4, 8), **runtime: Any) -> Any:
        depth, width, nodes = shape
        pair = PairSettings(
            target=tiny_target.path,
            draft=tiny_drafters[draft].path if draft else None,
            no_draft=None if draft else "--no-draft",
            depth=depth,
            width=width,
            nodes=nodes,
        )
        engine = load_engine(
            pair, RuntimeSettings(**{**tiny.EXACT, "ctx_size": 512, "batch": 64, "threads": 1, **runtime})
        )
        opened.append(engine)
        return engine

    yield open_one
    for engine in opened:
        engine.close()
