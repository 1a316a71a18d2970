"""Loaders on local data: their speed, how near it is to decoding alone, and our memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.loader_bench import MULTI_CROP, ONE_VIEW, Bench
from tests.benchmarks.loader_tables import Row, Table, rate_rows
from tests.benchmarks.loader_worker import Epoch, LoaderDied, Views, leave_out, take_turns

MEMORY_EPOCHS = 20

# Of each contestant: function of loader_peers, format of the data, options.
_Contestants = dict[str, tuple[str, str, dict[str, Any]]]
_OURS: _Contestants = {
    "ours, .beton": ("ours", "beton", {}),
    "ours, .beton, bilinear": ("ours", "beton", {"interpolation": "bilinear"}),
    "ours, .beton --seekable": ("ours", "seekable", {}),
    "ours, .beton --seekable, bilinear": ("ours", "seekable", {"interpolation": "bilinear"}),
    "ours, MDS": ("ours", "mds", {}),
    "ours, folder": ("ours", "folder", {}),
}
_FFCV: _Contestants = {
    "stock FFCV": ("ffcv", "beton", {}),
    "stock FFCV, workqueue": ("ffcv", "beton", {"layer": "workqueue"}),
}
_TORCHVISION: _Contestants = {"torchvision DataLoader": ("torchvision", "folder", {})}
_BICUBIC: _Contestants = {
    "torchvision DataLoader, bicubic": ("torchvision", "folder", {"interpolation": "bicubic"})
}
_OTHERS: _Contestants = {
    "litdata": ("litdata", "litdata", {}),
    "webdataset": ("webdataset", "webdataset", {}),
    "stock StreamingDataset": ("streaming", "stock_mds", {}),
    "DALI, CPU": ("dali", "folder", {}),
}
_REFERENCES = {
    "× stock FFCV": list(_FFCV),
    "× torchvision": list(_TORCHVISION),
    "× torchvision, bicubic": list(_BICUBIC),
    "× best other": list(_OTHERS),
}


def one_view(bench: Bench) -> Table:
    """Random resized crops of 224 pixels, one of every image."""
    return _compare(bench, "one-view", "1×224 RandomResizedCrop (scale .08–1)", ONE_VIEW)


def multi_crop(bench: Bench) -> Table:
    """DINO's ten views of every image."""
    title = "2×224 (scale .32–1) + 8×96 (scale .05–.32)"
    return _compare(bench, "multi-crop", title, MULTI_CROP)


def _compare(bench: Bench, case: str, title: str, views: Sequence[Views]) -> Table:
    jobs, contestants = {}, _OURS | _FFCV | _TORCHVISION | _BICUBIC | _OTHERS
    for name, (loader, kind, options) in contestants.items():
        try:
            jobs[name] = bench.job(loader, bench.prepared(kind), views, **options)
        except LoaderDied as error:
            leave_out(name, str(error))
    epochs = take_turns(jobs, bench.runs, bench.work)
    firsts = {name: f"{some[0].first_batch or 0:.1f}" for name, some in epochs.items()}
    rows = rate_rows(_rates(epochs), _REFERENCES, {"first batch, s": firsts})
    return Table(case, f"{title}, original sizes", "images/s", rows)


def decode_bound(bench: Bench) -> Table:
    """How much of what libjpeg-turbo alone decodes comes out as views."""
    mds = bench.prepared("mds")
    limits = {
        "libjpeg-turbo alone, full size": (ONE_VIEW, {}),
        "libjpeg-turbo alone, at the scale of 1×224": (ONE_VIEW, {"at_scale": True}),
        "libjpeg-turbo alone, at the scale of 2×224 + 8×96": (MULTI_CROP, {"at_scale": True}),
    }
    jobs = {
        name: bench.job("turbojpeg", mds, views, **options)
        for name, (views, options) in limits.items()
    }
    jobs["ours, MDS, 1×224"] = bench.job("ours", mds, ONE_VIEW)
    jobs["ours, MDS, 2×224 + 8×96"] = bench.job("ours", mds, MULTI_CROP)
    columns = ("of full size", "of the scale of 1×224", "of the scale of 2×224 + 8×96")
    references = {column: [name] for column, name in zip(columns, limits, strict=True)}
    rates = _rates(take_turns(jobs, bench.runs, bench.work))
    title = f"decoding alone, bytes in memory, {bench.num_workers} threads, and our share of it"
    return Table("decode-bound", title, "images/s", rate_rows(rates, references))


def memory(bench: Bench) -> Table:
    """Our loader's memory over many epochs, beside its own estimate."""
    jobs = {
        name: bench.job("ours", bench.prepared(kind), MULTI_CROP)
        for name, (_, kind, options) in _OURS.items()
        if kind != "seekable" and not options
    }
    rows = []
    for name, epochs in take_turns(jobs, MEMORY_EPOCHS - 1, bench.work).items():
        last, second = epochs[-1], epochs[1]
        more = {
            "its estimate, MB": _megabytes(last.estimate or 0),
            f"growth, epoch 2 to {len(epochs)}, MB": _megabytes(last.resident - second.resident),
            "whole process, MB": _megabytes(last.peak),
        }
        resident = [epoch.resident / 1e6 for epoch in epochs]
        rows.append(Row(name, (last.peak - last.before) / 1e6, {}, more, resident))
    title = f"memory at its peak over {MEMORY_EPOCHS} epochs of 2×224 + 8×96, beyond the libraries"
    return Table("memory", title, "MB", rows)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f}"


def _rates(epochs: Mapping[str, Sequence[Epoch]]) -> dict[str, list[float]]:
    """Return the rates of all epochs but the first, which warms up."""
    return {name: [epoch.rate for epoch in some[1:]] for name, some in epochs.items()}
