"""The objectives of training.

A position q of a sample counts if its next token t[q+1] belongs to an answer and the target's favourite there lies in
the draft vocabulary.  At step i row p = q-1-i predicts the target's distribution at q: softmax over the draft
vocabulary of its logits, restricted and renormalised.  So each distribution is computed once for all steps, and what
counts shifts with the inputs by itself.

    soft    cross-entropy against that distribution P                      (EAGLE-3)
    lk      w KL(P|Q) + (1 - w) (1 - a), a = sum min(P, Q) the acceptance rate, w = exp(-3 a) held constant: the hybrid
            of "LK Losses" (arXiv 2602.23881), per row as in vllm-project/speculators, losses/eager.py
    eagle   smooth L1 of the output against the target's next final state + 0.1 soft (EAGLE's first objective)

The loss is the mean over all rows that count in all steps, weighted by decay**i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .model import Batch, Drafter, FeatureDrafter

KINDS = ("soft", "lk", "eagle")
LK_ETA = 3.0
EAGLE_TOKEN_WEIGHT = 0.1  # SafeAILab/EAGLE, train/main.py: p_w
# Rows whose logits exist at a time, of all steps together.  On a CPU 448, 896 and 1792 were equally fast within 10 %; a
# GPU wants large products.
CHUNK_ROWS = {"cpu": 896}
CHUNK_ROWS_ELSEWHERE = 8192


def ttt_loss(
    drafter: Drafter, batch: Batch, steps: int = 7, decay: float = 0.8, kind: str = "soft", rate: Rated | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, a float32 scalar, and what happened at every step; a batch in which nothing counts gives 0.

    rate: `rated(kind)` if it was made before, which compiles once.
    Metrics, float32 [steps] each, detached sums that can be added up over batches and machines:
    counted      rows that count
    loss         their unweighted losses
    accuracy     rows whose most probable token is the target's favourite
    acceptance   sum over rows of sum min(P, Q)
    """
    if (kind == "eagle") != isinstance(drafter, FeatureDrafter) or (kind == "eagle" and steps != 1):
        raise ValueError("kind 'eagle' goes with a FeatureDrafter and one step")
    outputs = drafter.unroll(batch, steps)
    rows = counted_rows(batch, steps, drafter.draft_index[batch["best"]] >= 0)
    weights = torch.tensor([decay**i for i in range(steps)], device=rows.valid.device)
    share = weights[:, None] * rows.valid
    share = share / share.sum().clamp(min=torch.finfo(torch.float32).tiny)
    selected = [rows.of_step(output, i) for i, output in enumerate(outputs)]
    best = drafter.draft_index[rows.at(batch["best"])]
    states, head = rows.at(batch["final"]).to(drafter.target_head.dtype), drafter.target_head
    aims = _Aims(states, head, best, share, rows.valid, rate or rated(kind))
    inputs = drafter.head_input(torch.stack(selected))
    loss, sums = _HeadLoss.apply(aims, torch.is_grad_enabled(), drafter.head, inputs)
    if kind == "eagle":
        regression = F.smooth_l1_loss(selected[0].float(), aims.states.float(), reduction="none").mean(-1)
        loss = (regression * share[0]).sum() + EAGLE_TOKEN_WEIGHT * loss
    counted = rows.valid.sum(1).float()
    return loss, {"counted": counted, **dict(zip(("loss", "accuracy", "acceptance"), sums, strict=True))}


class TrainingStep(nn.Module):
    """A drafter and its objective as one module, so that wrappers which hook `forward` (DDP) see the whole step."""

    def __init__(
        self, drafter: Drafter, steps: int = 7, decay: float = 0.8, kind: str = "soft", compiled: bool = False
    ) -> None:
        super().__init__()
        self.drafter, self.steps, self.decay, self.kind = drafter, steps, decay, kind
        self.rate = rated(kind, compiled)
        if compiled:
            drafter.midlayer.compile_parts()

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return ttt_loss(self.drafter, batch, self.steps, self.decay, self.kind, self.rate)


@dataclass(frozen=True)
class Rows:
    """The positions of a batch that count, N in number, and the rows that predict them.

    sample, position   int64 [N]
    valid              bool [steps, N]; false where the row would lie before the sample's first
    """

    sample: Tensor
    position: Tensor
    valid: Tensor

    def at(self, values: Tensor) -> Tensor:
        """Of values by position [B, L, ...], those of the positions that count: [N, ...]."""
        return values[self.sample, self.position]

    def row(self, step: int) -> Tensor:
        """The row that predicts each position at a step, int64 [N]; 0 where there is none."""
        return (self.position - 1 - step).clamp(min=0)

    def of_step(self, values: Tensor, step: int) -> Tensor:
        """Of values by row [B, L - 1, ...], those that predict at this step: [N, ...]."""
        return values[self.sample, self.row(step)]


def counted_rows(batch: Batch, steps: int, wanted: Tensor | None = None) -> Rows:
    """Positions whose next token belongs to an answer, and which are wanted (bool [B, L])."""
    before_answer = batch["answer"][:, 1:].clone()
    if wanted is not None:
        before_answer &= wanted[:, :-1]
    sample, position = before_answer.nonzero(as_tuple=True)
    step = torch.arange(steps, device=position.device)
    return Rows(sample, position, position[None, :] > step[:, None])


