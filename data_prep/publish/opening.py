"""From the name of a destination to where its data set is made."""

from pathlib import Path

from data_prep.publish.destination import Destination
from data_prep.publish.local import LocalBeton, LocalShards
from pospre.errors import UserError
from pospre.object_store import check_writable, is_remote


def open_destination(destination: str | Path, data_format: str) -> Destination:
    """Return the destination of this name; ``UserError`` if it does not fit the format."""
    name = str(destination)
    if is_remote(name):
        if data_format != "mds":
            raise UserError(f"{name}: only MDS shards can go to a bucket; use --format mds.")
        from data_prep.publish.bucket import BucketShards

        check_writable(name)  # reports wrong addresses at once, not after ten attempts
        return BucketShards(name)
    if "://" in name:
        raise UserError(f"{name} is not a supported address; give a path or s3://….")
    path = Path(destination)
    if not path.name:
        raise UserError(f"DST '{name}' has no name; give that of a file or folder to make.")
    is_beton = path.suffix == ".beton"
    if is_beton != (data_format == "ffcv"):
        remedy = "end in .beton" if data_format == "ffcv" else "be a folder, not a .beton"
        raise UserError(f"DST {path} must {remedy} for --format {data_format}.")
    if path.exists() and path.is_dir() == is_beton:
        kind = "folder" if is_beton else "file"
        raise UserError(f"DST {path} is a {kind}; choose another name.")
    return LocalBeton(path) if is_beton else LocalShards(path)
