"""Check a converted data set: description, checksums, labels, and every image by decoding it."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from data_prep.distribute.ordered_maps import over_samples
from data_prep.publish.description import REMEDY, data_files, read_description, sha256
from pospre.command_line import command_parser
from pospre.data.stores.description import Description, checksum
from pospre.data.threads import available_cores
from pospre.errors import UserError, printable, run_command
from pospre.object_store import is_remote
from pospre.scratch import cause_of_full_disk, full_disk, scratch

if TYPE_CHECKING:  # slow to import for --help
    from pospre.data.stores.reader import Reader

_EPILOG = """\
examples:
  python -m data_prep.verify photos.beton
  python -m data_prep.verify photos_mds
  python -m data_prep.verify s3://bucket/photos

Every file is read completely and hashed, and every sample is decoded in full size. From a bucket a
few shards at a time are downloaded to a temporary folder; endpoint and credentials come from
S3_ENDPOINT_URL and AWS's variables.
"""

_SHARDS_AT_ONCE = 4


def verify(destination: str | Path, num_workers: int | None = None) -> None:
    """Check a data set made by ``data_prep.convert``, and print the result.

    ``UserError`` names the first thing that is missing, changed or unreadable.
    """
    where = str(destination).rstrip("/")
    with scratch() as folder:
        cache = str(folder)
        try:
            reader, content = _open(where, cache)
            bad = _unusable(reader, num_workers or available_cores())
        except UserError as error:
            full = cause_of_full_disk(error)
            if full is not None and is_remote(where):
                raise full_disk(folder.parent, full) from error
            # it may name files in the temporary folder
            text = re.sub(rf"{re.escape(cache)}/[^/]+/v-\w+", where, str(error))
            raise error.restated(text) from error
    if bad:
        raise UserError(
            f"{where}: {len(bad)} of {len(reader)} samples cannot be used; the first is {bad[0]}. "
            "Copy the data set again, or convert again with --overwrite."
        )
    classes = content.classes
    rows = [
        ("description", f"{content.format}, version {content.version}"),
        ("checksums", f"{len(data_files(content, where))} files"),
        ("images", f"{content.samples} decoded"),
        ("classes", "none" if classes is None else f"{len(classes)}"),
    ]
    print(f"verified {printable(destination)}")
    for name, value in rows:
        print(f"  {name:<16}ok: {value}")


def _open(where: str, cache: str) -> "tuple[Reader, Description]":
    """Return a reader and the description; checksums of local files are verified here.

    A reader of shards in a bucket verifies each after its download.
    """
    from pospre.data.opening import open_reader

    reader = open_reader(where, cache_dir=cache)
    if reader.format == "folder":
        raise UserError(f"{where} is a folder of images; give a .beton file or an MDS directory.")
    content = read_description(reader.path, reader.format)
    files = data_files(content, reader.path.name)
    if is_remote(where):
        reader.close()
        largest = max(size for size, _ in files.values())
        return open_reader(where, cache_dir=cache, cache_limit=_SHARDS_AT_ONCE * largest), content
    folder = reader.path if reader.path.is_dir() else reader.path.parent
    for name, (_, digest) in tqdm(files.items(), unit="file", desc="checksums", disable=None):
        if sha256(folder / name) != digest:
            raise UserError(
                f"{folder / name} does not have the checksum recorded when it was written; copy it "
                f"again. {REMEDY}"
            )
    return reader, content


def _unusable(reader: "Reader", num_workers: int) -> list[str]:
    """Decode every sample on several threads; return messages about unusable ones."""
    from pospre.data.decode.decoder import DecodeError, decode_image

    labels, sums = range(-1, len(reader.classes or ())), reader.checksums

    def problem(index: int) -> str | None:
        sample = reader.read(index)
        if sample.label not in labels:
            return f"label {sample.label} is not one of the {len(labels) - 1} known ones"
        if sums is not None and checksum(sample.encoded.numpy().data, sample.label) != sums[index]:
            return "it does not have the checksum (crc32c) recorded when it was written"
        if reader.features is None:
            try:
                decode_image(sample.encoded, reader.decoding)
            except DecodeError as error:
                return str(error)
        return None

    problems = over_samples(problem, reader, num_workers, "verify")
    return [f"{reader.name(index)}: {why}" for index, why in enumerate(problems) if why]


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
