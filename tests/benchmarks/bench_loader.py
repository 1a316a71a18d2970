"""The speed of our loader and of others, from the same files on the same cores, in one run.

    python tests/benchmarks/bench_loader.py photographs              # an ImageFolder of originals
    python tests/benchmarks/bench_loader.py photographs --cases one-view --runs 9

  one-view      1×224 random resized crop: ours from .beton, MDS and folder; stock FFCV (as
                installed, and with numba's workqueue threads), torchvision's DataLoader, litdata,
                webdataset, stock StreamingDataset, NVIDIA DALI on the CPU
  multi-crop    2×224 + 8×96 of every image, as above
  decode-bound  our rate as a share of libjpeg-turbo's, which only decodes the files
  s3            MDS shards from an S3 server on this machine (SeaweedFS, which takes its share of
                the cores), and stock StreamingDataset: first and second epoch
  conversion    `python -m data_prep.convert` beside the plain use of MDSWriter and DatasetWriter
  memory        our loader's over 20 epochs, beside its own estimate

Every loader has a process of its own, stopped while it is not its turn, and the turns are epochs,
again and again, so that a machine whose speed drifts favours none. The first epoch of each warms up
and does not count. Figures are medians; a ratio is the median of the ratios of each run. "First
batch" is counted from the start of the process, once.

Fair? All decode the original files, at the same batch size, with as many workers as cores. Ours
resizes bicubic, or bilinear where it says so, and leaves the mirroring to the device; it decodes a
JPEG at a smaller scale where that changes the views by less than its tolerance. torchvision's
transforms (which litdata, webdataset and StreamingDataset are given as well) resize bilinear, as is
their default, or bicubic where it says so, both antialiased, and mirror. FFCV averages areas, does
not mirror, and decodes an image once for each of its views. DALI resizes bilinear, antialiased, and
mirrors; for one crop it decodes only that, for ten the image once. litdata, webdataset and DALI are
installed by `make bench-setup`; what is not installed is left out.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pospre.data.threads import available_cores
from pospre.errors import UserError, run_command
from tests.benchmarks.loader_cases import (
    Bench,
    conversion,
    decode_bound,
    from_s3,
    memory,
    multi_crop,
    one_view,
)
from tests.benchmarks.loader_tables import Table, markdown

CASES: dict[str, Callable[[Bench], Table]] = {
    "one-view": one_view,
    "multi-crop": multi_crop,
    "decode-bound": decode_bound,
    "s3": from_s3,
    "conversion": conversion,
    "memory": memory,
}


def measure(bench: Bench, cases: list[str]) -> list[str]:
    """Print each case's table as soon as it is there; return the cases that went wrong."""
    failures = []
    for case in cases:
        print(f"{case}:", file=sys.stderr)
        try:
            print(f"{markdown(CASES[case](bench))}\n", flush=True)
        except UserError as error:
            print(f"{case}: {error}", file=sys.stderr)
            failures.append(case)
    return failures


def main(argv: list[str] | None = None) -> int:
    """Print the tables."""
    num_cores = available_cores()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", type=Path, help="folder of images in class sub-folders")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="what to measure (all)")
    add("--runs", type=int, default=5, help="how often everything is measured (5)")
    add("--batch", type=int, default=32, help="images per batch (32)")
    add("--workers", type=int, default=num_cores, help="of each loader (the cores)")
    add("--work", type=Path, help="folder for the converted data sets, kept")
    options = parser.parse_args(argv)
    if not options.data.is_dir():
        raise UserError(f"{options.data} is no folder of images in class sub-folders.")
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(options.data.resolve(), work, options.runs, options.batch, options.workers)
        print(
            f"batch {options.batch}, {options.workers} workers on {num_cores} cores; medians of "
            f"{options.runs} runs\n"
        )
        failures = measure(bench, options.cases)
    if failures:
        raise UserError(f"not measured: {', '.join(failures)}; the reason is above.")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
