"""Each tiny model is made once for all tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from architectures import ARCHITECTURES, HYBRIDS, OTHER_HYBRIDS, OTHERS, Model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """models(name) -> the model of that architecture."""
    made: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in made:
            architecture = (ARCHITECTURES | OTHERS | HYBRIDS | OTHER_HYBRIDS)[name]
            made[name] = Model(architecture, tmp_path_factory.mktemp("target"))
        return made[name]

    return model
