"""What batches cost, how often candidates come true, and the file that both are kept in."""

from __future__ import annotations

import json
import math
import random

import pytest

from eagle3_cli.engine.budget import Machine
from eagle3_cli.engine.calibration import MEMORY, Bins, Calibration, temperature_class
from eagle3_cli.engine.costs import CPU_DRAFTER_PRIOR, CPU_PRIOR, CPU_PRIORS, WIDEST, Curve, cpu_prior
from eagle3_cli.engine.learned import cache_folder, keep, place, recall
from eagle3_cli.engine.lookup import ALONE, BEST, OTHER, Match

TRUE = {1: 1.0, 2: 1.1, 3: 1.9, 4: 2.0, 9: 2.2, 17: 6.0}


def learned(drift=lambda i: 1.0, seed=0, rounds=600, noise=0.1) -> Curve:
    curve, rng = Curve(CPU_PRIOR), random.Random(seed)
    for i in range(rounds):
        rows = rng.choice(list(TRUE))
        curve.learn(rows, 0.01 * TRUE[rows] * drift(i) * max(0.3, rng.gauss(1, noise)))
    return curve


@pytest.mark.parametrize(
    "drift",
    [lambda i: 1.0, lambda i: 1 + i / 600, lambda i: 1.0 if i < 300 else 2.5, lambda i: 1 + 0.3 * math.sin(i / 40)],
    ids=["steady", "growing context", "another program", "waves"],
)
def test_ratios_are_learned_whatever_the_machine_does_meanwhile(drift):
    costs = learned(drift).costs
    assert [costs[rows] for rows in TRUE] == pytest.approx(list(TRUE.values()), rel=0.12)


def test_costs_are_never_far_from_what_was_observed():
    rng, curve = random.Random(5), Curve(CPU_PRIOR)
    for i in range(600):
        rows = rng.choice((1, 2, 4, 8, 16))
        curve.learn(rows, 0.01 * CPU_PRIOR[rows] * (1 + i / 600 * (rows > 4)) * math.exp(rng.gauss(0, 0.1)))
        anew = Curve(CPU_PRIOR)
        anew.restore(curve.as_dict())
        assert list(curve.costs) == pytest.approx(list(anew.costs), rel=0.08)


def test_single_outliers_count_for_nothing_and_a_lasting_change_does():
    curve = learned(noise=0.0)
    before = list(curve.costs)
    curve.learn(4, 10.0)
    assert list(curve.costs) == before
    assert curve.seconds == pytest.approx(0.01, rel=0.03)
    for _ in range(40):
        curve.learn(1, 0.1)
    assert curve.seconds == pytest.approx(0.1, rel=0.05)
    assert curve.costs[4] == pytest.approx(2.0, rel=0.05)


def test_before_anything_was_seen_the_prior_holds():
    for prior in (*CPU_PRIORS.values(), CPU_PRIOR):
        costs = Curve(prior).costs
        assert len(costs) == WIDEST + 1
        assert [costs[rows] for rows in prior] == pytest.approx(list(prior.values()))
        assert costs[0] == 0.0
        assert costs[WIDEST] > costs[64]


def test_unseen_widths_learn_from_their_neighbours_and_are_hoped_to_be_cheap():
    curve = learned()
    assert 2.0 < curve.costs[6] < 3.0  # between 4 and 9 rows, far below the prior's 2.7
    hoped = curve.hoped
    assert all(hoped[rows] == curve.costs[rows] for rows in TRUE)
    assert hoped[6] < 0.8 * curve.costs[6]


def test_no_batch_is_cheaper_than_one_row():
    curve = Curve(CPU_PRIOR)
    for _ in range(20):
        curve.learn(1, 0.01)
        curve.learn(8, 0.001)
    assert min(curve.costs[1:]) == 1.0


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (WIDEST + 1, 1.0), (3, 0.0), (3, -1.0)])
def test_what_cannot_be_is_not_learned(rows, seconds):
    curve = Curve(CPU_PRIOR)
    curve.learn(rows, seconds)
    assert (curve.level, curve.seen) == (None, [])


def test_priors_by_type():
    assert cpu_prior("Q4_0") is CPU_PRIORS["Q4_0"]
    assert cpu_prior("F16") is CPU_PRIORS["BF16"]
    assert cpu_prior("Q6_K") is CPU_PRIOR


# ---- acceptance -------------------------------------------------------------------------------------------


def test_rates_follow_what_happens():
    rng, calibration = random.Random(1), Calibration()
    for _ in range(4000):
        p = rng.random()
        calibration.learn(1, math.log(p), 0, rng.random() < 0.5 * p)
    for p in (0.2, 0.5, 0.8):
        assert calibration.drafted(1, math.log(p)) == pytest.approx(0.5 * p, abs=0.09)
    assert calibration.drafted(2, math.log(0.5)) == pytest.approx(0.45)  # another depth: still the prior
    assert calibration.both(math.log(0.5)) > calibration.drafted(1, math.log(0.5))


def test_longer_matches_are_trusted_more_until_they_fail():
    calibration = Calibration()
    rates = [calibration.looked_up(n) for n in (2, 3, 4, 6, 9, 16)]
    assert rates == sorted(rates)
    for _ in range(100):
        calibration.learn(1, None, 16, False)
    assert calibration.looked_up(16) < calibration.looked_up(9) / 2
    assert all(calibration.looked_up(n) < rate for n, rate in zip((2, 3, 4, 6), rates, strict=False))  # in this text
    calibration.begin()
    assert calibration.looked_up(16) < 0.1
    assert calibration.looked_up(6) == rates[3]  # in another one


