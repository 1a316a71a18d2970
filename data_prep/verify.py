"""Check a converted data set: description, checksums, labels, and every image by decoding it."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crc32c import crc32c
from tqdm import tqdm

from data_prep import sidecar
from pospre.data.cores import available_cores
from pospre.data.decode import DecodeError, decode_image
from pospre.data.mds_reader import INDEX_NAME, SIDECAR_NAME, MdsReader
from pospre.data.reader import open_reader
from pospre.data.samples import Reader
from pospre.errors import UserError, run_command
from pospre.object_store import Bucket, is_remote

_EPILOG = """\
examples:
  python -m data_prep.verify photos.beton
  python -m data_prep.verify photos_mds
  python -m data_prep.verify s3://bucket/photos

Every file is read in full and hashed, every sample decoded in full size. Of a data set in a bucket
one shard after the other is downloaded to a temporary folder and removed again; endpoint and
credentials come from S3_ENDPOINT_URL and AWS's variables.
"""


def verify(destination: str | Path, num_workers: int | None = None) -> None:
    """Check a data set that ``data_prep.convert`` made, and print what was found.

    Raises:
        UserError: something is missing, changed or cannot be read; the message names the first.
    """
    workers = num_workers or available_cores()
    if is_remote(str(destination)):
        content, num_files, num_samples = _verify_remote(str(destination).rstrip("/"), workers)
    else:
        path = Path(destination)
        reader = open_reader(path)
        if reader.format == "folder":
            raise UserError(
                f"{path} is a folder of images; give a .beton file or an MDS directory."
            )
        content = sidecar.read_sidecar(path)
        num_files, num_samples = _check_sums(path, content), len(reader)
        with _bar(num_samples, "img") as bar:
            _report(path, *_unusable(reader, content["classes"], workers, bar), num_samples)
    classes = content["classes"]
    rows = [
        ("description", f"{content['format']}, version {content['version']}"),
        ("checksums", f"{num_files} files"),
        ("images", f"{num_samples} decoded"),
        ("classes", "none" if classes is None else f"{len(classes)}"),
    ]
    print(f"verified {destination}")
    for name, value in rows:
        print(f"  {name:<16}ok: {value}")


def _bar(total: int, unit: str) -> Any:
    return tqdm(total=total, unit=unit, desc="verify", disable=None)


def _check_sums(path: Path, content: dict) -> int:
    """Compare sizes and SHA-256 sums of all data files; return their number."""
    sidecar.check_sizes(path, content)
    files = sidecar.data_files(path, content)
    for file, _, digest in tqdm(files, unit="file", desc="checksums", disable=None):
        _check_sum(file, digest, file)
    return len(files)


def _check_sum(file: Path, digest: str, name: object) -> None:
    if sidecar.sha256(file) != digest:
        raise UserError(
            f"{name} does not have the checksum noted when it was written; copy it again, or "
            "convert the images again with --overwrite."
        )


def _unusable(
    reader: Reader, classes: list[str] | None, num_workers: int, bar: Any
) -> tuple[int, str]:
    """Decode every sample on several threads; count what cannot be used, and describe the first."""
    sums = reader.checksums

    def problem(index: int) -> str | None:
        sample = reader.read(index)
        bar.update()
        labels = range(-1, 0) if classes is None else range(-1, len(classes))
        if sample.label not in labels:
            return f"label {sample.label} is outside of the {len(labels) - 1} known ones"
        if sums is not None and crc32c(sample.encoded.numpy().data) != sums[index]:
            return "it does not have the checksum (crc32c) noted when it was written"
        if reader.features is not None:
            return None
        try:
            decode_image(sample.encoded)
        except DecodeError as error:
            return str(error)
        return None

    indices = range(len(reader))
    with ThreadPoolExecutor(num_workers) as executor:
        results = executor.map(problem, indices)
        bad = [(index, found) for index, found in zip(indices, results, strict=True) if found]
    return len(bad), f"{reader.name(bad[0][0])}: {bad[0][1]}" if bad else ""


def _report(where: object, num_bad: int, first: str, num_samples: int) -> None:
    if num_bad:
        raise UserError(
            f"{where}: {num_bad} of {num_samples} samples cannot be used; the first is {first}. "
            "Copy the data set again, or convert again with --overwrite."
        )


def _verify_remote(uri: str, num_workers: int) -> tuple[dict[str, Any], int, int]:
    """Download, check and remove one shard after the other."""
    with Bucket(uri) as bucket:
        missing = [name for name in (INDEX_NAME, SIDECAR_NAME) if name not in bucket.list()]
    if missing:
        raise UserError(
            f"{uri}/{missing[0]} is missing: no data set of data_prep.convert is there, or its "
            "conversion is not finished."
        )
    with tempfile.TemporaryDirectory(prefix="pospre-verify-") as name:
        folder = Path(name)
        content, index = (_fetch_json(uri, each, folder) for each in (SIDECAR_NAME, INDEX_NAME))
        manifest = content["manifest"]
        bad, first, num_samples = 0, "", 0
        with _bar(content["samples"], "img") as bar:
            for entry in index["shards"]:
                with _one_shard(uri, entry, manifest, folder) as reader:
                    found, text = _unusable(reader, content["classes"], num_workers, bar)
                    num_samples += len(reader)
                bad, first = bad + found, first or text.replace(str(folder), uri)
    if num_samples != content["samples"]:
        raise UserError(f"{uri} holds {num_samples} samples instead of {content['samples']}.")
    _report(uri, bad, first, num_samples)
    return content, len(manifest), num_samples


def _fetch_json(uri: str, name: str, folder: Path) -> dict[str, Any]:
    _fetch(uri, name, folder)
    try:
        content: dict[str, Any] = json.loads((folder / name).read_text())
    except ValueError as error:
        raise UserError(f"{uri}/{name} is damaged ({error}).") from error
    (folder / name).unlink()
    return content


def _fetch(uri: str, name: str, folder: Path) -> Path:
    with Bucket(f"{uri}/{name}") as bucket:
        bucket.fetch(folder / name)
    return folder / name


@contextmanager
def _one_shard(
    uri: str, entry: dict[str, Any], manifest: dict[str, Any], folder: Path
) -> Iterator[Reader]:
    """Give a reader of a single shard."""
    name = entry["raw_data"]["basename"]
    if name not in manifest:
        raise UserError(f"{uri}/{SIDECAR_NAME} and {INDEX_NAME} disagree about {name}.")
    path = _fetch(uri, name, folder)
    _check_sum(path, manifest[name][1], f"{uri}/{name}")
    (folder / INDEX_NAME).write_text(json.dumps({"version": 2, "shards": [entry]}))
    yield MdsReader(folder)
    path.unlink()


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.verify",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="DST", help="file.beton, or folder or s3:// of shards")
    parser.add_argument(
        "--workers", type=int, default=available_cores(), help="threads (all cores)"
    )
    args = parser.parse_args(argv)
    verify(args.path, max(1, args.workers))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
