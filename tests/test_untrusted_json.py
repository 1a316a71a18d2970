"""JSON of others: whatever it is, it is read or it is a ``ValueError``."""

from pathlib import Path

import pytest

from pospre.data.stores.description import SIDECAR_NAME, read_sidecar
from pospre.data.stores.mds_index import INDEX_NAME, read_index
from pospre.errors import UserError
from pospre.evaluation.dense.detection.box_data import open_boxes
from pospre.evaluation.figures import read_document
from pospre.evaluation.run import write_json
from pospre.untrusted_json import parse_json, parse_object, parse_steps

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DEEP, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        ('{"bytes": Infinity}', "Infinity is not finite"),
        ('{"bytes": NaN}', "NaN is not finite"),
        ("[1e999]", "1e999 is not finite"),
        ("[18446744073709551616]", "not a 64-bit integer"),
        ("1" * 5000, "4300 digits"),
        (b'{"a": "\xff"}', "decode"),
        ("", "Expecting value"),
    ],
)
def test_what_is_none_is_one_kind_of_error(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_what_evaluations_write_is_read_whatever_they_measure(tmp_path: Path) -> None:
    rows = [{"cka": float("nan")}, {"cka": 0.5}, (float("-inf"), 1)]
    write_json(tmp_path / "drift.json", {"results": {"rank": float("inf"), "rows": rows}})
    found = {"rank": None, "rows": [{"cka": None}, {"cka": 0.5}, [None, 1]]}
    assert read_document(tmp_path / "drift.json")["results"] == found


def test_what_is_json_is_read() -> None:
    text = '{"a": [1, -2, 0.5, 1e-9, true, null, "x"], "b": 18446744073709551615}'
    content = {"a": [1, -2, 0.5, 1e-9, True, None, "x"], "b": 2**64 - 1}
    assert parse_object(text) == parse_object(text.encode()) == content
    with pytest.raises(ValueError, match="must hold an object, not a list"):
        parse_object("[1]")


def test_only_whole_lines_of_steps_count() -> None:
    lines = ['{"step": 1}', "[1]", '{"step": "2"}', '{"step": NaN}', DEEP, '{"step": 3}', '{"st']
    assert parse_steps("\n".join(lines).encode()) == [{"step": 1}, {"step": 3}]


@pytest.mark.parametrize("text", [DEEP, '{"shards": Infinity}', "[1]"])
def test_who_reads_files_of_others_says_one_message(text: str, tmp_path: Path) -> None:
    coco = tmp_path / "annotations" / "instances_val.json"
    (tmp_path / "images").mkdir()
    coco.parent.mkdir()
    for path in (tmp_path / INDEX_NAME, tmp_path / SIDECAR_NAME, coco):
        path.write_text(text)
    for ask in (
        lambda: read_index(tmp_path, "Copy it again."),
        lambda: read_sidecar(tmp_path / SIDECAR_NAME, "mds", 1, "Copy it again."),
        lambda: open_boxes(str(tmp_path), "val"),
    ):
        with pytest.raises(UserError, match=f"{tmp_path}/.*json"):
            ask()
