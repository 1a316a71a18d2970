"""Texts and lists as Windows saves them."""

import json
from pathlib import Path

import pytest

from data_prep.files.tree import Tree
from pospre.errors import UserError
from pospre.recipe.yaml_text import read_mapping
from pospre.text_lists import decode_text, read_list
from pospre.untrusted_json import parse_json
from tests.refusals import refuses

WINDOWS = ("utf-8-sig", "utf-16", "utf-8")


@pytest.mark.parametrize("encoding", WINDOWS)
def test_a_list_of_windows_has_the_same_lines(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes("café.jpg\r\n\r\n  b c.jpg \r\n".encode(encoding))
    assert read_list(path) == ["café.jpg", "b c.jpg"]
    content = {"Käse": [1, 2]}
    assert parse_json(json.dumps(content, ensure_ascii=False).encode(encoding)) == content
    path.write_bytes("run_name: café\r\n".encode(encoding))
    assert read_mapping(path) == {"run_name": "café"}
    path.write_bytes("a.jpg kitchen\r\n\r\n".encode(encoding))
    assert Tree(tmp_path).lines("list.txt", "a list") == ["a.jpg kitchen"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("café".encode("cp1252"), "it is not UTF-8 .*; save it as UTF-8"),
        ("café".encode("utf-16-le"), "not UTF-8.*; save it as UTF-8"),
        ("cafe".encode("utf-16-le"), "NUL characters, so it is not UTF-8; save it as UTF-8"),
        ("\ufeffcafe".encode("utf-16")[:-1], "it is not UTF-8 .*truncated data"),
    ],
    ids=["one byte", "two bytes", "NUL", "cut off"],
)
def test_other_encodings_name_the_remedy(data: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        decode_text(data)
    path = tmp_path / "list.txt"
    path.write_bytes(data)
    refuses(f"^{path} cannot be read .*{said}", lambda: read_list(path))
    with pytest.raises(UserError, match=rf"list\.txt \(a list\) is not text: .*{said}"):
        Tree(tmp_path).lines("list.txt", "a list")
    refuses(f"^recipe {path} cannot be read: .*{said}", lambda: read_mapping(path))
    assert path.read_bytes() == data
