"""What would make loading cheaper, from what it costs."""

from pospre.loader_costs.costs import WORK, LoaderCosts, RemoteCosts
from pospre.loader_costs.image_sizes import ImageSizes

_LARGE = 4.0  # times the pixels that views need: worth storing smaller
_SLOW_READ = 0.2  # share of the loader's time
_QUICK_READ = 2e-4  # seconds; what is in memory never takes that long
_HEAVY = 4.0  # bits per pixel; JPEGs of quality 90 have about 2 to 3
_RARE = 0.05  # share of images
_SLOW_FETCH = 0.7  # of the rate from the cache


def advise(costs: LoaderCosts) -> list[str]:
    """Return advice, the most effective first."""
    found = []
    work = sum(costs.alone.stages[stage] for stage in WORK)
    share = {stage: costs.alone.stages[stage] / work for stage in WORK}
    if costs.sizes is not None:
        found += _size(costs.sizes, share["decode"])
        found += _encoding(costs.sizes)
    found += _storage(costs, share["read"])
    if costs.remote is not None:
        found += _cache(costs, costs.remote)
    if costs.feed is not None and costs.loaded_per_s < costs.feed and costs.workers < costs.cores:
        found.append(
            f"{costs.workers} threads use {max(1, costs.workers)} of {costs.cores} cores: leave "
            "data.num_workers out"
        )
    return found


def _size(sizes: ImageSizes, decode: float) -> list[str]:
    if sizes.pixels <= _LARGE * sizes.pixels_needed:
        return []
    return [
        f"images have {sizes.pixels / sizes.pixels_needed:.0f} times the pixels that views need at "
        f"full detail: convert with --max-side {sizes.max_side} (decode is {decode:.0%} of loading)"
    ]


def _encoding(sizes: ImageSizes) -> list[str]:
    if sizes.has_bands:
        return []
    if sizes.is_raw:
        return ["pixels are stored raw, 24 bits each: as JPEGs of --quality 90 they have about 2.5"]
    found = []
    if sizes.other_than_jpeg > _RARE:
        found.append(
            f"{sizes.other_than_jpeg:.0%} of the images are no JPEGs, which are slower to decode: "
            "conversion makes JPEGs of --quality 90 of them"
        )
    elif sizes.bits_per_pixel > _HEAVY:
        found.append(
            f"{sizes.bits_per_pixel:.1f} bits per pixel, all of which are decoded; --quality 90 "
            "has about 2.5, but conversion encodes only those JPEGs anew that --max-side shrinks"
        )
    return found


def _storage(costs: LoaderCosts, read: float) -> list[str]:
    if costs.format == "folder":
        return [
            f"a folder is read file by file ({read:.0%} of loading here): convert to .beton or MDS "
            "(make data), which network file systems need"
        ]
    seconds = costs.alone.stages["read"] / costs.alone.images
    if read <= _SLOW_READ or seconds <= _QUICK_READ:
        return []
    if costs.remote is not None:
        return [f"reading is {read:.0%} of loading: put data.cache_dir on a faster disk"]
    return [
        f"reading is {read:.0%} of loading: copy to a faster disk; data that fit into memory are "
        "read from there after an epoch"
    ]


def _cache(costs: LoaderCosts, remote: RemoteCosts) -> list[str]:
    found = []
    if not remote.cache_suffices:
        found.append(
            f"every epoch downloads again: with data.cache_limit from "
            f"{gigabytes(remote.unpacked_bytes)} each machine downloads once"
        )
    if costs.order == "random" and remote.fetched_per_s < _SLOW_FETCH * costs.loaded_per_s:
        found.append(
            "data.order: random asks for nearly all shards at once, so the first epoch starts "
            "slowly; data.order: windows needs few at a time"
        )
    return found


def gigabytes(num_bytes: float) -> str:
    """Return a size for people, such as ``12.3 GB``."""
    digits = 1 if num_bytes >= 1e10 else 2 if num_bytes >= 1e8 else 4
    return f"{num_bytes / 1e9:.{digits}f} GB"
