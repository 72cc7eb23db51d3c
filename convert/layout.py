"""One flat config, whichever family wrote it.

speculators nest the decoder layer's config (`transformer_layer_config`) beside their own keys; everything else is flat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError

NESTED = "transformer_layer_config"

# Keys about speculators' own workings, which change nothing in the drafter.
BOOKKEEPING = ("speculators_model_type", "speculators_config", "speculators_version", "has_no_defaults_at_init",
               "embed_requires_grad")  # fmt: skip

# Keys that both levels have, each about itself: the outer one counts.
OF_EACH_LEVEL = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
                 "tie_word_embeddings", "auto_map")  # fmt: skip

# The nested config holds only what differs from its class's defaults (transformers' to_diff_dict), so these are what
# an absent key means.  Other defaults follow from the tensors or are transformers' own in config.py.
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 32},
    "qwen3": {"num_attention_heads": 32, "head_dim": 128},
}


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the nested layer config at top level.

    CheckpointError when the two levels contradict each other in a key that they share.
    """
    if NESTED not in config:
        return dict(config)
    nested = config[NESTED]
    if not isinstance(nested, dict):
        raise CheckpointError(f"config: {NESTED}: expected an object, got {nested!r}.")
    outer = {k: v for k, v in config.items() if k != NESTED and k not in BOOKKEEPING}
    for key in outer.keys() & nested.keys() - set(OF_EACH_LEVEL):
        if None not in (outer[key], nested[key]) and outer[key] != nested[key]:
            raise CheckpointError(
                f"config: {key} is {outer[key]!r}, but {nested[key]!r} in {NESTED}.",
                "Remove one of them from a copy of the config and give that with --config.",
            )
    kind = nested.get("model_type")
    defaults = CLASS_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}
    stated = {k: v for level in (nested, outer) for k, v in level.items() if v is not None}
    return {**defaults, **stated}
