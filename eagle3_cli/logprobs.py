"""What the target thought of an answer's tokens, in the form of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .engine.types import Likelihood

MOST = 20  # likeliest tokens that may be asked for


class Vocabulary(Protocol):
    """piece: the bytes that a token prints, none for a control token.  token_text: its entry in the vocabulary."""

    def piece(self, token: int) -> bytes: ...

    def token_text(self, token: int) -> str: ...


def entries(vocabulary: Vocabulary, tokens: Iterable[int], likelihoods: Iterable[Likelihood]) -> list[dict[str, Any]]:
    """One entry per token: natural logs of the softmax of the target's logits, before any sampler.

    A token that ends within a character has U+FFFD in its text; its bytes are right.  A control token has none.
    """
    return [
        {
            **_entry(vocabulary, token, likelihood.logp),
            "top_logprobs": [_entry(vocabulary, other, logp) for other, logp in likelihood.top],
        }
        for token, likelihood in zip(tokens, likelihoods, strict=True)
    ]


def _entry(vocabulary: Vocabulary, token: int, logp: float) -> dict[str, Any]:
    data = vocabulary.piece(token)
    return {
        "token": data.decode("utf-8", "replace") if data else vocabulary.token_text(token),
        "logprob": logp,
        "bytes": list(data) if data else None,
    }
