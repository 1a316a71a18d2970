"""Run by ``composer -n 2``: shards of one process, a disk that is full, and shards from a bucket.

Every rank has its own disk for what it cannot write; the bucket is all that is left in the end.
"""

import os
import shutil
import sys
from pathlib import Path

import boto3
import pytest
from composer.utils import dist

from pospre.run.checkpoints.rank_files import Part
from pospre.train import main
from tests.refusals import refuses
from tests.training.tiny_runs import no_space

RECIPE, RUNS, *OPTIONS = sys.argv[1:]
BUCKET = "trainer.save_folder=s3://bucket/shards"


def train(*options: str) -> int:
    return main([RECIPE, *OPTIONS, *options])


def lose_the_disk(folder: Path) -> None:
    """Leave the checkpoint before the last, in the bucket alone."""
    dist.barrier()
    if dist.get_global_rank() == 0:
        client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
        for path in (folder / "ep1-ba4").iterdir():  # in so short a run it may be left out
            client.upload_file(str(path), "bucket", f"shards/ep1-ba4/{path.name}")
        client.delete_object(Bucket="bucket", Key="shards/ep1-ba6/manifest.json")
        shutil.rmtree(folder)
    dist.barrier()


if __name__ == "__main__":
    assert train(BUCKET) == 0  # from what one process has left

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_global_rank() == 1:
            patch.setattr(Part, "write", no_space)
        refuses(r"ep0-ba2 cannot be written: No space left", lambda: train("run_name=full"))

    lose_the_disk(Path(RUNS) / "tiny" / "checkpoints")
    assert train(BUCKET) == 0
