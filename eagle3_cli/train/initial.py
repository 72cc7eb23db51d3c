"""Where training starts: the drafter's layer and head from the target's own, as far as their shapes agree.

The target's last layer already turns a residual stream into nearly the next one, and its head reads tokens from that.
So the drafter's hidden input starts as the newest of the three aux states, its layer as the target's last with little
read from the embedding half, and its final norm and head as the target's.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from .model import Drafter, FeatureDrafter

# Name in the target's layer -> in the drafter's.
_LAYER = {
    "self_attn.o_proj.weight": "self_attn.o_proj.weight",
    "mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "mlp.up_proj.weight": "mlp.up_proj.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "hidden_norm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
}
_HALVES = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


class Start(Protocol):
    """What is taken of weights.TargetWeights."""

    @property
    def final_norm(self) -> Tensor: ...
    @property
    def last_layer(self) -> dict[str, Tensor] | None: ...


@torch.no_grad()
def start_from_target(drafter: Drafter, target: Start, embedding_part: float = 0.1) -> list[str]:
    """Set the drafter's weights; returns the names of those that came from the target.

    embedding_part   factor on the random embedding halves of q, k and v whose hidden halves are the target's
    A weight whose shape differs keeps its random start.  Nothing is taken where the widths differ, nor for a
    FeatureDrafter: it reads states after the final norm, which no layer of the target ever sees.
    """
    if drafter.shape.own_embeddings or isinstance(drafter, FeatureDrafter):
        return []
    own, taken = dict(drafter.named_parameters()), []
    width = drafter.shape.hidden
    for name, weight in (target.last_layer or {}).items():
        if name in _HALVES and weight.shape == own[f"midlayer.{name}"][:, width:].shape:
            own[f"midlayer.{name}"][:, :width] *= embedding_part
            own[f"midlayer.{name}"][:, width:] = weight
            taken.append(f"midlayer.{name}")
        elif name in _LAYER and weight.shape == own[f"midlayer.{_LAYER[name]}"].shape:
            own[f"midlayer.{_LAYER[name]}"].copy_(weight)
            taken.append(f"midlayer.{_LAYER[name]}")
    ends = {
        "fc.weight": _newest_state(drafter),
        "norm.weight": target.final_norm,
        "lm_head.weight": drafter.target_head,
    }
    for name, weight in ends.items():
        own[name].copy_(weight)
    _rescale(own, drafter.scale[2 * width :].median())
    return [*taken, *ends]


def _rescale(own: dict[str, nn.Parameter], unit: Tensor) -> None:
    """Divide everything that is added up between fusion and final norm by one unit.

    The weights get the size of 1, which steps of a learning rate can move.  Norms undo it, so the function stays
    (not with norm_before_residual and norm_output, whose residuals are normed rows and have that size already).
    """
    for name in ("fc.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        own[name].div_(unit)


def _newest_state(drafter: Drafter) -> Tensor:
    """fc that hands on the third aux state, whatever divided it, and a little of the others."""
    width, scale = drafter.shape.target_width, drafter.scale
    fresh = nn.Linear(3 * width, width, bias=False).weight
    weight = 0.01 * fresh.to(scale.device) * scale.mean()
    weight[:, 2 * width :] += torch.diag(scale[2 * width :])
    return weight


def projected_embedding(embedding: Tensor, width: int) -> Tensor:
    """Embeddings [V, width] for a drafter of another width than the target's [V, Ht].

    The principal components where the drafter is narrower, the rows padded with zeros where it is wider.
    """
    rows = embedding.float()
    if width >= rows.shape[1]:
        return nn.functional.pad(rows, (0, width - rows.shape[1]))
    _, directions = torch.linalg.eigh(rows.T @ rows)  # ascending
    return rows @ directions[:, -width:]
