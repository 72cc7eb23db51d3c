"""Records of rounds become plain data and sentences."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced import HOSTILE, MATCHED, PLAIN, TREE, WALKED, Words, traced

from eagle3_cli.console import visible
from eagle3_cli.engine.loop import Watch
from eagle3_cli.engine.types import DRAFTED, DraftTree, Piece, Verdict
from eagle3_cli.settings import Limits, SamplingSettings
from eagle3_cli.trace import Trace
from eagle3_cli.trace_data import BYTES, CONTROL, LONGEST_PROMPT, TEXT, data_of, quoted, spelled


@pytest.fixture
def shown():
    """The data of the answer made by hand."""
    return data_of(traced().answers)["answers"][0]


def only_round(record, pieces=()):
    """The data of a round that is an answer's first."""
    trace = Trace(None, Words(lambda token: f"w{token}".encode()))
    trace.begin("", "")
    trace.piece(Piece("x", 1))
    trace.round(record)
    for piece in pieces:
        trace.piece(piece)
    return data_of(trace.answers)["answers"][0]["rounds"][1]


# ---- rounds ---------------------------------------------------------------------------------------------


def test_every_token_is_in_the_round_that_emitted_it_with_what_proposed_it(shown):
    emitted = [entry["emitted"] for entry in shown["rounds"]]
    assert emitted == [[[1, 0]], [[2, 1], [3, 3], [9, 0]], [[5, 0]], [[6, 2], [7, 2], [8, 0]]]


def test_a_node_has_its_probability_after_its_parent_and_that_of_its_path(shown):
    assert shown["rounds"][1]["tree"] == [
        [2, -1, 0.6, 0.6, 1],
        [3, 0, 0.5, 0.3, 3],
        [4, 1, None, None, 2],
        [10, -1, 0.2, 0.2, 1],
    ]


def test_a_proposal_of_the_drafter_behind_one_of_a_match_alone_has_no_probability():
    tree = DraftTree([2, 3], [-1, 0], [1, 2], [float("-inf")] * 2, [2, 3])
    nodes = only_round(replace(WALKED, tree=tree, verdict=Verdict([4], [])))["tree"]
    assert [node[2:4] for node in nodes] == [[None, None], [None, None]]


def test_a_tree_without_sources_is_the_drafters():
    bare = only_round(replace(WALKED, tree=replace(TREE, sources=())))
    assert {node[4] for node in bare["tree"]} == {DRAFTED}


def test_the_token_behind_the_accepted_ones_is_the_targets_own(shown):
    assert [(entry["accepted"], entry["drawn"]) for entry in shown["rounds"]] == [
        ([], 1),
        ([0, 1], 9),
        ([], 5),
        ([0, 1], 8),
    ]


def test_an_answer_that_ends_at_an_accepted_token_has_none_behind_it():
    assert only_round(replace(WALKED, verdict=Verdict([2, 3], [0, 1])))["drawn"] is None


def test_times_are_milliseconds_and_plain_decoding_is_that_of_all_tokens(shown):
    assert shown["rounds"][1]["ms"] == {"draft": 3.0, "verify": 20.0, "rest": 2.0, "all": 25.0, "plain": 30.0}
    assert [entry["rows"] for entry in shown["rounds"]] == [7, 5, 1, 3]
    assert only_round(replace(PLAIN, plain_s=None))["ms"]["plain"] is None


# ---- words ----------------------------------------------------------------------------------------------


def test_a_round_is_told_in_three_sentences():
    assert only_round(WALKED)["words"] == [
        "After “w1”, the drafter and a match with earlier text proposed 4 tokens on 3 levels.",
        "The target checked them all in one pass of 5 rows and drew “w2w3”, 2 tokens as proposed, and then “w9” of its"
        " own.",
        "That gave 3 tokens in 25.0 ms; plain decoding would have taken about 30.0 ms: 5.0 ms saved.",
    ]


def test_a_plain_round_says_that_nothing_was_proposed():
    assert only_round(PLAIN)["words"] == [
        "Nothing was proposed.",
        "The target computed one row and drew “w5”.",
        "That gave 1 token in 10.5 ms, plainly; such a round takes about 10.0 ms.",
    ]


def test_a_drafter_that_was_asked_in_vain_is_mentioned():
    assert only_round(replace(PLAIN, asked=True))["words"][0].startswith("The drafter was asked")


def test_a_match_that_lost_time_says_so():
    words = only_round(MATCHED)["words"]
    assert words[0] == "After “w5”, a match with earlier text proposed 2 tokens on 2 levels."
    assert words[2].endswith("about 30.0 ms: 11.0 ms lost.")


def test_a_refused_proposal_is_told_with_what_was_drawn_instead():
    one = DraftTree([2], [-1], [1], [-0.5], [DRAFTED])
    entry = only_round(replace(WALKED, tree=one, verdict=Verdict([9], []), plain_s=None))
    assert entry["label"] == "Round 1 of 1: 1 token, 0 of 1 proposal accepted, 25.0 ms"
    assert entry["words"] == [
        "After “w1”, the drafter proposed 1 token.",
        "The target checked it in one pass of 2 rows and drew “w9”, which was not proposed there, so nothing was"
        " accepted.",
        "That gave 1 token in 25.0 ms; how long plain decoding takes was not measured.",
    ]


def test_an_answer_that_ended_within_the_tree_says_so():
    assert (
        "“w2w3”, 2 tokens as proposed; there"
        in only_round(replace(WALKED, verdict=Verdict([2, 3], [0, 1])))["words"][1]
    )


