"""Run by ``composer -n 2``: a full disk, and a run that goes on from the disk and from a bucket.

In the end the second rank sees another file than the first; the exit code is that of this start.
"""

import os
import shutil
import sys
from pathlib import Path

import boto3
import pytest
from composer.utils import dist

from pospre.errors import UserError, run_command
from pospre.run.checkpoints import reading
from pospre.run.checkpoints.rank_files import Part
from pospre.train import main
from tests.training.tiny_runs import curve, no_space

RECIPE, RUNS, *OPTIONS = sys.argv[1:]
BUCKET = "trainer.save_folder=s3://bucket/far"
FOLDER = Path(RUNS) / "tiny" / "checkpoints"


def train(*options: str) -> int:
    return run_command(lambda: main([RECIPE, *OPTIONS, *options]))


def copy(source: Path, target: Path) -> None:
    dist.barrier()
    if dist.get_global_rank() == 0:
        shutil.copytree(source, target, dirs_exist_ok=True)
    dist.barrier()


def as_if_killed(*, disk_lost: bool = False) -> None:
    """Leave the checkpoint before the last on the disk, or only in the bucket."""
    dist.barrier()
    if dist.get_global_rank() == 0:
        shutil.rmtree(FOLDER / "ep1-ba6")
        if disk_lost:
            client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
            for path in (FOLDER / "ep1-ba4").iterdir():
                client.upload_file(str(path), "bucket", f"far/ep1-ba4/{path.name}")
            shutil.rmtree(FOLDER)
    dist.barrier()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Part, "write", no_space)
        with pytest.raises(UserError, match=r"ep0-ba2 cannot be written: No space left"):
            main([RECIPE, *OPTIONS, "run_name=full"])
    assert train() == 0
    copy(FOLDER.parent, Path(RUNS) / "whole")
    whole = curve(FOLDER.parent)
    as_if_killed()
    assert train() == 0
    assert curve(FOLDER.parent) == whole
    as_if_killed(disk_lost=True)
    assert train(BUCKET) == 0
    assert curve(FOLDER.parent) == whole
    copy(Path(RUNS) / "whole", FOLDER.parent)
    as_if_killed()
    read_same = reading._read_same
    reading._read_same = lambda place, *noted: read_same(
        str(Path(place).with_name("ep0-ba2")), *noted
    )
    sys.exit(train())
