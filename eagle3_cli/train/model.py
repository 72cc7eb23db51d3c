"""The drafter as a torch module: the graph of llama.cpp's src/models/eagle3.cpp, unrolled for training-time test.

    g = fc(h)                                  of the three aux layers' states h, divided by `scale` or normed first
    e = N_in(embedding)   u = N_hid(z)         z is g at step 0 and the fed-back row later
    y = r + Wo attention([e; u])               r is u (norm_before_residual) or z
    s = y + mlp(N_post(y))                     the output; logits = lm_head(norm(s)); fed back: s, or norm(s)

Parameters have the names of a SpecForge checkpoint.  Terms and indices: row p of step i reads token t[p+1+i] at RoPE
position p+i and predicts t[p+2+i]; see attention.py for what it sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import OptionError
from .attention import attend

Batch = Mapping[str, Tensor]
"""tokens int64, answer bool, best int64 [B, L]; hidden [B, L, 3 * Ht], final [B, L, Ht]; length int64 [B]: what lies
behind a sample's length is 0 and changes nothing."""


@dataclass(frozen=True)
class DrafterShape:
    """Sizes and switches.  hidden is H, target_width Ht, draft_vocab Vd; the switches are those of docs/checkpoints.md.

    OptionError where they do not fit together.
    """

    hidden: int
    target_width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    draft_vocab: int
    eps: float = 1e-5
    rope_theta: float = 10000.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "target_width", "heads", "kv_heads", "head_dim", "ffn", "vocab", "draft_vocab"):
            if getattr(self, name) < 1:
                raise OptionError(f"drafter: {name}: expected at least 1, got {getattr(self, name)}.")
        if self.heads % self.kv_heads:
            raise OptionError(f"drafter: {self.heads} attention heads cannot share {self.kv_heads} key/value heads.")
        if self.head_dim % 2:
            raise OptionError(f"drafter: head_dim: expected an even number for RoPE, got {self.head_dim}.")
        if self.draft_vocab > self.vocab:
            raise OptionError(
                f"drafter: a draft vocabulary of {self.draft_vocab} is larger than the target's {self.vocab}."
            )
        if self.fc_norm and self.norm_before_fc:
            raise OptionError("drafter: fc_norm and norm_before_fc exclude each other.")

    @property
    def normed_features(self) -> bool:
        """A norm comes before fc, so nothing else scales the features."""
        return self.fc_norm or self.norm_before_fc

    @property
    def own_embeddings(self) -> bool:
        """The target's embeddings have another width."""
        return self.hidden != self.target_width


class StatedSample(Protocol):
    """A sample with the target's states; see shards.py."""

    @property
    def tokens(self) -> Any: ...
    @property
    def answer(self) -> Any: ...
    @property
    def hidden(self) -> Any: ...
    @property
    def final(self) -> Any: ...
    @property
    def best(self) -> Any: ...


def collate(samples: Sequence[StatedSample]) -> dict[str, Tensor]:
    """A batch, padded on the right to its longest sample and to two tokens at least, which make one row."""
    lengths = [len(sample.tokens) for sample in samples]
    longest = max(2, *lengths)

    def padded(name: str, dtype: torch.dtype | None = None) -> Tensor:
        rows = [torch.as_tensor(getattr(sample, name), dtype=dtype) for sample in samples]
        out = rows[0].new_zeros((len(rows), longest, *rows[0].shape[1:]))
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out

    kinds = {"tokens": torch.int64, "answer": torch.bool, "best": torch.int64, "hidden": None, "final": None}
    return {**{name: padded(name, kind) for name, kind in kinds.items()}, "length": torch.tensor(lengths)}


def feature_scale(samples: Sequence[StatedSample]) -> Tensor:
    """float32 [3 * Ht]: root mean square of every channel of h, by which it is divided before fc.

    Residual streams hold channels thousands of times larger than others, which one learning rate does not fit.
    """
    squares = torch.stack([sample.hidden.double().square().sum(0) for sample in samples]).sum(0)
    rms = (squares / sum(len(sample.tokens) for sample in samples)).sqrt().float()
    return rms.clamp(min=1e-6)