def test_matches_that_contradict_each_other_are_trusted_less():
    calibration = Calibration()
    assert calibration.looked_up(4, ALONE) > calibration.looked_up(4, BEST) > calibration.looked_up(4, OTHER)
    for _ in range(100):
        calibration.learn(1, None, 4, True, OTHER)
    calibration.begin()
    assert calibration.looked_up(4, OTHER) > 0.9
    assert calibration.looked_up(4, BEST) < 0.5


def test_a_match_is_weighed_as_far_as_it_may_be_right():
    calibration = Calibration()
    assert calibration.horizon(Match(16, [1] * 20)) == 20
    assert 2 <= calibration.horizon(Match(2, [1] * 20)) < 20
    for _ in range(100):
        calibration.learn(1, None, 2, False)
    assert calibration.horizon(Match(2, [1] * 20)) == 0


@pytest.mark.parametrize("logp", [0.0, -1e-12, -700.0, float("-inf")])
def test_the_ends_of_the_scale_are_rates_too(logp):
    calibration = Calibration()
    calibration.learn(1, logp, 0, True)
    assert 0.0 <= calibration.drafted(1, logp) <= 1.0


def test_old_text_fades():
    bins = Bins([0.5])
    for hit in [True] * 1000 + [False] * int(2 * MEMORY):
        bins.learn(0, hit)
    assert bins.rates[0] < 0.2


def test_classes_of_temperature():
    assert [temperature_class(t) for t in (0.0, -1.0, 0.1, 0.5, 0.7, 0.8, 1.0, 1.5, 9.0)] == [
        "0", "0", "0.4", "0.4", "0.8", "0.8", "1.2", "1.2", "1.2",
    ]  # fmt: skip


# ---- the file ---------------------------------------------------------------------------------------------


def machine() -> Machine:
    return Machine(CPU_PRIOR, CPU_DRAFTER_PRIOR)


@pytest.fixture
def full():
    made = machine()
    for _ in range(5):
        made.target.learn(4, 0.02)
        made.drafter.learn(2, 0.001)
    made.calibration("0").learn(1, -0.3, 0, True)
    made.worth("0").learn(1.5, 2.0, 0.3)
    return made


def test_a_machine_survives_its_file(tmp_path, full):
    path = tmp_path / "new" / "x.json"
    assert keep(path, full) is None
    other = machine()
    assert recall(path, other)
    assert other.as_dict() == full.as_dict()
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def damaged(text: str) -> list[str]:
    kept = json.loads(text)
    found = ["", "{", "[]", "null", '{"format": 1}', text[: len(text) // 2], "\x00" * 40, "[" * 100_000]
    for change in (
        lambda k: k.update(format=99),
        lambda k: k["machine"].update(costs=3),
        lambda k: k["machine"].update(besides="much"),
        lambda k: k["machine"].update(besides=float("nan")),
        lambda k: k["machine"]["costs"]["0"]["target"].update(level=1e300),
        lambda k: k["machine"]["costs"]["0"]["target"].update(level=True),
        lambda k: k["machine"]["costs"].update({"-1": k["machine"]["costs"]["0"]}),
        lambda k: k["machine"]["costs"].update({"99": k["machine"]["costs"]["0"]}),
        lambda k: k["machine"]["costs"].update({"x": k["machine"]["costs"]["0"]}),
        lambda k: k["machine"]["threads"].update(best=3),
        lambda k: k["machine"].pop("threads"),
        lambda k: k["machine"]["costs"]["0"]["target"]["seen"].update({"0": [0.0, 1.0]}),
        lambda k: k["machine"]["costs"]["0"]["target"]["seen"].update({"4": [50.0, 1.0]}),
        lambda k: k["machine"]["costs"]["0"]["target"]["seen"].update({"4": ["a", 1.0]}),
        lambda k: k["machine"]["calibrations"]["0"]["drafted"].pop(),
        lambda k: k["machine"]["calibrations"]["0"]["both"].pop(),
        lambda k: k["machine"]["calibrations"]["0"]["both"].__setitem__(0, [9.0, 1.0]),
        lambda k: k["machine"]["worths"]["0"].update(cost=-1),
        lambda k: k["machine"].pop("worths"),
    ):
        other = json.loads(json.dumps(kept))
        change(other)
        found.append(json.dumps(other))
    return found


def test_a_damaged_file_counts_for_nothing(tmp_path, full):
    path = tmp_path / "x.json"
    keep(path, full)
    for text in damaged(path.read_text()):
        path.write_text(text)
        other = machine()
        assert not recall(path, other), text[:80]
        assert other.as_dict() == machine().as_dict()
    path.write_bytes(b"\xff\xfe" * 10)
    assert not recall(path, machine())
    assert not recall(tmp_path / "none.json", machine())
    assert not recall(tmp_path, machine())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, full):
    (tmp_path / "file").write_text("")
    assert keep(tmp_path / "file" / "x.json", full)


def test_the_place_depends_on_models_and_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path / "cache"))
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"one")
    b.write_bytes(b"two")
    places = {place({"target": t}, {"threads": n}) for t in (a, b) for n in (1, 2)}
    assert len(places) == 4
    assert {p.parent for p in places} == {tmp_path / "cache"} == {cache_folder()}
    a.rename(tmp_path / "moved")
    assert place({"target": tmp_path / "moved"}, {"threads": 1}) in places
