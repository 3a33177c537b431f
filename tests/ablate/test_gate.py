"""The promotion rule, cell by cell."""

import math

from quantmla.ablate.cells import Cell
from quantmla.ablate.gate import judge, rule

BEST = Cell("c4r4", "quarot_online", "quarot_online")
CORE = Cell("c4r4", "rtn", "rtn")
NEAR = Cell("hqq4", "rtn", "rtn")
LOST = Cell("nvfp4", "rtn", "rtn")
SMALL = Cell("norm4-r4", "quarot_online", "quarot_online")
BARE = Cell("c4r4", "smoothquant", "smoothquant", policy=False)
BYTES = {BEST: 315.0, CORE: 315.0, NEAR: 324.0, LOST: 324.0, SMALL: 291.0, BARE: 315.0}


def test_losers_are_those_beaten_by_far_at_no_more_bytes():
    distortions = {BEST: 0.01, CORE: 0.9, NEAR: 0.04, LOST: 0.041, SMALL: 0.5, BARE: 0.9}
    verdicts = judge(distortions, BYTES, factor=4.0)
    promoted = {cell for cell, verdict in verdicts.items() if verdict.promoted}
    # SMALL has no rival of its size, BARE none of its policy, CORE is always scored
    assert promoted == {BEST, CORE, NEAR, SMALL, BARE}
    assert verdicts[LOST].reason == "4.1 x c4r4/quarot_online/policy"
    assert verdicts[BEST].reason == "smallest"


def test_a_distortion_that_is_no_number_is_not_promoted():
    verdicts = judge({BEST: 0.01, LOST: math.nan}, BYTES, factor=4.0)
    assert not verdicts[LOST].promoted
    assert verdicts[BEST].promoted
    verdicts = judge({SMALL: math.nan, BEST: 0.01, NEAR: 0.02}, BYTES, factor=4.0)
    assert [cell for cell, verdict in verdicts.items() if verdict.promoted] == [BEST, NEAR]


def test_an_exact_cell_does_not_break_the_rule():
    verdicts = judge({BEST: 0.0, NEAR: 0.0, LOST: 0.1}, BYTES, factor=1.0)
    assert verdicts[BEST].promoted
    assert verdicts[NEAR].promoted
    assert not verdicts[LOST].promoted


def test_the_rule_names_its_factor():
    assert "at most 2.5 times" in rule(2.5)
