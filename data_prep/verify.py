"""Check a converted data set: description, checksums, labels, and every image by decoding it."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crc32c import crc32c
from tqdm import tqdm

from data_prep.publish import description as sidecar
from pospre.data.cores import available_cores
from pospre.data.decode.deep import Decoding
from pospre.data.stores.description import SIDECAR_NAME, unpack_sums
from pospre.data.stores.mds_index import INDEX_NAME, ShardEntry, read_index
from pospre.errors import UserError, run_command
from pospre.object_store import Bucket, is_remote

if TYPE_CHECKING:  # readers and decoders take seconds to import, and --help does not wait for them
    from pospre.data.stores.reader import Reader

_REMEDY = "convert the images again with --overwrite"
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
        from pospre.data.stores.opening import open_reader

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
    reader: "Reader", classes: list[str] | None, num_workers: int, bar: Any
) -> tuple[int, str]:
    """Decode every sample on several threads; count what cannot be used, and describe the first."""
    from pospre.data.decode.decoder import DecodeError, decode_image

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
            decode_image(sample.encoded, reader.decoding)
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
    content, index = _descriptions(uri)
    where = f"{uri}/{SIDECAR_NAME}"
    bad, first, start = 0, "", 0
    with tempfile.TemporaryDirectory(prefix="pospre-verify-") as name, _naming(Path(name), uri):
        folder = Path(name)
        shards = _shards(index, content["manifest"], folder, where)
        total = sum(entry.num_samples for entry, _ in shards)
        if total != content["samples"]:
            raise UserError(f"{uri} holds {total} samples instead of {content['samples']}.")
        checksums = unpack_sums(content, total, where, _REMEDY)
        with _bar(total, "img") as bar:
            for entry, noted in shards:
                with _one_shard(uri, entry, noted, content["manifest"], folder) as reader:
                    reader.decoding = Decoding(content.get("channels", 3))
                    if checksums is not None:
                        reader.checksums = checksums[start : start + len(reader)]
                    found, about = _unusable(reader, content["classes"], num_workers, bar)
                bad, first = bad + found, first or about
                start += entry.num_samples
        _report(uri, bad, first, total)
    return content, len(shards), total


def _descriptions(uri: str) -> tuple[dict[str, Any], bytes]:
    """Return our description, checked, and the index as it is."""
    with Bucket(uri) as bucket:
        there = bucket.list()
        for name in (INDEX_NAME, SIDECAR_NAME):
            if name not in there:
                raise UserError(
                    f"{uri}/{name} is missing: no data set of data_prep.convert is there, or its "
                    "conversion is not finished."
                )
        text = bucket.read(SIDECAR_NAME)
        content = sidecar.parse_sidecar(text, f"{uri}/{SIDECAR_NAME}", "mds", _REMEDY)
        return content, bucket.read(INDEX_NAME)


@contextmanager
def _naming(folder: Path, uri: str) -> Iterator[None]:
    """Have messages name the bucket instead of the temporary folder."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(str(folder), uri)) from error


def _shards(
    index: bytes, manifest: dict[str, Any], folder: Path, where: str
) -> list[tuple[ShardEntry, dict[str, Any]]]:
    """Return every shard's entry of the index: checked, and as it is written there."""
    (folder / INDEX_NAME).write_bytes(index)
    entries = read_index(folder, f"{_REMEDY}.")  # refuses names that lead out of the folder
    odd = {entry.raw.name for entry in entries} ^ set(manifest)
    if odd:
        raise UserError(f"{where} and {INDEX_NAME} disagree about {min(odd)}.")
    return list(zip(entries, json.loads(index)["shards"], strict=True))


def _fetch(uri: str, name: str, folder: Path) -> Path:
    with Bucket(f"{uri}/{name}") as bucket, (folder / name).open("wb") as file:
        bucket.download(file)
    return folder / name


@contextmanager
def _one_shard(
    uri: str, entry: ShardEntry, noted: dict[str, Any], manifest: dict[str, Any], folder: Path
) -> "Iterator[Reader]":
    """Give a reader of a single shard."""
    from pospre.data.stores.mds import MdsReader

    name = entry.raw.name
    path = _fetch(uri, name, folder)
    _check_sum(path, manifest[name][1], f"{uri}/{name}")
    (folder / INDEX_NAME).write_text(json.dumps({"version": 2, "shards": [noted]}))
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