def test_the_prompts_pass_is_number_zero(shown):
    assert shown["rounds"][0]["label"] == "The prompt: 11 tokens, 4 of them known already, 70.0 ms"
    assert shown["rounds"][0]["words"][0] == (
        "The target read the prompt (11 tokens, 4 of them known already) and drew the first token, “The”."
    )


def test_tokens_that_are_one_character_together_are_told_as_that(shown):
    assert "drew “€”, 2 tokens as proposed, and then “⟨end⟩” of its own." in shown["rounds"][3]["words"][1]


def test_a_quoted_token_stays_on_one_line():
    assert quoted("  a b\n") == "“\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}a b↵”"


# ---- tokens ---------------------------------------------------------------------------------------------


def test_a_part_of_a_character_is_shown_as_bytes_and_a_control_token_by_its_name(shown):
    assert shown["texts"]["6"] == [r"\xe2\x82", BYTES]
    assert shown["texts"]["7"] == [r"\xac", BYTES]
    assert shown["texts"]["8"] == ["⟨end⟩", CONTROL]
    assert spelled(b"", "<|im_start|>") == ("⟨<|im_start|>⟩", CONTROL)
    assert spelled(b"", "\x1b]0;title") == ("⟨\\u001b]0;title⟩", CONTROL)


def test_a_control_token_that_was_proposed_is_named_as_in_the_vocabulary():
    trace = Trace(None, Words(lambda token: b"" if token == 8 else b"w"))
    trace.begin("", "")
    trace.piece(Piece("w", 1))
    tree = DraftTree([8], [-1], [1], [-0.1], [DRAFTED])
    trace.round(replace(WALKED, tree=tree, verdict=Verdict([9], [])))
    trace.piece(Piece("w", 9))
    data = data_of(trace.answers)["answers"][0]
    assert data["texts"]["8"] == ["⟨<8>⟩", CONTROL]


def test_control_characters_are_written_out(shown):
    assert shown["texts"]["9"] == [visible(HOSTILE), TEXT]
    assert "\x1b" not in json.dumps(shown, ensure_ascii=False)


@given(st.text(min_size=1))
def test_a_token_of_whole_characters_is_shown_as_the_console_shows_it(text):
    assert spelled(text.encode()) == (visible(text), TEXT)


@given(st.binary(min_size=1))
def test_whatever_bytes_a_token_has_it_is_shown_and_has_no_control_character(data):
    text, _ = spelled(data)
    assert text
    assert visible(text) == text


# ---- answers --------------------------------------------------------------------------------------------


def test_the_summary_has_counts_rates_and_acceptance_by_depth(shown):
    summary = shown["summary"]
    assert (summary["tokens"], summary["rounds"], summary["accepted"], summary["drafted"]) == (7, 3, 4, 6)
    assert summary["tau"] == pytest.approx(7 / 3)
    assert summary["tokens_per_second"] == pytest.approx(7 / 0.0765)
    assert summary["by_depth"] == [[2, 2], [2, 2], [0, 1]]
    assert not summary["interrupted"]


def test_an_interrupted_answer_is_counted_as_far_as_it_came():
    trace = traced()
    trace.answers[0].statistics = None
    del trace.answers[0].pieces[3:]  # within the first round
    del trace.answers[0].rounds[1:], trace.answers[0].starts[1:]
    shown = data_of(trace.answers)["answers"][0]
    assert shown["rounds"][1]["emitted"] == [[2, 1], [3, 3]]
    assert shown["summary"]["interrupted"]
    assert (shown["summary"]["tokens"], shown["summary"]["rounds"], shown["summary"]["tau"]) == (3, 1, 3.0)


def test_an_answer_that_was_interrupted_before_its_first_token_has_only_the_prompt():
    trace = Trace(None, Words(bytes))
    trace.begin("demo", "Hi")
    shown = data_of(trace.answers)["answers"][0]
    assert [entry["words"][0] for entry in shown["rounds"]] == [
        "The target read the prompt and was interrupted before the first token."
    ]


def test_a_long_prompt_is_cut_and_says_how_much_is_missing():
    trace = Trace(None, Words(bytes))
    trace.begin("demo", "a" * LONGEST_PROMPT + "bc")
    assert data_of(trace.answers)["answers"][0]["prompt"] == "a" * LONGEST_PROMPT + " … (2 more characters)"


def test_data_is_json_without_special_numbers(shown):
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


def test_a_real_answer_is_traced_as_it_was_given(open_engine):
    engine = open_engine("good")
    trace = Trace(None, engine.decoder.model)
    trace.begin("tiny", "")
    given = []
    watch = Watch(rounds=trace.round)
    for piece in engine.stream([5, 6, 7], SamplingSettings(temperature=0.0), Limits(max_tokens=30), watch):
        trace.piece(piece)
        given.append((piece.token, piece.source))
    trace.end(engine.statistics)
    shown = data_of(trace.answers)["answers"][0]
    assert [tuple(token) for entry in shown["rounds"] for token in entry["emitted"]] == given
    assert len(shown["rounds"]) == 1 + engine.statistics.rounds
    walked = [entry for entry in shown["rounds"] if entry["accepted"]]
    assert walked
    for entry in walked:
        along = [entry["tree"][node][0] for node in entry["accepted"]]
        assert along == [token for token, _ in entry["emitted"]][: len(along)]
        assert all(source for _, source in entry["emitted"][: len(along)])