# --- losses of single rows, with their gradients -----------------------------------------------------------

RowLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(P, log Q, Q, acceptance rate) -> (loss [n], its gradient by the drafter's logits [n, Vd])."""


def _soft(p: Tensor, log_q: Tensor, q: Tensor, acceptance: Tensor) -> tuple[Tensor, Tensor]:
    return -(p * log_q).sum(-1), q - p


def _lk(p: Tensor, log_q: Tensor, q: Tensor, acceptance: Tensor) -> tuple[Tensor, Tensor]:
    kl = (p * (p.clamp(min=torch.finfo(p.dtype).tiny).log() - log_q)).sum(-1)
    weight = (-LK_ETA * acceptance).exp()
    short = q * (q < p)  # 1 - acceptance falls by the probability that such tokens gain
    by_logits = q * short.sum(-1, keepdim=True) - short
    gradient = weight[..., None] * (q - p) + (1 - weight)[..., None] * by_logits
    return weight * kl + (1 - weight) * (1 - acceptance), gradient


_LOSSES: dict[str, RowLoss] = {"soft": _soft, "lk": _lk, "eagle": _soft}

Rated = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(logits [steps, n, Vd], P [n, Vd], share [steps, n], valid [steps, n], best [n]) -> (the sum of share times loss;
sums [3, steps] of loss, accuracy and acceptance over valid rows; the gradient of the first by the logits)."""


def _rated(row_loss: RowLoss, logits: Tensor, p: Tensor, share: Tensor, valid: Tensor, best: Tensor) -> Any:
    """See Rated.  Some ten passes over the logits, which a compiler merges into two."""
    log_q = logits.float().log_softmax(-1)
    q = log_q.exp()
    acceptance = torch.minimum(p, q).sum(-1)
    losses, gradient = row_loss(p, log_q, q, acceptance)
    right = log_q.gather(-1, best.expand(len(logits), -1)[..., None])[..., 0] >= log_q.amax(-1)  # a tie is right
    sums = torch.stack([(value * valid).sum(-1) for value in (losses, right, acceptance)])
    return (losses * share).sum(), sums, (gradient * share[..., None]).to(logits.dtype)


def rated(kind: str, compiled: bool = False) -> Rated:
    """What rates rows by the loss of this name.  compiled: by torch.compile, which needs a C++ compiler for a CPU."""
    function = partial(_rated, _LOSSES[kind])
    return torch.compile(function, dynamic=True) if compiled else function


@dataclass(frozen=True)
class _Aims:
    """What N positions are trained towards.

    states      [N, Ht] final states of the target, in the type of head, the target's [Vd, Ht]
    best        int64 [N], draft index of the target's favourite
    share       float32 [steps, N], a row's weight in the loss
    valid       bool [steps, N]
    """

    states: Tensor
    head: Tensor
    best: Tensor
    share: Tensor
    valid: Tensor
    rate: Rated


class _HeadLoss(torch.autograd.Function):
    """Loss and gradients of all rows, chunk by chunk: the logits of no more rows exist at a time, and none are computed
    twice.  The gradient by the logits is known in closed form, so the forward pass finishes the job."""

    @staticmethod
    def forward(ctx: Any, aims: _Aims, wanted: bool, head: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, sums [3, steps] of loss, accuracy and acceptance).  inputs: what the head reads, [steps, N, H]."""
        (steps, n, width), device = inputs.shape, head.device
        autocast = torch.is_autocast_enabled(device.type)
        kind = torch.get_autocast_dtype(device.type) if autocast else head.dtype
        weights, target, x = head.to(kind), aims.head.to(kind), inputs.to(kind)
        loss, sums = torch.zeros((), device=device), torch.zeros(3, steps, device=device)
        d_inputs = torch.empty_like(x) if wanted else None
        d_head = torch.zeros_like(head) if wanted and ctx.needs_input_grad[2] else None
        rows = max(1, CHUNK_ROWS.get(device.type, CHUNK_ROWS_ELSEWHERE) // steps)
        for start in range(0, n, rows):
            chunk = slice(start, start + rows)
            p = F.linear(aims.states[chunk], target).float().softmax(-1)
            read = x[:, chunk].reshape(-1, width)  # one product for all steps
            logits = (read @ weights.T).view(steps, len(p), -1)
            parts = aims.rate(logits, p, aims.share[:, chunk], aims.valid[:, chunk], aims.best[chunk])
            loss, sums, d_logits = loss + parts[0], sums + parts[1], parts[2].flatten(0, 1)
            if d_inputs is not None:
                d_inputs[:, chunk] = (d_logits @ weights).view(steps, len(p), width)
            if d_head is not None:
                d_head += d_logits.T @ read
        ctx.dtype, ctx.trains_head = inputs.dtype, d_head is not None
        ctx.save_for_backward(*(tensor for tensor in (d_inputs, d_head) if tensor is not None))
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_inputs, *d_head = ctx.saved_tensors
        scaled = grads[0] * d_inputs.to(ctx.dtype)
        return None, None, grads[0] * d_head[0] if d_head else None, scaled
