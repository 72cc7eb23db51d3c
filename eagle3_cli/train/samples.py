"""The records that flow from conversations to training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Conversation = list[dict[str, str]]
"""Messages with "role" (system, user or assistant) and "content", in order."""


@dataclass(frozen=True)
class Sample:
    """One conversation as the target sees it.

    tokens   int32 [n] ids
    answer   bool [n]; true where the token belongs to an assistant's answer, its end token included
    """

    tokens: np.ndarray
    answer: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)
