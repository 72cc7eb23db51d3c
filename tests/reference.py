"""Slow, readable definitions of what the product computes fast.  Tests compare the two.

the draft tree          grow_fully, visible_rows
prompt lookup           search
the verification rule   law_of_rule, law_of_plain_sampling
sampling                sampling_law, chi_square_excess
text                    text_until_stop
the models              TargetReference, DrafterReference
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from eagle3_cli.engine.tree import ROOT, Candidates
from eagle3_cli.engine.types import DraftTree
from eagle3_cli.settings import SamplingSettings, TreeShape

# --- the draft tree --------------------------------------------------------------------------------------


def grow_fully(children: Callable[[tuple[int, ...]], Sequence[tuple[int, float]]], shape: TreeShape) -> DraftTree:
    """EAGLE-2 as in the paper: expand the `width` best nodes of every level, rerank all, keep the best `nodes`.

    children   path of tokens from the root -> (token, log-probability) of each child
    Ties go to the node proposed earlier.
    """
    paths: list[tuple[int, ...]] = []
    parents: list[int] = []
    logps: list[float] = []
    expanded = [(ROOT, (), 0.0)]
    for _ in range(shape.depth):
        level = []
        for node, path, logp in expanded:
            for token, p in children(path):
                level.append((len(paths), (*path, token), logp + p))
                paths.append((*path, token))
                parents.append(node)
                logps.append(logp + p)
        best = sorted(level, key=lambda entry: (-entry[2], entry[0]))[: shape.width]
        expanded = sorted(best)
    kept = sorted(sorted(range(len(paths)), key=lambda i: (-logps[i], i))[: shape.nodes])
    new = {ROOT: ROOT, **{old: i for i, old in enumerate(kept)}}
    return depth_first(
        DraftTree(
            tokens=[paths[i][-1] for i in kept],
            parents=[new[parents[i]] for i in kept],
            depths=[len(paths[i]) for i in kept],
            logps=[logps[i] for i in kept],
        )
    )


def depth_first(tree: DraftTree) -> DraftTree:
    """The same tree in the order that the engine wants: each node followed by its descendants, the most probable
    child first, ties as they were."""
    order: list[int] = []

    def visit(node: int) -> None:
        for child in sorted((i for i in range(len(tree)) if tree.parents[i] == node), key=lambda i: -tree.logps[i]):
            order.append(child)
            visit(child)

    visit(ROOT)
    new = {ROOT: ROOT, **{old: i for i, old in enumerate(order)}}
    return DraftTree(
        tokens=[tree.tokens[i] for i in order],
        parents=[new[tree.parents[i]] for i in order],
        depths=[tree.depths[i] for i in order],
        logps=[tree.logps[i] for i in order],
    )


def path_to(tree: DraftTree | Candidates, node: int) -> list[int]:
    """The nodes from the root's child down to `node`; empty for ROOT."""
    path = []
    while node != ROOT:
        path.insert(0, node)
        node = tree.parents[node]
    return path


def tokens_to(tree: DraftTree | Candidates, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[i] for i in path_to(tree, node))


def visible_rows(tree: DraftTree) -> np.ndarray:
    """bool [n+1, n+1]: may batch row i (0 is the root, i+1 a node) see row j?  Exactly its ancestors and itself."""
    seen = np.zeros((len(tree) + 1, len(tree) + 1), bool)
    for node in range(ROOT, len(tree)):
        seen[node + 1, [0, *(i + 1 for i in path_to(tree, node))]] = True
    return seen


# --- prompt lookup -------------------------------------------------------------------------------------------


def search(
    text: Sequence[int], root: int, most: int, count: int, shortest: int, longest: int, checked: int
) -> list[tuple[int, list[int]]]:
    """(length, continuation) of the best `count` earlier occurrences of the end of text + root, by trying every place.

    Of the last `checked` occurrences that agree in `shortest` tokens, the longest is best, then the last; one for each
    token that follows.  A continuation is copied from its place a token at a time, so it may copy from itself.
    """
    text = [*text, root]
    found = []
    for place in range(1, len(text)):  # of the first token that follows
        lengths = [n for n in range(1, min(place, longest) + 1) if text[place - n : place] == text[len(text) - n :]]
        if lengths and lengths[-1] >= shortest:
            found.append((lengths[-1], place))
    best: dict[int, tuple[int, int]] = {}
    for length, place in sorted(found[-checked:]):
        best[text[place]] = length, place
    answer = []
    for length, place in sorted(best.values(), reverse=True)[:count]:
        copy = list(text)
        for i in range(most):
            copy.append(copy[place + i])
        answer.append((length, copy[len(text) :]))
    return answer


