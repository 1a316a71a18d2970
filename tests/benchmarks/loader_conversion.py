"""Writing the formats: our command beside the plain use of the stock writers.

Each writes the whole folder in a fresh process, in turn. MDSWriter works in one process: of files
that Pillow opened it copies the bytes without looking at them, images from a data set it encodes.
DatasetWriter uses all workers and encodes every image anew. Ours keeps the bytes and adds checksums
and a manifest; it decodes every JPEG at 1/8 to find damage, or with ``--check header`` looks at
beginning and end only.
"""

import json
import re
import shutil
import statistics
import sys
from pathlib import Path

from tests.benchmarks import loader_data
from tests.benchmarks.loader_bench import Bench
from tests.benchmarks.loader_tables import Table, rate_rows
from tests.benchmarks.loader_worker import LoaderDied, leave_out

_WRITERS = {
    "ours, MDS": ("mds", "images_mds"),
    "ours, MDS, --check header": ("mds_header", "images_mds"),
    "ours, .beton": ("beton", "images.beton"),
    "MDSWriter, opened files": ("stock_mds", "images_mds"),
    "MDSWriter, images": ("stock_mds_images", "images_mds"),
    "DatasetWriter": ("stock_beton", "images.beton"),
}
_REFERENCES = {
    "× MDSWriter, opened files": ["MDSWriter, opened files"],
    "× MDSWriter, images": ["MDSWriter, images"],
    "× DatasetWriter": ["DatasetWriter"],
}


def conversion(bench: Bench) -> Table:
    """Convert the folder again and again; the first time of each warms up."""
    num_images = sum(1 for path in bench.data.rglob("*") if path.is_file())
    alone: dict[str, list[float]] = {name: [] for name in _WRITERS}
    whole: dict[str, list[float]] = {name: [] for name in _WRITERS}
    for run in range(bench.runs + 1):
        for name, (kind, target) in _WRITERS.items():
            try:
                seconds, all_seconds = _convert(bench, kind, bench.work / "conversion" / target)
            except LoaderDied as error:
                if not run:
                    leave_out(name, str(error))
                continue
            rates = num_images / seconds, num_images / all_seconds
            print(
                f"  run {run}: {name} {rates[0]:.0f} images/s, {rates[1]:.0f} with the start",
                file=sys.stderr,
            )
            if run:
                alone[name].append(rates[0])
                whole[name].append(rates[1])
    start = {name: f"{statistics.median(some):.0f}" for name, some in whole.items() if some}
    more = {"images/s with the start of the process": start}
    title = f"conversion of {num_images} originals by {bench.num_workers} workers"
    return Table("conversion", title, "images/s", rate_rows(alone, _REFERENCES, more))


def _convert(bench: Bench, kind: str, target: Path) -> tuple[float, float]:
    """Return the seconds of writing alone and those of the whole process."""
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir()
    said, seconds = loader_data.write(kind, bench.data, target, bench.num_workers)
    shutil.rmtree(target.parent)
    return seconds_alone(said), seconds


def seconds_alone(said: str) -> float:
    """Return the seconds of writing that a conversion printed at its end.

    Our command prints ``814 images`` in one line and ``… s (1234 images/s)`` in another.
    """
    rate = re.search(r"\(([\d.]+) images/s\)", said)
    if rate:
        count = re.search(r"^ +images +(\d+)$", said, re.MULTILINE)
        assert count is not None, said
        return int(count[1]) / float(rate[1])
    return float(json.loads(said.splitlines()[-1])["seconds"])
