"""Names in ``metrics.jsonl``, and what a resumed run does to the file."""

from pathlib import Path

from pospre.training.callbacks.metrics import drop_after, plain_name


def test_names() -> None:
    assert plain_name("loss/train/total") == "loss/total"
    assert plain_name("loss/train/metric/droppos_accuracy") == "metric/droppos_accuracy"
    assert plain_name("other/value") == "other/value"


def test_later_and_damaged_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    drop_after(path, 2)
    assert not path.exists()
    flipped = b'{"stfp": 1}\n{"step": 1, "l\xefss": 2}\n'
    path.write_bytes(b'{"step": 1}\n' + flipped + b'{"step": 2}\n{"step": 3}\n{"st')
    drop_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert list(tmp_path.iterdir()) == [path]
