"""One short run, killed again and again, with its checkpoints in a bucket behind a bad network.

Run it as ``python tests/drills/s3_kills.py`` with PYTHONPATH=. (``make drill``).
"""

import argparse
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import boto3

from pospre.certificate.verdicts import Verdict
from pospre.output import markdown_table
from tests.data.flaky_s3 import FlakyS3, access, flaky_s3
from tests.data.seaweed import seaweed
from tests.data.storm import Storm
from tests.drills.conversions import kill_conversions
from tests.drills.drill import Drill, Tally

RATES = {
    "500": 0.02,
    "503": 0.02,
    "reset": 0.015,
    "lost answer": 0.01,
    "truncation": 0.015,
    "delay": 0.03,
    "silence": 0.004,
}
_EPILOG = """\
examples:
  python tests/drills/s3_kills.py --kills 200 --outages 5,60,300
  python tests/drills/s3_kills.py --kills 10 --outages 2 --seed 7
  python tests/drills/s3_kills.py --server seaweedfs --kills 20 --outages 20,120 --conversions 4

A tiny DropPos saves every second step, to an S3 server (moto's or SeaweedFS) behind a proxy. Of its
requests 11 % meet trouble: 500, 503, a connection that is reset before or after the server has done
what it was asked, a body cut short, an answer that is late or never comes; and for each of
--outages all of them do. SeaweedFS itself is killed then, and started again. The run is killed in
the middle of a step, a save, an upload, a download and before its first step; one kill in three
takes the local disk away as well.

After every process the newest checkpoint in the bucket must load as it lies there, the next one
must go on from the newest whole one on disk or in the bucket, and no more steps may be lost than
since the last save that was whole. In the end draws, losses, weights, optimiser and random state
must be those of a run that nothing disturbed, to the bit.

Before that, --conversions kills a conversion into the bucket so many times with -9; its shards must
be those of an undisturbed conversion.

exit codes: 0 all of it holds, 1 something does not (the table says what).
"""


def main() -> int:
    """Parse the command line, drill, and print the table."""
    parser = argparse.ArgumentParser(
        description="Kill a run whose checkpoints are in a bucket that misbehaves.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, help="of the run; by default two for each kill")
    parser.add_argument("--outages", default="5,60,300", help="seconds of each (5,60,300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", choices=("moto", "seaweedfs"), default="moto")
    parser.add_argument("--conversions", type=int, default=0, help="kills of a conversion (0)")
    parser.add_argument("--keep", type=Path, help="folder to work in, which stays")
    arguments = parser.parse_args()
    outages = [float(seconds) for seconds in arguments.outages.split(",") if seconds]
    steps = arguments.steps or 2 * arguments.kills
    with tempfile.TemporaryDirectory(prefix="pospre-drill-") as temporary:
        folder = arguments.keep or Path(temporary)
        tally, verdicts = drill(
            folder,
            arguments.kills,
            steps,
            outages,
            arguments.seed,
            server=arguments.server,
            conversions=arguments.conversions,
        )
    bad = bool(tally.faults) or not all(verdict.holds for verdict in verdicts)
    return int(bad)


def drill(
    folder: Path,
    kills: int,
    steps: int,
    outages: Sequence[float],
    seed: int,
    silence: float = 22.0,
    server: str = "moto",
    conversions: int = 0,
) -> tuple[Tally, list[Verdict]]:
    """Run the drill and print its table.

    Args:
        folder: for everything.
        kills: how many.
        steps: of the run.
        outages: seconds of each.
        seed: of all draws.
        silence: seconds that a request goes unanswered, if it is drawn to be.
        server: behind the proxy, ``moto`` or ``seaweedfs``.
        conversions: kills of a conversion before it.
    """
    began = time.monotonic()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's requests
    with _proxy(server, folder) as (proxy, crash):
        os.environ.update(access(proxy.upstream))
        it = Drill(folder, proxy, steps, seed, crash)
        if conversions:
            client = boto3.client("s3", endpoint_url=proxy.upstream)
            converted = kill_conversions(folder, client, conversions, seed)
            it.tally.faults += converted.faults
            print(
                f"a conversion killed with {converted.killed} objects in the bucket ended after "
                f"{converted.seconds:.0f} s more: {converted.faults or 'bit-equal shards'}"
            )
        reference, values, pace = it.undisturbed()
        proxy.storm = storm = Storm(seed, RATES, delay=1.0, silence=silence)
        it.disturb(kills, _spread(outages, kills, seed), pace)
        verdicts = it.verdicts(reference, values)
    seconds = time.monotonic() - began
    print(_table(it.tally, verdicts, storm, kills, steps, outages, seconds))
    return it.tally, verdicts


@contextmanager
def _proxy(server: str, folder: Path) -> Iterator[tuple[FlakyS3, Callable[[float], None] | None]]:
    """Run a server with an empty bucket, and the proxy; give it, and what kills the server."""
    if server == "moto":
        with flaky_s3() as proxy:
            os.environ.update(access(proxy.upstream))
            boto3.client("s3", endpoint_url=proxy.upstream).create_bucket(Bucket="bucket")
            yield proxy, None
        return
    with seaweed(folder / "seaweed") as running, closing(FlakyS3(running.port)) as proxy:

        def crash(seconds: float) -> None:
            running.kill()
            time.sleep(seconds)
            running.start()

        yield proxy, crash


def _spread(outages: Sequence[float], kills: int, seed: int) -> dict[int, tuple[float, str]]:
    """Return what happens with which kill: outages all over the run, of different kinds."""
    draws = random.Random(f"{seed}/outages")
    numbers = draws.sample(range(1, kills), len(outages))
    kinds = ("reset", "503", "silence")
    pairs = zip(numbers, outages, strict=True)
    return {n: (seconds, kinds[place % 3]) for place, (n, seconds) in enumerate(pairs)}


def _table(
    tally: Tally,
    verdicts: Sequence[Verdict],
    storm: Storm,
    kills: int,
    steps: int,
    outages: Sequence[float],
    seconds: float,
) -> str:
    def spread(values: Sequence[int]) -> str:
        if not values:
            return "–"
        return (
            f"at most {max(values)}, {statistics.mean(values):.2f} on average, {len(values)} starts"
        )

    def counts(values: dict[str, int]) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(values.items())) or "none"

    killed = sum(tally.ends.values())
    rows = [
        ("run", f"{steps} steps, {killed} of {kills} kills, {seconds:.0f} s"),
        ("killed", counts(tally.ends)),
        ("requests in trouble", counts(storm.met)),
        ("outages", ", ".join(f"{each:g} s" for each in outages) or "none"),
        ("starts refused, then given again", str(sum(tally.refused.values()))),
        ("steps lost with the disk kept", spread(tally.lost)),
        ("steps lost with the disk gone", spread(tally.lost_with_disk)),
        ("broken promises", str(len(tally.faults))),
        *((verdict.property, verdict.text) for verdict in verdicts),
    ]
    lines = [markdown_table(["what", "found"], rows)]
    for message, count in tally.refused.most_common():
        lines.append(f"refused {count} times: {message}")
    return "\n".join([*lines, *(f"broken: {fault}" for fault in tally.faults)])


if __name__ == "__main__":
    sys.exit(main())
