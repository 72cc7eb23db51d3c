"""Attention of training-time test: one softmax over the causal keys of step 0 and a row's own keys of later steps.

Row p at step i sees the step-0 keys of rows 0..p and, of steps 1..i, its own key only.  So a later step adds one dot
product per row to causal attention, and no step needs an L x L matrix: queries go through in chunks, whose scores are
computed again in the backward pass.  Kept per step: the query, the output and its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Queries of one chunk.  On a CPU the scores of a chunk should stay in the cache: at L = 512, 64 took 207 ms where 128
# took 261 and 512 took 650 (B = 8, 9 heads, head_dim 64, forward and backward, one thread; torch's own causal
# attention, which cannot take the own keys: 174).  A GPU wants few, large kernels.
CHUNK = {"cpu": 64}
CHUNK_ELSEWHERE = 512


def attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """The attention output of one step, [B, heads, L, D].

    query          [B, heads, L, D] of this step, turned by RoPE
    keys, values   one [B, kv_heads, L, D] for each step so far: the first is causal, of the others row p sees row p.
                   Query head h reads key/value head h // (heads / kv_heads), as in transformers
    Scores are scaled by D ** -0.5 and summed in float32 (float64 for float64 input).
    """
    batch, heads, length, dim = query.shape
    kv_heads = keys[0].shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, length, dim)
    out: Tensor = _Attend.apply(grouped, len(keys), *keys, *values)
    return out.view(batch, heads, length, dim)


def _chunks(length: int, device: torch.device) -> list[tuple[int, int]]:
    size = CHUNK.get(device.type, CHUNK_ELSEWHERE)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _causal_scores(query: Tensor, key: Tensor, start: int, stop: int) -> Tensor:
    """Scores of the (scaled) queries start..stop-1 for the keys 0..stop-1: [B, kv, group, stop - start, stop]."""
    batch, kv_heads, group, _, dim = query.shape
    chunk = query[:, :, :, start:stop].reshape(batch, kv_heads, -1, dim)
    scores = chunk @ key[:, :, :stop].transpose(-1, -2)
    scores = scores.to(_precise(scores.dtype)).view(batch, kv_heads, group, stop - start, stop)
    later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=scores.device).triu(1)
    scores[..., start:].masked_fill_(later, float("-inf"))
    return scores


def _own(tensors: Sequence[Tensor]) -> Tensor:
    """The keys or values that only the own row sees, [B, kv, L, steps, D]; steps may be 0."""
    if len(tensors) == 1:
        batch, kv_heads, length, dim = tensors[0].shape
        return tensors[0].new_empty(batch, kv_heads, length, 0, dim)
    return torch.stack(tuple(tensors[1:]), dim=3)


def _own_scores(query: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """[B, kv, group, L, steps] in the precision of the softmax."""
    return torch.einsum("bkgld,bklsd->bkgls", query, _own(keys)).to(_precise(query.dtype))


class _Attend(torch.autograd.Function):
    """The gradient is written out, because autograd would keep every chunk's scores.

    With probabilities P over all visible keys, output O and incoming gradient dO, for every key alike:
    dV = P^T dO, dS = P (dO V^T - sum(dO O)), dQ = dS K, dK = dS^T Q.  The last term needs O of the whole softmax only,
    so causal and own keys are treated separately once their common log-sum-exp is known.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, steps: int, *keys_values: Tensor) -> Tensor:
        keys, values = keys_values[:steps], keys_values[steps:]
        query = query * query.shape[-1] ** -0.5
        own_scores = _own_scores(query, keys)
        out, total = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=own_scores.dtype)
        for start, stop in _chunks(query.shape[3], query.device):
            scores = _causal_scores(query, keys[0], start, stop)
            sums = torch.cat([scores.logsumexp(-1, keepdim=True), own_scores[:, :, :, start:stop]], -1).logsumexp(-1)
            probabilities = (scores.sub_(sums[..., None]).exp_()).to(query.dtype).flatten(2, 3)
            out[:, :, :, start:stop] = (probabilities @ values[0][:, :, :stop]).view_as(out[:, :, :, start:stop])
            total[:, :, :, start:stop] = sums
        own = (own_scores - total[..., None]).exp().to(query.dtype)
        out += torch.einsum("bkgls,bklsd->bkgld", own, _own(values))
        ctx.steps = steps
        ctx.save_for_backward(query, out, total, *keys_values)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, out, total, *keys_values = ctx.saved_tensors
        keys, values = keys_values[: ctx.steps], keys_values[ctx.steps :]
        d_out = grads[0].to(query.dtype)
        inner = (d_out.to(total.dtype) * out).sum(-1)  # sum(dO O) of every row
        d_query, d_keys, d_values = _own_gradient(query, keys, values, (d_out, total, inner))
        d_key, d_value = torch.zeros_like(keys[0]), torch.zeros_like(values[0])
        for start, stop in _chunks(query.shape[3], query.device):
            probabilities = _causal_scores(query, keys[0], start, stop)
            probabilities = probabilities.sub_(total[:, :, :, start:stop, None]).exp_().flatten(2, 3)
            d_chunk = d_out[:, :, :, start:stop].flatten(2, 3)
            d_value[:, :, :stop] += probabilities.to(query.dtype).transpose(-1, -2) @ d_chunk
            d_scores = (d_chunk @ values[0][:, :, :stop].transpose(-1, -2)).to(total.dtype)
            d_scores = d_scores.sub_(inner[:, :, :, start:stop].flatten(2, 3)[..., None])
            d_scores = d_scores.mul_(probabilities).to(query.dtype)
            d_key[:, :, :stop] += d_scores.transpose(-1, -2) @ query[:, :, :, start:stop].flatten(2, 3)
            d_query[:, :, :, start:stop] += (d_scores @ keys[0][:, :, :stop]).view(query[:, :, :, start:stop].shape)
        d_query *= query.shape[-1] ** -0.5
        return (d_query, None, d_key, *d_keys, d_value, *d_values)


def _own_gradient(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], of_output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """(gradient of the scaled query, of the own keys, of the own values) through the own keys alone.

    of_output   the output's gradient [B, kv, group, L, D], the log-sum-exp and sum(dO O) [B, kv, group, L]
    """
    d_out, total, inner = of_output
    own_keys = _own(keys)
    probabilities = (_own_scores(query, keys) - total[..., None]).exp()
    d_scores = torch.einsum("bkgld,bklsd->bkgls", d_out, _own(values)).to(total.dtype) - inner[..., None]
    d_scores = (d_scores * probabilities).to(query.dtype)
    d_query = torch.einsum("bkgls,bklsd->bkgld", d_scores, own_keys)
    d_keys = torch.einsum("bkgls,bkgld->bklsd", d_scores, query)
    d_values = torch.einsum("bkgls,bkgld->bklsd", probabilities.to(query.dtype), d_out)
    return d_query, d_keys.unbind(3), d_values.unbind(3)
