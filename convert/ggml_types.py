"""Number types of ggml, and which of them llama.cpp's quantiser gives to each tensor of a drafter.

Tables only.  Layouts: ggml/src/ggml-common.h.  The rule: src/llama-quant.cpp, llama_tensor_get_type, at 0c1e570.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One number type.

    number   in enum ggml_type
    block    consecutive elements of a row that are stored together
    size     bytes of a block
    scales   offsets in bytes of the block's float16 scales, in a quantised type
    reach    at least the largest multiple of a scale that an element can be
    error    largest error that quantising may make of an element, relative to the largest magnitude of its block.  It
             follows from the format for *_0 and *_1.  Where ggml searches for scales it is a little more than climbing
             from the worst of many random blocks reached: 0.83 0.34 0.16 0.09 0.03 for Q2_K to Q6_K, 0.2 for IQ4.
    """

    number: int
    block: int
    size: int
    scales: tuple[int, ...] = ()
    reach: int = 0
    error: float = 0.0


_HALF = 2.0**-11  # relative error of a scale that is rounded to float16

KINDS = {
    "F32": Kind(0, 1, 4),
    "F16": Kind(1, 1, 2),
    "BF16": Kind(30, 1, 2),
    "I64": Kind(27, 1, 8),
    "Q8_0": Kind(8, 32, 34, (0,), 127, 0.5 / 127 + _HALF),
    "Q4_0": Kind(2, 32, 18, (0,), 8, 1 / 8 + _HALF),  # a whole step: +8 is cut to +7
    "Q5_0": Kind(6, 32, 22, (0,), 16, 1 / 16 + _HALF),
    "Q4_1": Kind(3, 32, 20, (0, 2), 16, 1 / 15 + 3 * _HALF),  # half a step of 1/15 of twice the largest magnitude
    "Q5_1": Kind(7, 32, 24, (0, 2), 32, 1 / 31 + 3 * _HALF),
    "Q2_K": Kind(10, 256, 84, (80, 82), 60, 0.95),
    "Q3_K": Kind(11, 256, 110, (108,), 128, 0.5),
    "Q4_K": Kind(12, 256, 144, (0, 2), 1008, 0.25),
    "Q5_K": Kind(13, 256, 176, (0, 2), 2016, 0.13),
    "Q6_K": Kind(14, 256, 210, (208,), 4096, 0.08),
    "IQ4_NL": Kind(20, 32, 18, (0,), 127, 0.3),
    "IQ4_XS": Kind(23, 256, 136, (0,), 4064, 0.3),
}

# What a user can ask for -> the type of most matrices.  Not here: types that are garbage without an importance matrix
# (iq1, iq2, iq3_xxs, q2_k_s), and mxfp4, which the quantiser gives only to experts: a drafter would become Q8_0.
OUTTYPES = {
    "f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0",
    "q4_0": "Q4_0", "q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1", "q2_k": "Q2_K",
    "q3_k_s": "Q3_K", "q3_k_m": "Q3_K", "q3_k_l": "Q3_K", "q4_k_s": "Q4_K", "q4_k_m": "Q4_K",
    "q5_k_s": "Q5_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K", "iq4_nl": "IQ4_NL", "iq4_xs": "IQ4_XS",
}  # fmt: skip

_V, _DOWN, _OUT = "blk.0.attn_v.weight", "blk.0.ffn_down.weight", "blk.0.attn_output.weight"

# Matrices of the layer that get another type.  The quantiser counts layers; this is what comes out for one layer.
MIXTURES = {
    "q2_k": {_V: "Q3_K", _DOWN: "Q3_K", _OUT: "Q3_K"},
    "q3_k_m": {_V: "Q5_K", _DOWN: "Q4_K", _OUT: "Q4_K"},
    "q3_k_l": {_V: "Q5_K", _DOWN: "Q5_K", _OUT: "Q5_K"},
    "q4_k_s": {_V: "Q5_K"},
    "q4_k_m": {_V: "Q6_K", _DOWN: "Q6_K"},
    "q5_k_m": {_V: "Q6_K", _DOWN: "Q6_K"},
}
# ... and attn_v where four or more query heads share it
SHARED_V = {"q2_k": "Q4_K", "iq4_nl": "Q5_K", "iq4_xs": "Q5_K"}

# Blocks of 256 -> blocks of 32, for rows that do not fit; F16 where these do not fit either.
FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}


@dataclass(frozen=True)
class Rule:
    """outtype: a key of `OUTTYPES`; sharing: query heads per key head; own_head: whether the file has output.weight."""

    outtype: str
    sharing: int
    own_head: bool

    def kind(self, name: str, columns: int) -> str:
        """Type of the matrix with this GGUF name and row length, the one that `llama-quantize` would choose."""
        wanted = self._wanted(name, columns)
        while columns % KINDS[wanted].block:
            wanted = FALLBACK.get(wanted, "F16")
        return wanted

    def _wanted(self, name: str, columns: int) -> str:
        most = OUTTYPES[self.outtype]
        if KINDS[most].block == 1:
            return most
        # the head decides which token comes out, and embeddings without a head of their own pass for one
        if name == "output.weight" or (name == "token_embd.weight" and not self.own_head):
            return "Q8_0" if most == "Q8_0" or columns % KINDS[most].block else "Q6_K"
        if name == _V and self.sharing >= 4 and self.outtype in SHARED_V:
            return SHARED_V[self.outtype]
        return MIXTURES.get(self.outtype, {}).get(name, most)
