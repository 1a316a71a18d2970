"""What a destination's name stands for."""

from pathlib import Path

from data_prep.publish.destination import Destination
from pospre.errors import UserError
from pospre.object_store import check_writable, is_remote


def open_destination(destination: str | Path, data_format: str) -> Destination:
    """Return what a destination's name stands for.

    Raises:
        UserError: the name does not suit the format, or the bucket cannot be written.
    """
    name = str(destination)
    if is_remote(name):
        if data_format != "mds":
            raise UserError(f"{name}: only MDS shards go straight to a bucket; use --format mds.")
        from data_prep.publish.bucket import BucketShards

        check_writable(name)  # wrong addresses are said at once, not after ten tries
        return BucketShards(name)
    if "://" in name:
        raise UserError(f"{name} is of a kind that is not written; give a path or s3://….")
    from data_prep.publish.local import LocalBeton, LocalShards

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
