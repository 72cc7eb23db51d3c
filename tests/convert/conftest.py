from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest

from eagle3_cli.convert import Report
from eagle3_cli.convert.load import load
from eagle3_cli.errors import Eagle3Error


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_target(tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.fixture(autouse=True)
def load_here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Load converted files in this process: a new one for each would take most of the suite's time."""
    if "own_process" not in request.keywords:
        monkeypatch.setattr("eagle3_cli.convert.load.check_loads", load)


@pytest.fixture
def convert(tmp_path: Path, target: Path) -> Any:
    """convert(tensors, config, **settings) -> (report, keys, tensors) of the GGUF, read by gguf's own reader."""

    def run(stored: Any = None, config: Any = None, **settings: Any) -> tuple[Report, dict[str, Any], dict[str, Any]]:
        source = checkpoints.write(tmp_path / "checkpoint", stored or checkpoints.tensors(), config)
        report = checkpoints.run(source, target, tmp_path / "out.gguf", force=True, **settings)
        return report, *checkpoints.read(tmp_path / "out.gguf")

    return run


@pytest.fixture
def refused(tmp_path: Path, target: Path) -> Any:
    """refused(tensors, config, **settings) -> the error's message; checks exit code 2 and that nothing is left."""

    def run(stored: Any = None, config: Any = None, **settings: Any) -> str:
        source = checkpoints.write(tmp_path / "checkpoint", stored or checkpoints.tensors(), config)
        output = tmp_path / "out" / "out.gguf"
        output.parent.mkdir(exist_ok=True)
        with pytest.raises(Eagle3Error) as caught:
            checkpoints.run(source, target, output, **settings)
        assert caught.value.exit_code == 2
        assert list(output.parent.iterdir()) == []
        return caught.value.message

    return run
