"""The bytes that a machine will download of a data set in a bucket, computed before the start."""

from pospre.data.loader import ViewLoader
from pospre.data.memory import readable


def describe_data_volume(loader: ViewLoader) -> str | None:
    """Return a line to print at the start; None for local data."""
    if "://" not in loader.reader.address:
        return None
    from pospre.data.bucket.reader import RemoteMdsReader  # boto3 is only for remote data

    reader = loader.reader
    assert isinstance(reader, RemoteMdsReader)
    visits, cached = reader.visits, reader.cached_bytes()
    num_bytes = sum(entry.stored.size for entry in reader.visited)
    node = loader.rank * loader.nodes // loader.world_size + 1
    machine = "this machine" if loader.nodes == 1 else f"machine {node} of {loader.nodes}"
    what = "reads "
    if loader.shard_groups > 1:
        first, last = visits.shard_groups[0] + 1, visits.shard_groups[-1] + 1
        groups = f"shard group {first}" if first == last else f"shard groups {first} to {last}"
        what += f"{groups} of {loader.shard_groups}: "
    here = "all" if cached == num_bytes else readable(cached)
    text = (
        f"{machine} {what}{len(reader.visited)} of {len(reader.parts)} shards in every epoch, "
        f"{readable(num_bytes)}, of which {here if cached else 'none'} is in its cache"
    )
    if not reader.stays:
        text += "; they exceed data.cache_limit, so every epoch downloads them again"
    if loader.shard_groups == 1 and loader.nodes > 1:
        text += (
            f"; in a new run, data.shard_groups: {loader.nodes} would let each machine download "
            f"1/{loader.nodes}"
        )
    return text