class _Attention(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


@dataclass
class _Cache:
    """Keys and values of the steps so far, [B, kv_heads, rows, head_dim] each."""

    keys: list[Tensor]
    values: list[Tensor]


class _Layer(nn.Module):
    """The decoder layer.  Its parts are those of the checkpoint."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.before_attention, self.after_attention = self._before_attention, self._after_attention

    def compile_parts(self) -> None:
        """Let torch.compile merge what surrounds the attention, which is written out by hand."""
        self.before_attention = torch.compile(self._before_attention, dynamic=True)
        self.after_attention = torch.compile(self._after_attention, dynamic=True)

    def halves(self) -> tuple[Tensor, Tensor]:
        """q, k and v as one matrix for the embedding and one for the hidden input, each [q + k + v rows, H]."""
        own = self.self_attn
        both = torch.cat([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight])
        return both[:, : self.shape.hidden], both[:, self.shape.hidden :]

    def forward(self, words: Tensor, z: Tensor, turns: tuple[Tensor, Tensor], weight: Tensor, cache: _Cache) -> Tensor:
        """The output s of one step, [B, rows, H].

        words    the embeddings' part of q, k and v, [B, rows, q + k + v rows]
        z        g or the fed-back row
        turns    cosines and sines of the rows' positions, [rows, head_dim]
        weight   the hidden input's part of q, k and v
        """
        q, k, v, residual = self.before_attention(words, z, turns, weight)
        cache.keys.append(k)
        cache.values.append(v)
        return self.after_attention(attend(q, cache.keys, cache.values), residual)

    def _before_attention(
        self, words: Tensor, z: Tensor, turns: tuple[Tensor, Tensor], weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key and value, [B, heads, rows, head_dim], and the residual."""
        shape, (batch, rows, _) = self.shape, z.shape
        u = self.hidden_norm(z)
        both = (words + F.linear(u, weight)).view(batch, rows, -1, shape.head_dim).transpose(1, 2)
        q, k, v = both.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        residual = u if shape.norm_before_residual else z
        return _turned(q, *turns).to(v.dtype), _turned(k, *turns).to(v.dtype), v, residual

    def _after_attention(self, seen: Tensor, residual: Tensor) -> Tensor:
        y = residual + self.self_attn.o_proj(seen.transpose(1, 2).flatten(2))
        out: Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out


def _turns(positions: int, shape: DrafterShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE, [positions, head_dim], for pairs (i, i + head_dim / 2) as in transformers."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(positions, device=device)[:, None] * shape.rope_theta**-exponents
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos().float(), angles.sin().float()


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-high, low], dim=-1) * sines


