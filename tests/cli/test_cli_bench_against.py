"""`eagle3 bench --against`: which servers are measured, and what is refused."""

from __future__ import annotations

import pytest

from eagle3_cli.errors import InputError


class Stop(InputError):
    """Where a run would load its models."""


@pytest.fixture
def settings(eagle3, monkeypatch):
    """The settings of a run with these flags, or what the command says instead."""

    def run(*flags):
        found = []

        def contenders(settings):
            found.append(settings)
            raise Stop("loading")

        monkeypatch.setattr("eagle3_cli.bench.run.Contenders", contenders)
        result = eagle3("bench", *flags)
        return found[0] if found else result

    return run


def test_a_program_is_measured_without_speculation_with_the_drafter_and_with_ngrams(settings):
    found = settings("--against", "./llama-server")
    assert (found.against, found.draft_max) == ("./llama-server", (1, 2, 3))
    names = ("none", "draft-eagle3", "ngram-simple", "ngram-mod", "ngram-map-k", "ngram-cache")
    assert found.against_types == tuple((name,) for name in names)


def test_types_can_be_chosen_and_combined_and_each_comes_once(settings):
    flags = [f"--against-type={name}" for name in ("draft-eagle3+ngram-mod", "none", "none")]
    found = settings("--against", "./llama-server", *flags, "--draft-max", "4", "--draft-max", "4")
    assert found.against_types == (("draft-eagle3", "ngram-mod"), ("none",))
    assert found.draft_max == (4,)


def test_a_url_stays_as_it_is(settings):
    assert settings("--against", "http://127.0.0.1:8080").against == "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--against", "s", "--against-type", "ngram"), "--against-type: expected one of none, draft-eagle3"),
        (("--against", "s", "--against-type", "draft-simple"), "an EAGLE-3 drafter does not"),
        (("--against-type", "none"), "--against-type: has no effect without --against."),
        (("--draft-max", "2"), "--draft-max: has no effect without --against."),
        (("--against", "http://h", "--against-type", "none"), "--against-type: has no effect with a URL"),
        (("--against", "http://h", "--draft-max", "2"), "--draft-max: has no effect with a URL"),
        (
            ("--against", "s", "--against-type", "none", "--draft-max", "2"),
            "--draft-max: has no effect without --against-type draft-eagle3.",
        ),
        (("--against", "s", "--draft-max", "0"), "--draft-max: expected a value at least 1, got 0."),
    ],
)
def test_flags_without_effect_and_unknown_names_are_refused(settings, flags, said):
    result = settings(*flags)
    assert (result.code, result.out) == (2, "")
    assert said in result.err
