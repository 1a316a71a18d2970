"""The drill of 200 kills, small: what it promises holds at ten."""

from pathlib import Path

import pytest

from tests.drills.s3_kills import KEYS, drill


def test_ten_kills_with_a_bucket_that_misbehaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**KEYS, "S3_ENDPOINT_URL": ""}.items():  # put back in the end
        monkeypatch.setenv(name, value)
    tally, verdicts = drill(tmp_path, 10, 20, outages=[2.0], seed=1, silence=3.0)
    assert not tally.faults
    assert sum(tally.ends.values()) >= 8
    assert max(tally.lost) <= 2
    assert all(verdict.holds for verdict in verdicts)
