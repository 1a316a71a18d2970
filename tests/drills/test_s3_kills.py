"""The drill of 200 kills, small: what it promises holds at five."""

from pathlib import Path

import pytest

from tests.data.flaky_s3 import use_bucket
from tests.drills.s3_kills import drill


def test_five_kills_with_a_bucket_that_misbehaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_bucket(monkeypatch, "")  # what the drill sets is put back in the end
    tally, verdicts = drill(tmp_path, 5, 16, outages=[2.0], seed=1, silence=3.0)
    assert not tally.faults
    assert sum(tally.ends.values()) >= 2  # of five: some come too late in so short a run
    assert all(verdict.holds for verdict in verdicts)
