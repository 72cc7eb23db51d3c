"""Aux layers: which hidden states of the target are meant (sglang 25454)."""

from __future__ import annotations

import pytest

from eagle3_cli.convert.layers import KEY, choose_layers
from eagle3_cli.errors import CheckpointError, OptionError


def nested(ids):
    return {"eagle_config": {KEY: ids}}


@pytest.mark.parametrize(
    ("config", "layers", "expected"),
    [
        ({}, 24, (2, 12, 21)),
        ({KEY: None}, 24, (2, 12, 21)),
        (nested(None), 30, (2, 15, 27)),
        (nested([1, 11, 21]), 24, (2, 12, 22)),  # gpt-oss-20b
        ({KEY: [2, 12, 22]}, 24, (2, 12, 22)),
        ({KEY: [1, 11, 21]}, 24, (2, 12, 22)),
        (nested([2, 15, 27]), 30, (2, 15, 27)),
        (nested([1, 17, 33]), 36, (2, 18, 34)),  # gpt-oss-120b
        ({KEY: [1, 46, 90]}, 94, (2, 47, 91)),  # Qwen3-235B
        ({KEY: [24, 30, 36]}, 36, (24, 30, 36)),  # the last layer's output before the final norm
        (nested([3, 10, 20]), 24, (4, 11, 21)),
        ({KEY: [3, 10, 20]}, 24, (3, 10, 20)),
        ({KEY: [2, 12, 22], **nested([1, 11, 21])}, 24, (2, 12, 22)),
        ({KEY: [2, 15, 27], **nested([2, 15, 27])}, 30, (2, 15, 27)),
    ],
)
def test_rule(config, layers, expected):
    assert choose_layers(config, layers).inputs == expected


@pytest.mark.parametrize(
    ("config", "convention", "expected"),
    [
        (nested([1, 11, 21]), "input", (1, 11, 21)),
        ({KEY: [2, 12, 22]}, "output", (3, 13, 23)),
        (nested([24, 30, 36]), "input", (24, 30, 36)),
    ],
)
def test_convention_overrides_the_rule(config, convention, expected):
    assert choose_layers(config, 36, convention).inputs == expected


@pytest.mark.parametrize(
    "ids", [[0, 1, 2], [1, 2], [5, 5, 5], [2, 12, 25], [1, 2, 3, 4], [9, 5, 12], [True, 2, 3], [1.0, 2, 3], "2", {}, []]
)
@pytest.mark.parametrize("place", [nested, lambda ids: {KEY: ids}])
def test_anything_else_is_an_error(ids, place):
    with pytest.raises(CheckpointError, match=KEY):
        choose_layers(place(ids), 24)


def test_two_lists_that_differ_are_not_guessed():
    with pytest.raises(CheckpointError, match="means different layers"):
        choose_layers({KEY: [3, 12, 22], **nested([3, 12, 22])}, 24)


def test_an_output_beyond_the_last_layer_hints_at_the_convention():
    with pytest.raises(CheckpointError) as caught:
        choose_layers(nested([1, 30, 36]), 36)
    assert "--aux-convention input" in caught.value.hint


def test_nested_ids_that_reach_the_number_of_layers_can_only_be_inputs():
    """gpt-oss-120b v3: 36 is the output of the last of 36 layers, before the final norm."""
    found = choose_layers(nested([24, 30, 36]), 36)
    assert found.inputs == (24, 30, 36)
    assert "counted as outputs, 36 would lie behind the last of 36 layers" in found.how
    assert choose_layers(nested([24, 30, 36]), 40).inputs == (25, 31, 37)


@pytest.mark.parametrize(
    ("config", "expected"),
    [(nested([1, 11, 21]), (2, 12, 22)), ({KEY: [2, 12, 22]}, (2, 12, 22)), ({KEY: [3, 9, 20]}, (3, 9, 20))],
)
def test_without_a_target_the_rule_still_decides_most_lists(config, expected):
    assert choose_layers(config, None).inputs == expected


def test_without_a_target_ids_are_still_layers_of_some_model():
    with pytest.raises(CheckpointError, match="expected ids up to 512"):
        choose_layers({KEY: [2, 12, 2**40]}, None)


def test_without_a_target_the_ambiguous_is_not_guessed():
    with pytest.raises(CheckpointError, match="depends on the target's layers"):
        choose_layers(nested([24, 30, 36]), None)
    assert choose_layers(nested([24, 30, 36]), None, "input").inputs == (24, 30, 36)
    with pytest.raises(CheckpointError, match="the default depends on the target's number of layers"):
        choose_layers({}, None)


def test_convention_without_ids_has_no_effect():
    with pytest.raises(OptionError, match="no effect"):
        choose_layers({}, 24, "input")


def test_the_reading_is_explained():
    assert choose_layers(nested([1, 11, 21]), 24).how == (
        "[1, 11, 21] (eagle_config) read as layer outputs, one added: the first id is 1"
    )


def test_a_small_target_has_no_default():
    with pytest.raises(CheckpointError, match="does not fit a target of 6 layers"):
        choose_layers({}, 6)
