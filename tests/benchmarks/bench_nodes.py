"""How many bytes each of several machines downloads from a bucket, with and without shard groups.

``python -m tests.benchmarks.bench_nodes`` serves 4096 small JPEGs in small shards from a local S3
server and lets the loaders of 1, 2 and 4 machines, one after another, read two epochs, each machine
with a cache of its own. In the rows "dealt anew" the shard groups differ between the epochs, as
they would if each epoch drew its own.
"""

import io
import logging
import os
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

from pospre.data.loader import build_loader
from pospre.data.views.options import ViewGroup
from pospre.object_store import Bucket
from pospre.output import format_table
from tests.data.flaky_s3 import access, moto_server

NUM_SAMPLES, BATCH_SIZE, GROUPS, WINDOW = 4096, 64, 4, 512
ADDRESS = "s3://bucket/set"


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # no line for each request
    with moto_server() as port, tempfile.TemporaryDirectory() as folder:
        os.environ |= access(f"http://127.0.0.1:{port}")
        total = serve(Path(folder) / "shards")
        print(table(Path(folder), total))


def serve(folder: Path) -> int:
    """Write shards and put them into the bucket; return their bytes."""
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=150_000) as writer:
        for number in range(NUM_SAMPLES):
            pixels = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).resize((64, 64)).save(file, "jpeg", quality=95)
            writer.write({"image": file.getvalue(), "label": number})
    client = Bucket(ADDRESS).client
    client.create_bucket(Bucket="bucket")
    for path in folder.iterdir():
        client.upload_file(str(path), "bucket", f"set/{path.name}")
    return sum(path.stat().st_size for path in folder.glob("*.mds"))


def table(folder: Path, total: int) -> str:
    """Return what each machine fetches, in % of the data set: mean and most."""
    rows = []
    kinds = [
        ("one shard group", 1, 0),
        ("4 shard groups", GROUPS, 0),
        ("4 shard groups, dealt anew", GROUPS, 1),
    ]
    for number, (limited, (kind, shard_groups, step), nodes) in enumerate(
        product((False, True), kinds, (1, 2, 4))
    ):
        limit = total * 6 // 10 if limited else None
        found = [
            fetched(folder / f"{number}-{node}", node, nodes, shard_groups, limit, step)
            for node in range(nodes)
        ]
        shares = 100 * np.array(found).T / total  # epoch, machine
        cells = [f"{share.mean():.1f} ({share.max():.1f})" for share in shares]
        rows.append((kind, "60 %" if limited else "none", str(nodes), *cells))
    title = f"{total / 1e6:.1f} MB; fetched by each machine, in % of that: mean (most)"
    return format_table(title, ("order", "limit", "machines", "epoch 1", "epoch 2"), rows, [])


def fetched(
    cache: Path, node: int, nodes: int, shard_groups: int, limit: int | None, step: int
) -> list[int]:
    """Return the bytes that a machine of one rank fetches in each epoch."""
    epochs = []
    for epoch in range(2):
        loader = build_loader(
            ADDRESS,
            views=[ViewGroup("view", 1, (16, 16))],
            batch_size=BATCH_SIZE // nodes,
            rank=node,
            world_size=nodes,
            nodes=nodes,
            seed=epoch * step,
            order="windows",
            window=WINDOW,
            shard_groups=shard_groups,
            cache_dir=cache,
            cache_limit=limit,
        )
        loader.epoch = epoch
        for _ in loader:
            pass
        epochs.append(loader.reader.downloaded)  # type: ignore[attr-defined]
    return epochs


if __name__ == "__main__":
    main()
