"""Attention of training-time test against a dense mask over all keys of all steps."""

from __future__ import annotations

import resource

import pytest
import torch

from eagle3_cli.train.attention import attend

torch.set_num_threads(1)

# Eight tokens make seven rows; row p, step i.  '|' separates the keys of steps 0, 1 and 2, each of rows 0..6.
SEEN_AT_STEP_2 = """
1000000|1000000|1000000
1100000|0100000|0100000
1110000|0010000|0010000
1111000|0001000|0001000
1111100|0000100|0000100
1111110|0000010|0000010
1111111|0000001|0000001
"""


def seen(length: int, steps: int) -> torch.Tensor:
    """bool [L, steps * L]: the causal triangle, then diagonals."""
    own = torch.eye(length, dtype=torch.bool)
    return torch.cat([torch.ones(length, length).tril().bool(), *[own] * (steps - 1)], dim=1)


def dense(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """The same by one masked softmax over all keys of all steps."""
    group = query.shape[1] // keys[0].shape[1]
    key, value = (torch.cat(list(x), dim=2).repeat_interleave(group, dim=1) for x in (keys, values))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen(query.shape[2], len(keys)), float("-inf"))
    return scores.softmax(-1) @ value


def random_inputs(
    steps: int, length: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(steps * 1000 + length)

    def make(count: int) -> torch.Tensor:
        return torch.randn(2, count, length, 6, generator=generator, dtype=dtype).requires_grad_()

    return make(heads[0]), [make(heads[1]) for _ in range(steps)], [make(heads[1]) for _ in range(steps)]


@pytest.mark.parametrize("length", [1, 7, 64, 65, 150])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_output_and_gradients_are_those_of_the_dense_form(length: int, steps: int) -> None:
    query, keys, values = random_inputs(steps, length)
    inputs = [query, *keys, *values]
    weights = torch.randn_like(query)
    fast, slow = attend(query, keys, values), dense(query, keys, values)
    torch.testing.assert_close(fast, slow)
    for ours, theirs in zip(
        torch.autograd.grad((fast * weights).sum(), inputs),
        torch.autograd.grad((slow * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (5, 1)])
def test_query_heads_share_key_heads_as_in_transformers(heads: tuple[int, int]) -> None:
    query, keys, values = random_inputs(3, 9, heads)
    torch.testing.assert_close(attend(query, keys, values), dense(query, keys, values))


def test_eight_tokens_see_what_the_table_says() -> None:
    """Each key's value is a unit vector, so the output says with which weight the key was seen."""
    table = torch.tensor([[c == "1" for c in line if c != "|"] for line in SEEN_AT_STEP_2.split()])
    keys = [torch.zeros(1, 1, 7, 21) for _ in range(3)]
    values = list(torch.eye(21).view(1, 1, 3, 7, 21).unbind(2))
    weights = attend(torch.zeros(1, 1, 7, 21), keys, values)[0, 0]
    torch.testing.assert_close(weights, table / table.sum(1, keepdim=True))


def test_gradients_pass_torchs_finite_difference_check() -> None:
    query, keys, values = random_inputs(3, 4)
    assert torch.autograd.gradcheck(lambda q, *kv: attend(q, kv[:3], kv[3:]), (query, *keys, *values))


def test_half_precision_input_is_summed_in_float32() -> None:
    query, keys, values = random_inputs(3, 300, dtype=torch.float32)
    halves = [[x.detach().bfloat16().requires_grad_() for x in group] for group in ([query], keys, values)]
    out = attend(halves[0][0], halves[1], halves[2])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), dense(query, keys, values), atol=0.03, rtol=0.03)
    out.float().square().sum().backward()
    dense(query, keys, values).square().sum().backward()
    assert torch.nn.functional.cosine_similarity(halves[1][0].grad.float().flatten(), keys[0].grad.flatten(), 0) > 0.999


def test_twenty_thousand_tokens_need_no_square_matrix() -> None:
    """The scores of all pairs would take 1.6 GB in each of the passes."""
    make = lambda: torch.randn(1, 1, 20_000, 4, requires_grad=True)  # noqa: E731
    query, keys, values = make(), [make(), make()], [make(), make()]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attend(query, keys, values).sum().backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert query.grad is not None
    assert torch.isfinite(query.grad).all()
    assert grown < 200e6
