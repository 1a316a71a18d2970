"""JSON that is nested too deeply, wherever a data set holds some, is one message."""

import shutil
from pathlib import Path

import pytest

from data_prep.sources.registry import open_source
from pospre.data.opening import open_reader
from tests.data_prep.reading import Says, call, destination, partial, run, sidecar
from tests.data_prep.sample_images import encoded, picture, write_files
from tests.data_prep.sources.fakes import JPEGS
from tests.refusals import refuses

DEEP = b'{"a":' * 100_000


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two photographs, as MDS and ``.beton``."""
    root = tmp_path_factory.mktemp("deep")
    source = write_files(root / "photos", {f"a/{n}.jpg": encoded(picture(n)) for n in (1, 2)})
    for data_format in ("mds", "ffcv"):
        assert run(source, destination(root, data_format)) == 0
    return root


@pytest.mark.parametrize("name", ["out/index.json", "out/pospre.json", "out.beton.json"])
def test_of_converted_data(converted: Path, tmp_path: Path, name: str, refused: Says) -> None:
    root = Path(shutil.copytree(converted, tmp_path / "root"))
    (root / name).write_bytes(DEEP)
    target = root / ("out.beton" if "beton" in name else "out")
    refuses(f"{name} cannot be read .*nested too deeply", lambda: open_reader(target))
    if "index" not in name:
        assert f"{name} cannot be read (it is nested too deeply)" in refused(
            run, root / "photos", target
        )


def test_of_a_conversion_that_was_interrupted(tmp_path: Path, refused: Says) -> None:
    source = write_files(tmp_path / "photos", {f"a/{n}.jpg": JPEGS[n] for n in (1, 2)})
    target = tmp_path / "out"
    assert run(source, target, "--part", "1/1") == 0
    (path,) = partial(target).glob("plan.json")
    path.write_bytes(DEEP)
    assert f"{path} is damaged" in refused(call, "--merge", target)
    assert not sidecar(target).exists()


def test_what_parquet_notes_for_others_is_passed_over(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"image": JPEGS[:2], "label": [0, 1]})
    path = tmp_path / "a.parquet"
    parquet.write_table(table.replace_schema_metadata({"huggingface": DEEP}), path)
    assert open_source(path).classes == ["0", "1"]
