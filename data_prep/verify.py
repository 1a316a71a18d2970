"""Check a converted data set: description, checksums, labels, and every image by decoding it."""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from data_prep import sidecar
from pospre.data.cores import available_cores
from pospre.data.decode import DecodeError, decode_image
from pospre.data.reader import open_reader
from pospre.data.samples import Reader
from pospre.errors import UserError, run_command

_EPILOG = """\
examples:
  python -m data_prep.verify photos.beton
  python -m data_prep.verify photos_mds
"""


def verify(path: Path, num_workers: int | None = None) -> None:
    """Check a data set that ``data_prep.convert`` made, and print what was found.

    Raises:
        UserError: something is missing, changed or cannot be read; the message names the first.
    """
    reader = open_reader(path)
    if reader.format == "folder":
        raise UserError(f"{path} is a folder of images; give a .beton file or an MDS directory.")
    content = sidecar.read_sidecar(path)
    num_files = _check_sums(path, content)
    _check_images(path, reader, num_workers or available_cores())
    rows = [
        ("description", f"{content['format']}, version {content['version']}"),
        ("checksums", f"{num_files} files"),
        ("images", f"{len(reader)} decoded"),
        ("classes", "none" if reader.classes is None else f"{len(reader.classes)}"),
    ]
    print(f"verified {path}")
    for name, value in rows:
        print(f"  {name:<16}ok: {value}")


def _check_sums(path: Path, content: dict) -> int:
    """Compare sizes and SHA-256 sums of all data files; return their number."""
    sidecar.check_sizes(path, content)
    files = sidecar.data_files(path, content)
    for file, _, digest in tqdm(files, unit="file", desc="checksums", disable=None):
        if sidecar.sha256(file) != digest:
            raise UserError(
                f"{file} does not have the checksum noted when it was written; copy it again, or "
                "convert the images again with --overwrite."
            )
    return len(files)


def _check_images(path: Path, reader: Reader, num_workers: int) -> None:
    """Decode every sample on several threads."""

    def problem(index: int) -> str | None:
        sample = reader.read(index)
        labels = range(-1, 0) if reader.classes is None else range(len(reader.classes))
        if sample.label not in labels:
            return f"label {sample.label} is outside of the {len(labels)} known ones"
        try:
            decode_image(sample.encoded)
        except DecodeError as error:
            return str(error)
        return None

    indices = range(len(reader))
    with ThreadPoolExecutor(num_workers) as executor:
        results = tqdm(
            executor.map(problem, indices),
            total=len(reader),
            unit="img",
            desc="verify",
            disable=None,
        )
        bad = [(index, found) for index, found in zip(indices, results, strict=True) if found]
    if bad:
        index, found = bad[0]
        raise UserError(
            f"{path}: {len(bad)} of {len(reader)} samples cannot be used; the first is "
            f"{reader.name(index)}: {found}. {reader.remedy}"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.verify",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="DST", type=Path, help="file.beton, or folder of shards")
    parser.add_argument(
        "--workers", type=int, default=available_cores(), help="threads (all cores)"
    )
    args = parser.parse_args(argv)
    verify(args.path, max(1, args.workers))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
