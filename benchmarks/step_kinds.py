"""One training step of eagle3, SpecForge and speculators on the same weights and batch, for training_step.py.

Runs in the Python that has the project in question: nothing of them is imported before it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

DECAY = 0.8
EPS = 1e-5
Step = Callable[[], float]
"""Gradients of one batch; returns the mean cross-entropy of step 0."""


@dataclass(frozen=True)
class Shape:
    """Sizes of drafter, batch and unrolling.  The target is as wide as the drafter.

    answer_share   the last part of every sample that belongs to an answer and counts
    teacher        of SpecForge: "compact" computes the target's distribution as `training.compact_teacher` does, "full"
                   as without it, from the logits of the whole vocabulary
    attention      of speculators: "sdpa" or "eager"
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    batch: int
    length: int
    steps: int
    answer_share: float
    threads: int
    teacher: str
    attention: str


# --- what all are given ------------------------------------------------------------------------------------


def random_weights(shape: Shape) -> dict[str, Any]:
    """Float32 weights under the names of a checkpoint in SpecForge's layout; norms are 1."""
    import torch

    draw, h = torch.Generator().manual_seed(1), shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = {
        "fc": (h, 3 * h), "midlayer.self_attn.q_proj": (queries, 2 * h), "midlayer.self_attn.k_proj": (keys, 2 * h),
        "midlayer.self_attn.v_proj": (keys, 2 * h), "midlayer.self_attn.o_proj": (h, queries),
        "midlayer.mlp.gate_proj": (shape.ffn, h), "midlayer.mlp.up_proj": (shape.ffn, h),
        "midlayer.mlp.down_proj": (h, shape.ffn), "lm_head": (shape.draft_vocab, h),
    }  # fmt: skip
    made = {f"{name}.weight": torch.randn(size, generator=draw) / size[1] ** 0.5 for name, size in matrices.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    return made | {f"{name}.weight": torch.ones(h) for name in norms}


def random_batch(shape: Shape) -> SimpleNamespace:
    """Tokens int64 [B, L], states bfloat16 [B, L, ...], and the target's embedding and head, float32 [V, H].

    Final states have a root mean square of 1, so that a norm in front of the head changes nothing.  Rows of the head
    outside the draft vocabulary are small: every favourite lies in it, and what counts is decided by `answer` alone.
    """
    import torch

    draw, size = torch.Generator().manual_seed(2), (shape.batch, shape.length)
    ids = torch.arange(shape.draft_vocab) * (shape.vocab // shape.draft_vocab)
    head = 0.01 * torch.randn(shape.vocab, shape.hidden, generator=draw)
    head[ids] *= 300 * shape.hidden**-0.5
    final = torch.randn(*size, shape.hidden, generator=draw)
    final = (final / final.square().mean(-1, keepdim=True).sqrt()).bfloat16()
    best = torch.stack([(states.float() @ head.T).argmax(-1) for states in final])
    answer = (torch.arange(shape.length) >= round((1 - shape.answer_share) * shape.length)).expand(size)
    return SimpleNamespace(
        tokens=torch.randint(0, shape.vocab, size, generator=draw),
        hidden=torch.randn(*size, 3 * shape.hidden, generator=draw).bfloat16(),
        embedding=torch.randn(shape.vocab, shape.hidden, generator=draw),
        final=final, head=head, best=best, answer=answer, ids=ids,
    )  # fmt: skip


def shifted(batch: SimpleNamespace) -> SimpleNamespace:
    """The batch as the others want it: row p has the states of position p, the token of p + 1, the target's state there
    and, [B, L - 1], whether the token after that counts."""
    import torch

    counted = torch.nn.functional.pad(batch.answer[:, 2:], (0, 1))
    return SimpleNamespace(
        tokens=batch.tokens[:, 1:].clone(), hidden=batch.hidden[:, :-1].clone(), final=batch.final[:, 1:].clone(),
        counted=counted,
    )  # fmt: skip


def mapping(shape: Shape, batch: SimpleNamespace) -> dict[str, Any]:
    """d2t as offsets and t2d as a mask."""
    import torch

    mask = torch.zeros(shape.vocab, dtype=torch.bool)
    mask[batch.ids] = True
    return {"d2t": batch.ids - torch.arange(shape.draft_vocab), "t2d": mask}


# --- one step of each --------------------------------------------------------------------------------------


def eagle3_step(shape: Shape, compiled: bool) -> Step:
    """Ours, as the training loop runs it."""
    import torch

    from eagle3_cli.train.compiling import keep_memory
    from eagle3_cli.train.loss import TrainingStep
    from eagle3_cli.train.model import Drafter, DrafterShape

    keep_memory()
    given = random_batch(shape)
    sizes = (shape.hidden, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab)
    drafter = Drafter(
        DrafterShape(*sizes, shape.draft_vocab, eps=EPS), given.ids, given.embedding, given.head[given.ids]
    )
    _load(drafter, random_weights(shape), {"d2t", "scale"})
    module = TrainingStep(drafter, shape.steps, DECAY, compiled=compiled)
    batch = {name: getattr(given, name) for name in ("tokens", "answer", "best", "hidden", "final")}
    batch["length"] = torch.full((shape.batch,), shape.length)

    def step() -> float:
        drafter.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, metrics = module(batch)
        loss.backward()
        return float(metrics["loss"][0] / metrics["counted"][0])

    return step


def specforge_step(shape: Shape, checkout: str) -> Step:
    """SpecForge's OnlineEagle3Model with its sdpa backend and, in place of its Triton kernel, its reference loss."""
    sys.path.insert(0, checkout)
    import torch
    from specforge.algorithms.eagle3 import model as eagle3  # type: ignore[import-not-found]
    from specforge.core.loss import _compute_loss  # type: ignore[import-not-found]
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # type: ignore[import-not-found]

    given = random_batch(shape)
    rows, weights = shifted(given), random_weights(shape) | mapping(shape, given)
    draft = LlamaForCausalLMEagle3(_llama_config(shape, draft_vocab_size=shape.draft_vocab), attention_backend="sdpa")
    _load(draft, weights | {"embed_tokens.weight": given.embedding}, set())
    draft = draft.to(torch.bfloat16)
    draft.embed_tokens.weight.requires_grad_(False)
    eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    model = eagle3.OnlineEagle3Model(draft, length=shape.steps, attention_backend="sdpa")
    head, mask = given.head.bfloat16(), rows.counted[..., None].int()
    seen = torch.ones(rows.tokens.shape, dtype=torch.bool)
    per_row = rows.counted.numel() / int(rows.counted.sum())

    def step() -> float:
        draft.zero_grad()
        if shape.teacher == "compact":
            teacher = {"target": None, "target_hidden_for_compact": rows.final, "target_head_weight": head}
        else:
            teacher = {"target": torch.nn.functional.linear(rows.final, head)}
        losses = model(
            input_ids=rows.tokens, attention_mask=seen, loss_mask=mask, hidden_states=rows.hidden, **teacher
        )[0]
        sum(DECAY**i * loss for i, loss in enumerate(losses)).backward()
        return float(losses[0] * per_row)

    return step


def speculators_step(shape: Shape) -> Step:
    """The forward pass that speculators trains with, one document at a time, with dense masks and its eager loss.

    Its head is trained here as it is everywhere else; speculators itself freezes it.
    """
    import torch
    from speculators.losses import resolve_loss_config  # type: ignore[import-not-found]
    from speculators.models.eagle3 import (  # type: ignore[import-not-found]
        Eagle3DraftModel,
        Eagle3SpeculatorConfig,
    )

    given = random_batch(shape)
    rows, layer = shifted(given), _llama_config(shape)
    layer._attn_implementation = shape.attention
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=shape.draft_vocab))
    weights = {name.replace("midlayer.", "layers.0."): value for name, value in random_weights(shape).items()}
    weights |= {
        **mapping(shape, given), "embed_tokens.weight": given.embedding,
        "verifier_lm_head.weight": given.head[given.ids], "verifier_norm.weight": torch.ones(shape.hidden),
    }  # fmt: skip
    _load(model, weights, set())
    model.lm_head.weight.requires_grad_(True)
    loss_config = resolve_loss_config("kl_div", "eager")
    target = (rows.final.float() @ given.head[given.ids].T).log_softmax(-1)
    entropy = float(-(target.exp() * target).sum(-1)[rows.counted].mean())
    documents = torch.zeros(1, shape.length - 1, dtype=torch.int64)

    def step() -> float:
        model.zero_grad()
        first = 0.0
        for i in range(shape.batch):
            one = slice(i, i + 1)
            with torch.autocast("cpu", torch.bfloat16):
                _, loss, metrics = model(
                    hidden_states=rows.hidden[one], input_ids=rows.tokens[one], document_ids=documents,
                    loss_mask=rows.counted[one], verifier_last_hidden_states=rows.final[one],
                    ttt_steps=shape.steps, ttt_step_loss_decay=DECAY, loss_config=loss_config,
                )  # fmt: skip
            (loss / shape.batch).backward()
            first += float(metrics["loss_0_sum"]) / shape.batch
        return float(first + entropy)

    return step


def _llama_config(shape: Shape, **more: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=1,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=max(2048, shape.length + shape.steps), rms_norm_eps=EPS, attention_bias=False,
        mlp_bias=False, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **more,
    )  # fmt: skip


def _load(module: Any, weights: dict[str, Any], own: set[str]) -> None:
    """Load weights into a module that has them all and none besides but `own`."""
    missing, unexpected = module.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - own:
        sys.exit(f"{type(module).__name__}: lacks {unexpected}, wants {sorted(set(missing) - own)} besides")