class Drafter(nn.Module):
    """An EAGLE-3 drafter.  Buffers besides the parameters:

    d2t           int64 [Vd], absolute target ids, ascending
    draft_index   int64 [V], the inverse, -1 for tokens outside
    scale         float32 [3 * Ht], by which h is divided before fc; export.py folds it into fc
    embedding     the target's [V, H], not part of the state; where H != Ht the drafter has its own (embed_tokens)
    target_head   the rows d2t of the target's head, [Vd, Ht], not part of the state: for the targets of the loss
    """

    d2t: Tensor
    draft_index: Tensor
    scale: Tensor
    embedding: Tensor
    target_head: Tensor

    def __init__(
        self, shape: DrafterShape, d2t: Tensor, embedding: Tensor, target_head: Tensor, scale: Tensor | None = None
    ) -> None:
        """embedding: [V, H]; frozen.  scale: None for ones, which is what a shape with a norm before fc needs."""
        super().__init__()
        _check_shapes(shape, d2t, embedding, target_head)
        if scale is not None and shape.normed_features:
            raise ValueError("features that are normed before fc are not scaled")
        self.shape = shape
        self._add_fusion()
        self.midlayer = _Layer(shape)
        self._add_head()
        if shape.own_embeddings:
            self.embed_tokens = nn.Embedding.from_pretrained(embedding.float(), freeze=True)
        else:
            self.register_buffer("embedding", embedding, persistent=False)
        index = torch.full((shape.vocab,), -1)
        index[d2t] = torch.arange(len(d2t))
        self.register_buffer("d2t", d2t.clone())
        self.register_buffer("draft_index", index, persistent=False)
        self.register_buffer("scale", torch.ones(3 * shape.target_width) if scale is None else scale.float().clone())
        self.register_buffer("target_head", target_head, persistent=False)

    def _add_fusion(self) -> None:
        shape = self.shape
        self.fc = nn.Linear(3 * shape.target_width, shape.hidden, bias=False)
        if shape.norm_before_fc:
            self.input_norm = nn.RMSNorm(3 * shape.target_width, shape.eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(shape.target_width, shape.eps) for _ in range(3))

    def _add_head(self) -> None:
        self.norm = nn.RMSNorm(self.shape.hidden, self.shape.eps)
        self.lm_head = nn.Linear(self.shape.hidden, self.shape.draft_vocab, bias=False)

    # --- the graph

    def embed(self, tokens: Tensor) -> Tensor:
        if self.shape.own_embeddings:
            out: Tensor = self.embed_tokens(tokens)
            return out
        return F.embedding(tokens, self.embedding).float()

    def fuse(self, hidden: Tensor) -> Tensor:
        """g of the aux layers' states: [..., 3 * Ht] -> [..., H], float32."""
        h = hidden.float() / self.scale
        if self.shape.fc_norm:
            parts = zip(self.fc_norm, h.chunk(3, dim=-1), strict=True)
            h = torch.cat([norm(part) for norm, part in parts], dim=-1)
        if self.shape.norm_before_fc:
            h = self.input_norm(h)
        out: Tensor = self.fc(h)
        return out.float()

    def first_input(self, batch: Batch) -> Tensor:
        """The hidden input of step 0 at every position."""
        return self.fuse(batch["hidden"])

    def unroll(self, batch: Batch, steps: int) -> list[Tensor]:
        """The output s of every step, each [B, L - 1, H] in float32.  Rows whose tokens lie behind the sample's end
        are computed from padding and mean nothing; no other row sees them."""
        tokens = batch["tokens"]
        rows = tokens.shape[1] - 1
        of_words, of_hidden = self.midlayer.halves()
        # Step i reads the tokens of step i - 1 shifted by one, so their part of q, k and v is computed once for all.
        embeddings = self.midlayer.input_layernorm(self.embed(F.pad(tokens[:, 1:], (0, steps - 1))))
        words = F.linear(embeddings, of_words)
        cosines, sines = _turns(rows + steps - 1, self.shape, tokens.device)
        z, cache, outputs = self.first_input(batch)[:, :rows], _Cache([], []), []
        for i in range(steps):
            # Copies: what torch.compile gets lies alike at every step, so it compiles once.
            window = [part.narrow(-2, i, rows).clone() for part in (words, cosines, sines)]
            s = self.midlayer(window[0], z, (window[1], window[2]), of_hidden, cache)
            outputs.append(s)
            z = self.norm(s) if self.shape.norm_output else s
        return outputs

    def head_input(self, s: Tensor) -> Tensor:
        """What the head reads of outputs: [..., H] -> [..., H]."""
        out: Tensor = self.norm(s)
        return out

    @property
    def head(self) -> Tensor:
        """The head's weights, [Vd, H]."""
        return self.lm_head.weight

    def logits(self, s: Tensor) -> Tensor:
        """Over the draft vocabulary: [..., H] -> [..., Vd].  For as many rows as memory allows; see loss.py."""
        return F.linear(self.head_input(s), self.head)


class FeatureDrafter(Drafter):
    """EAGLE's first objective for comparison: from the target's final state of a position (after its final norm) to
    that of the next, which the target's own head reads.  No file format of llama.cpp holds it."""

    def __init__(self, shape: DrafterShape, d2t: Tensor, embedding: Tensor, target_head: Tensor) -> None:
        if shape.own_embeddings or shape.norm_output or shape.normed_features:
            raise OptionError("--objective eagle: needs a drafter as wide as the target and without EAGLE 3.1 norms.")
        super().__init__(shape, d2t, embedding, target_head)

    def _add_fusion(self) -> None:
        """The final state goes in as it is."""

    def _add_head(self) -> None:
        """The target's."""

    def first_input(self, batch: Batch) -> Tensor:
        return batch["final"].float()

    def head_input(self, s: Tensor) -> Tensor:
        return s

    @property
    def head(self) -> Tensor:
        return self.target_head


def _check_shapes(shape: DrafterShape, d2t: Tensor, embedding: Tensor, target_head: Tensor) -> None:
    wanted = {
        "d2t": (d2t, (shape.draft_vocab,)),
        "embedding": (embedding, (shape.vocab, shape.hidden)),
        "target_head": (target_head, (shape.draft_vocab, shape.target_width)),
    }
    for name, (tensor, expected) in wanted.items():
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(tensor.shape)}")
