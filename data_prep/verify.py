"""Check a converted data set: description, checksums, labels, and every image by decoding it."""

import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from data_prep.publish.description import (
    REMEDY,
    Files,
    check_sizes,
    data_files,
    parse_description,
    read_description,
    sha256,
)
from pospre.command_line import command_parser
from pospre.data.cores import available_cores
from pospre.data.decode.bit_depth import Decoding
from pospre.data.stores.description import SIDECAR_NAME, checksum, unpack_sums
from pospre.data.stores.mds_index import INDEX_NAME, read_index
from pospre.errors import UserError, printable, run_command
from pospre.object_store import Bucket, is_remote
from pospre.untrusted_json import parse_object

if TYPE_CHECKING:  # readers and decoders take seconds to import, and --help does not wait for them
    from pospre.data.stores.reader import Reader

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
    where, bad, first = str(destination).rstrip("/"), 0, ""
    with tempfile.TemporaryDirectory(prefix="pospre-verify-") as name, _naming(name, where):
        is_file = not is_remote(where) and not Path(where).is_dir()
        content, readers = _open_beton(Path(where)) if is_file else _open_shards(where, Path(name))
        bar = tqdm(total=content["samples"], unit="img", desc="verify", disable=None)
        with bar:
            for reader in readers:
                found, about = _unusable(
                    reader, content["classes"], num_workers or available_cores(), bar
                )
                bad, first = bad + found, first or about
    if bad:
        raise UserError(
            f"{where}: {bad} of {content['samples']} samples cannot be used; the first is {first}. "
            "Copy the data set again, or convert again with --overwrite."
        )
    classes = content["classes"]
    rows = [
        ("description", f"{content['format']}, version {content['version']}"),
        ("checksums", f"{len(data_files(content, where))} files"),
        ("images", f"{content['samples']} decoded"),
        ("classes", "none" if classes is None else f"{len(classes)}"),
    ]
    print(f"verified {printable(destination)}")
    for name, value in rows:
        print(f"  {name:<16}ok: {value}")


@contextmanager
def _naming(folder: str, where: str) -> Iterator[None]:
    """Have messages name the data set instead of the temporary folder."""
    try:
        yield
    except UserError as error:
        raise error.restated(str(error).replace(folder, where)) from error


def _open_beton(path: Path) -> "tuple[dict[str, Any], Iterator[Reader]]":
    """Return the description, and readers of the samples: one."""
    from pospre.data.opening import open_reader

    reader = open_reader(path)
    content = read_description(path, "ffcv")
    _check_sum(path, content["sha256"], path)
    return content, iter([reader])


def _open_shards(where: str, scratch: Path) -> "tuple[dict[str, Any], Iterator[Reader]]":
    """Return the description, checked, and readers of the samples: one for each shard."""
    files: Files
    if is_remote(where):
        from data_prep.publish.bucket import BucketFiles

        files = BucketFiles(where)
    else:
        from data_prep.publish.local import LocalFiles
        from pospre.data.stores.mds import is_mds

        files = LocalFiles(Path(where))
        if not is_mds(Path(where)):
            raise UserError(
                f"{where} is a folder of images; give a .beton file or an MDS directory."
            )
    there = files.sizes()
    for name in (INDEX_NAME, SIDECAR_NAME):
        if name not in there:
            raise UserError(
                f"{files.locate(name)} is missing: no data set of data_prep.convert is there, or "
                "its conversion is not finished."
            )
    text, index = files.read([SIDECAR_NAME, INDEX_NAME])
    content = parse_description(text, files.locate(SIDECAR_NAME), "mds", REMEDY)
    (scratch / INDEX_NAME).write_bytes(index)
    entries = read_index(scratch, f"{REMEDY}.")  # refuses names that lead out of the folder
    odd = {entry.raw.name for entry in entries} ^ set(content["manifest"])
    if odd:
        raise UserError(f"{files.locate(SIDECAR_NAME)} and {INDEX_NAME} disagree about {min(odd)}.")
    check_sizes(files, data_files(content, where), REMEDY)
    total = sum(entry.num_samples for entry in entries)
    if total != content["samples"]:
        raise UserError(f"{where} holds {total} samples instead of {content['samples']}.")
    sums = unpack_sums(content, total, files.locate(SIDECAR_NAME), REMEDY)
    return content, _shards(where, parse_object(index)["shards"], content, sums, scratch)


def _shards(
    where: str, shards: list[dict[str, Any]], content: dict[str, Any], sums: Any, scratch: Path
) -> "Iterator[Reader]":
    """Give a reader of one shard after the other; none is kept that was downloaded."""
    from pospre.data.stores.mds import MdsReader

    start = 0
    for shard in shards:
        name = shard["raw_data"]["basename"]
        path = scratch / name
        if is_remote(where):
            with Bucket(f"{where}/{name}") as bucket, path.open("wb") as file:
                bucket.download(file)
        else:
            path.symlink_to((Path(where) / name).absolute())
        _check_sum(path, content["manifest"][name][1], f"{where}/{name}")
        (scratch / INDEX_NAME).write_text(json.dumps({"version": 2, "shards": [shard]}))
        reader = MdsReader(scratch)
        reader.decoding = Decoding(content.get("channels", 3))
        if sums is not None:
            reader.checksums = sums[start : start + len(reader)]
        start += len(reader)
        yield reader
        path.unlink()


def _check_sum(file: Path, digest: str, name: object) -> None:
    if sha256(file) != digest:
        raise UserError(
            f"{name} does not have the checksum noted when it was written; copy it again, or "
            f"{REMEDY}."
        )


def _unusable(
    reader: "Reader", classes: list[str] | None, num_workers: int, bar: Any
) -> tuple[int, str]:
    """Decode every sample on several threads; count what cannot be used, and describe the first."""
    from pospre.data.decode.decoder import DecodeError, decode_image

    labels, sums = range(-1, len(classes or ())), reader.checksums

    def problem(index: int) -> str | None:
        sample = reader.read(index)
        bar.update()
        if sample.label not in labels:
            return f"label {sample.label} is outside of the {len(labels) - 1} known ones"
        if sums is not None and checksum(sample.encoded.numpy().data, sample.label) != sums[index]:
            return "it does not have the checksum (crc32c) noted when it was written"
        if reader.features is None:
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


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = command_parser("data_prep.verify", __doc__, _EPILOG)
    parser.add_argument("path", metavar="DST", help="file.beton, or folder or s3:// of shards")
    parser.add_argument(
        "--workers", type=int, default=available_cores(), help="threads (all cores)"
    )
    args = parser.parse_args(argv)
    verify(args.path, max(1, args.workers))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
