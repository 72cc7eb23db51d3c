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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .model import Batch, Drafter, FeatureDrafter

KINDS = ("soft", "lk", "eagle")
LK_ETA = 3.0
EAGLE_TOKEN_WEIGHT = 0.1  # SafeAILab/EAGLE, train/main.py: p_w
CHUNK_FLOATS = 2**22  # logits that exist at a time, as several arrays of this size


def ttt_loss(
    drafter: Drafter, batch: Batch, steps: int = 7, decay: float = 0.8, kind: str = "soft"
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, a float32 scalar, and what happened at every step; a batch in which nothing counts gives 0.

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
    aims = _Aims(states, head, best, share, rows.valid, _LOSSES[kind])
    inputs = [drafter.head_input(output) for output in selected]
    loss, sums = _HeadLoss.apply(aims, torch.is_grad_enabled(), drafter.head, *inputs)
    if kind == "eagle":
        regression = F.smooth_l1_loss(selected[0].float(), aims.states.float(), reduction="none").mean(-1)
        loss = (regression * share[0]).sum() + EAGLE_TOKEN_WEIGHT * loss
    counted = rows.valid.sum(1).float()
    return loss, {"counted": counted, **dict(zip(("loss", "accuracy", "acceptance"), sums, strict=True))}


class TrainingStep(nn.Module):
    """A drafter and its objective as one module, so that wrappers which hook `forward` (DDP) see the whole step."""

    def __init__(self, drafter: Drafter, steps: int = 7, decay: float = 0.8, kind: str = "soft") -> None:
        super().__init__()
        self.drafter, self.steps, self.decay, self.kind = drafter, steps, decay, kind

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return ttt_loss(self.drafter, batch, self.steps, self.decay, self.kind)


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
"""(P, log Q, Q, acceptance rate) -> (loss [n], its gradient by the drafter's logits [n, Vd]).  Q may be overwritten."""


def _soft(p: Tensor, log_q: Tensor, q: Tensor, acceptance: Tensor) -> tuple[Tensor, Tensor]:
    return -(p * log_q).sum(-1), q.sub_(p)


def _lk(p: Tensor, log_q: Tensor, q: Tensor, acceptance: Tensor) -> tuple[Tensor, Tensor]:
    kl = (p * (p.clamp(min=torch.finfo(p.dtype).tiny).log() - log_q)).sum(-1)
    weight = (-LK_ETA * acceptance).exp()
    short = q * (q < p)  # 1 - acceptance falls by the probability that such tokens gain
    by_logits = q * short.sum(-1, keepdim=True) - short
    gradient = weight[:, None] * (q - p) + (1 - weight)[:, None] * by_logits
    return weight * kl + (1 - weight) * (1 - acceptance), gradient


_LOSSES: dict[str, RowLoss] = {"soft": _soft, "lk": _lk, "eagle": _soft}


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
    loss: RowLoss


class _HeadLoss(torch.autograd.Function):
    """Loss and gradients of all rows, chunk by chunk: no more than CHUNK_FLOATS logits exist at a time, and none are
    computed twice.  The gradient by the logits is known in closed form, so the forward pass finishes the job."""

    @staticmethod
    def forward(ctx: Any, aims: _Aims, wanted: bool, head: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, sums [3, steps] of loss, accuracy and acceptance).  inputs: what the head reads, one [N, H] a step."""
        sums = torch.zeros(3, len(inputs), device=head.device)
        loss = torch.zeros((), device=head.device)
        d_inputs = [torch.empty_like(x) for x in inputs] if wanted else []
        d_head = torch.zeros_like(head) if wanted and ctx.needs_input_grad[2] else None
        rows = max(1, CHUNK_FLOATS // len(head))
        for start in range(0, len(aims.states), rows):
            chunk = slice(start, start + rows)
            p = F.linear(aims.states[chunk], aims.head).float().softmax(-1)
            for i, x in enumerate(inputs):
                logits = F.linear(x[chunk], head)
                log_q = logits.float().log_softmax(-1)
                q = log_q.exp()
                acceptance, share, valid = torch.minimum(p, q).sum(-1), aims.share[i, chunk], aims.valid[i, chunk]
                right = log_q.argmax(-1) == aims.best[chunk]
                losses, d_logits = aims.loss(p, log_q, q, acceptance)
                sums[:, i] += torch.stack([(value * valid).sum() for value in (losses, right, acceptance)])
                loss += (losses * share).sum()
                d_logits = d_logits.mul_(share[:, None]).to(logits.dtype)
                if d_inputs:
                    d_inputs[i][chunk] = d_logits @ head
                if d_head is not None:
                    d_head += d_logits.T @ x[chunk]
        ctx.trains_head = d_head is not None
        ctx.save_for_backward(*([] if d_head is None else [d_head]), *d_inputs)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scaled = [grads[0] * gradient for gradient in ctx.saved_tensors]
        return (None, None, *(scaled if ctx.trains_head else [None, *scaled]))