# --- the verification rule -----------------------------------------------------------------------------------

Law = dict[Any, Fraction]
Choose = Callable[[Law], Any]
Rule = Callable[[DraftTree, Callable[[int], Law], Choose], Sequence[int]]
"""(tree, node -> the target's law after it, choose) -> emitted tokens.  All randomness goes through `choose`."""


class _NeedsChoice(Exception):
    def __init__(self, law: Law) -> None:
        self.law = law


def _outcomes(run: Callable[[Choose], Any], made: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Fraction]]:
    """Every result of a program with random choices, with its exact probability."""
    script = iter(made)

    def choose(law: Law) -> Any:
        for value in script:
            return value
        raise _NeedsChoice(law)

    try:
        result = run(choose)
    except _NeedsChoice as need:
        for value, p in need.law.items():
            if p:
                for result, rest in _outcomes(run, (*made, value)):
                    yield result, p * rest
    else:
        yield result, Fraction(1)


def law_of_rule(
    rule: Rule, tree: DraftTree, target: Callable[[tuple[int, ...]], Law], length: int
) -> dict[tuple[int, ...], Fraction]:
    """Exact law of the first `length` tokens when one round of `rule` is followed by plain sampling."""

    def run(choose: Choose) -> tuple[int, ...]:
        tokens = list(rule(tree, lambda node: target(tokens_to(tree, node)), choose))
        while len(tokens) < length:
            tokens.append(choose(target(tuple(tokens))))
        return tuple(tokens[:length])

    law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for tokens, p in _outcomes(run):
        law[tokens] += p
    return dict(law)


def law_of_plain_sampling(target: Callable[[tuple[int, ...]], Law], length: int) -> dict[tuple[int, ...], Fraction]:
    return law_of_rule(lambda tree, law, choose: [], DraftTree(), target, length)


def probability(event: Callable[[Choose], bool]) -> Fraction:
    """Exact probability that a program with random choices returns True."""
    return sum((p for happened, p in _outcomes(event) if happened), Fraction(0))


# --- sampling ------------------------------------------------------------------------------------------------


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def sampling_law(logits: np.ndarray, settings: SamplingSettings) -> np.ndarray:
    """float64 [V]: what llama.cpp's chain draws from without penalties, typical sampling and adaptive-p, XTC happening
    always or never."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")
    scaled = logits.copy()
    for name in settings.samplers:
        p = _softmax(scaled[order])
        if name == "top_n_sigma" and settings.top_n_sigma > 0:
            kept = scaled[order]
            order = order[kept >= kept.max() - settings.top_n_sigma * kept.std()]
        elif name == "top_k" and settings.top_k > 0:
            order = order[: settings.top_k]
        elif name == "top_p" and settings.top_p < 1:
            order = order[: int(np.searchsorted(np.cumsum(p), settings.top_p)) + 1]
        elif name == "min_p" and settings.min_p > 0:
            order = order[p >= settings.min_p * p[0]]
        elif name == "xtc" and settings.xtc_probability == 1 and settings.xtc_threshold <= 0.5:
            order = order[max(int((p >= settings.xtc_threshold).sum()) - 1, 0) :]
        elif name == "temperature":
            scaled /= _dynamic_temperature(p, settings)
    law = np.zeros(len(logits))
    law[order] = _softmax(scaled[order])
    return law


def _dynamic_temperature(p: np.ndarray, settings: SamplingSettings) -> float:
    """Lower where the distribution is sharp: entropy as a share of its maximum, to a power, between two bounds."""
    low = max(0.0, settings.temperature - settings.dynatemp_range)
    share = float(-(p * np.log(p)).sum() / np.log(len(p))) if len(p) > 1 else 0.0
    high = settings.temperature + settings.dynatemp_range
    return low + (high - low) * share**settings.dynatemp_exponent


def mirostat_2(p: np.ndarray, settings: SamplingSettings, tokens: Sequence[int]) -> np.ndarray:
    """The law of Mirostat 2.0 (Basu et al. 2021) after these tokens, p having been the law without it at each."""

    def cut(mu: float) -> np.ndarray:
        kept = -np.log2(p) <= mu
        kept[p.argmax()] = True
        return np.where(kept, p, 0.0) / p[kept].sum()

    mu = 2 * settings.mirostat_ent
    for token in tokens:
        mu -= settings.mirostat_lr * (-np.log2(cut(mu)[token]) - settings.mirostat_ent)
    return cut(mu)


def mirostat_1_keeps(p: np.ndarray, settings: SamplingSettings) -> int:
    """How many of the likeliest tokens the first version keeps at first: p taken as Zipf's law with an exponent from
    the hundred likeliest ones."""
    ranked, n = np.sort(p)[::-1][:100], np.arange(1, 100)
    t, b = np.log((n + 1) / n), np.log(ranked[:-1] / ranked[1:])
    s = float((t * b).sum() / (t * t).sum())
    return int(((s - 1) * 4**settings.mirostat_ent / (1 - len(p) ** (1 - s))) ** (1 / s))


def adaptive_p(p: np.ndarray, settings: SamplingSettings, tokens: Sequence[int]) -> np.ndarray:
    """The law of adaptive-p after these tokens, p having been the law without it at each: highest near a target that
    moves against what the drawn tokens' probabilities were on average."""
    decay = settings.adaptive_decay
    total, weight = settings.adaptive_target / (1 - decay), 1 / (1 - decay)
    for token in tokens:
        total, weight = p[token] + decay * total, 1 + decay * weight
    aim = min(max(2 * settings.adaptive_target - total / weight, 0.0), 1.0)
    away = np.abs(p - aim) / 0.3
    return _softmax(np.where(p > 0, -10 * away**2 / (1 + away), -np.inf))


def chi_square_excess(counts: np.ndarray, law: np.ndarray) -> float:
    """How many standard deviations Pearson's statistic lies above what the law makes likely (Wilson-Hilferty).

    Outcomes expected less than 5 times are pooled.  Infinite if something impossible was counted.
    """
    if counts[law == 0].any():
        return math.inf
    expected = law * counts.sum()
    rare = expected < 5
    e, c = [*expected[~rare]], [*counts[~rare]]
    if expected[rare].sum() > 0:
        e, c = [*e, expected[rare].sum()], [*c, counts[rare].sum()]
    statistic = sum((x - y) ** 2 / y for x, y in zip(c, e, strict=True))
    freedom = len(e) - 1
    if freedom == 0:
        return 0.0
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


# --- text ----------------------------------------------------------------------------------------------------


def text_until_stop(pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[str, int]:
    """The text of an answer and how many tokens it takes: up to the first stop string that a token completes."""
    for n in range(len(pieces) + 1):
        text = whole_characters(b"".join(pieces[:n]))
        starts = [text.find(stop) for stop in stops if stop in text]
        if starts:
            return text[: min(starts)], n
    return b"".join(pieces).decode("utf-8", "replace"), len(pieces)


def whole_characters(data: bytes) -> str:
    """Decoded, without a last character that more bytes could still complete."""
    for n in (1, 2, 3):
        try:
            data[-n:].decode("utf-8")
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return data[:-n].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


# --- the models ----------------------------------------------------------------------------------------------


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rope(x: np.ndarray, position: int, base: float) -> np.ndarray:
    """Rotate neighbouring pairs (2i, 2i+1) of each head by position * base^(-2i/d); x [heads, d]."""
    d = x.shape[-1]
    angle = position * base ** (-np.arange(0, d, 2) / d)
    even, odd = x[:, 0::2], x[:, 1::2]
    out = np.empty_like(x)
    out[:, 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[:, 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _half(x: np.ndarray) -> np.ndarray:
    """What a float16 KV cache keeps of it."""
    return x.astype(np.float16).astype(np.float64)


def _exactly(x: np.ndarray) -> np.ndarray:
    """What a float32 KV cache keeps of it, as far as it matters here."""
    return x


class _Layer:
    """One decoder layer of llama, fed row by row.  Every row says itself which rows it sees.

    kept   what the KV cache makes of a number
    """

    def __init__(
        self, weights: dict[str, np.ndarray], config: Any, name: str, kept: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self.w = {k.removeprefix(f"{name}.").removesuffix(".weight"): v.astype(np.float64) for k, v in weights.items()}
        self.config, self.kept = config, kept
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def row(self, x: np.ndarray, residual: np.ndarray, position: int, seen: Sequence[int]) -> np.ndarray:
        """Output of the layer for one row.  x: what attention reads, normed.  seen: earlier rows of this layer."""
        c = self.config
        q = _rope((self.w["attn_q"] @ x).reshape(c.heads, c.head_dim), position, c.rope_base)
        k = _rope((self.w["attn_k"] @ x).reshape(c.kv_heads, c.head_dim), position, c.rope_base)
        v = (self.w["attn_v"] @ x).reshape(c.kv_heads, c.head_dim)
        self.keys.append(self.kept(k))
        self.values.append(self.kept(v))
        rows = [*seen, len(self.keys) - 1]
        heads = []
        for h in range(c.heads):
            group = h // (c.heads // c.kv_heads)
            scores = np.array([q[h] @ self.keys[r][group] for r in rows]) / math.sqrt(c.head_dim)
            heads.append(_softmax(scores) @ np.array([self.values[r][group] for r in rows]))
        h = residual + self.w["attn_output"] @ np.concatenate(heads)
        y = _rms_norm(h, self.w["ffn_norm"], c.eps)
        return h + self.w["ffn_down"] @ (_silu(self.w["ffn_gate"] @ y) * (self.w["ffn_up"] @ y))


class TargetReference:
    """A llama model in float64 with a float32 KV cache, token by token.  After `row`: `inputs` are the inputs of its
    layers at that row, and last the output of the last one."""

    def __init__(self, weights: dict[str, np.ndarray], config: Any) -> None:
        self.w, self.config = {k: v.astype(np.float64) for k, v in weights.items()}, config
        self.layers = []
        for i in range(config.layers):
            own = {k: v for k, v in weights.items() if k.startswith(f"blk.{i}.")}
            self.layers.append(_Layer(own, config, f"blk.{i}", _exactly))
        self.inputs: list[np.ndarray] = []

    def row(self, token: int, position: int, seen: Sequence[int]) -> np.ndarray:
        """Logits after a token that sees the earlier rows `seen`; float64 [V]."""
        x = self.w["token_embd.weight"][token]
        self.inputs = []
        for layer in self.layers:
            self.inputs.append(x)
            x = layer.row(_rms_norm(x, layer.w["attn_norm"], self.config.eps), x, position, seen)
        self.inputs.append(x)
        return self.w["output.weight"] @ _rms_norm(x, self.w["output_norm.weight"], self.config.eps)

    def read(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Of a plain sequence from position 0: logits [n, V], and layer inputs [n, layers + 1, width]."""
        logits, inputs = [], []
        for position, token in enumerate(tokens):
            logits.append(self.row(token, position, range(position)))
            inputs.append(np.array(self.inputs))
        return np.array(logits), np.array(inputs)


class DrafterReference:
    """EAGLE-3's drafter in float64, row by row, as in the paper (section 3.1) and llama.cpp's src/models/eagle3.cpp.
    Its KV cache is float16.  Switches that llama.cpp's graph lacks are in the config; see tiny.DrafterConfig.

    embedding, head   its own or the target's
    """

    def __init__(
        self, weights: dict[str, np.ndarray], config: Any, embedding: np.ndarray, head: np.ndarray, d2t: Any
    ) -> None:
        self.w, self.config, self.d2t = {k: v.astype(np.float64) for k, v in weights.items()}, config, d2t
        self.embedding, self.head = embedding.astype(np.float64), head.astype(np.float64)
        self.layer = _Layer({k: v for k, v in weights.items() if k.startswith("blk.0.")}, config, "blk.0", _half)
        self.positions: list[int] = []  # of the layer's rows

    def fuse(self, aux: np.ndarray) -> np.ndarray:
        """g of one position from the inputs of the three aux layers, side by side."""
        if self.config.fc_norm:
            thirds = zip(aux.reshape(3, -1), self.w["fc_norm"], strict=True)
            aux = np.concatenate([_rms_norm(x, weight, self.config.eps) for x, weight in thirds])
        if self.config.norm_before_fc:
            aux = _rms_norm(aux, self.w["enc.output_norm.weight"], self.config.eps)
        return self.w["fc.weight"] @ aux

    def row(
        self, token: int, feature: np.ndarray, position: int, seen: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(the next step's feature, logits of the draft vocabulary, their log-probabilities) of one pair.

        seen: earlier rows, of which those behind the window are not looked at.
        """
        eps, window = self.config.eps, self.config.window
        seen = [r for r in seen if window is None or position - self.positions[r] < window]
        self.positions.append(position)
        normed = _rms_norm(feature, self.layer.w["attn_norm_2"], eps)
        x = np.concatenate([_rms_norm(self.embedding[token], self.layer.w["attn_norm"], eps), normed])
        out = self.layer.row(x, normed if self.config.norm_before_residual else feature, position, seen)
        final = _rms_norm(out, self.w["output_norm.weight"], eps) if self.config.final_norm else out
        logits = self.head @ final
        return final if self.config.norm_output else out, logits, np.log(_softmax(logits))

    def best(self, logps: np.ndarray, k: int) -> list[tuple[int, float]]:
        """The k most probable tokens as target ids."""
        ids = np.arange(len(logps)) if self.d2t is None else self.d2t
        return [(int(ids[i]), float(logps[i])) for i in np.argsort(-logps, kind="stable")[:k]]
