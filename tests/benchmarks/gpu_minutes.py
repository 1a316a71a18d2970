"""What a card with GPUs does, in the minutes that there are: the figures of most worth first.

    make gpu-minutes ARGS="--minutes 8"      # the list of gpu_items.py; again: what is missing
    make gpu-report                          # hours: every method, size and setting, on all GPUs
    make gpu-report DATA=/data/in1k.mds ARGS="--only mae dinov2"
    python -m tests.benchmarks.gpu_minutes --device cpu     # a rehearsal: everything is tiny

Each item is a process of its own. Several prepare beside each other (imports, compiling into one
cache, the first steps); then those that measure speed get the card one after another. What an item
gives is appended to --results at once, a JSON line. A later call does what the file lacks for this
card, then what was measured with other code. An item that does not fit into the time that is left
is skipped. Items that fail say so in a line, and are tried again last.

exit codes: 0 done, also if items failed; 2 a mistake in an option, or no GPU.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pospre.data.threads import available_cores
from tests.benchmarks import gpu_table
from tests.benchmarks.gpu_items import ROOT, Item, grid, matching, minutes
from tests.benchmarks.gpu_kit import Card, Kit, Line, say

WORK = ROOT / "runs/gpu_minutes"


def read(path: Path) -> list[Line]:
    """Return the lines of a file of results, without one that was cut off."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            say(f"{path}: a line that was cut off is left out")
    return found


def missing(items: Sequence[Item], lines: Sequence[Line], about: Line) -> list[Item]:
    """Return what is still to be done on a card, the most worth first.

    That is what it never did, then what it did with other code, then what failed with this code.
    """
    same = ("item", "asked", "card")
    last = {json.dumps([line[key] for key in same]): line for line in lines if line.get("kind")}

    def rank(item: Item) -> int:
        key = json.dumps([item.name, item.asked, about["card"]])
        if (line := last.get(key)) is None:
            return 0
        is_same = line["code"] == about["code"]
        if "failed" in line:
            return 2 if is_same else 0
        return 3 if is_same else 1

    return [item for wanted in range(3) for item in items if rank(item) == wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is missing, and print the table."""
    options = _parse(argv)
    tiny = options.device == "cpu"
    items = minutes(tiny=tiny, cores=available_cores())
    if options.grid:
        ranks = 1 if tiny else torch.cuda.device_count()
        items = grid(tiny=tiny, ranks=ranks, data=options.data)
        if ranks > 1:
            options.jobs = 1  # ranks that wait long for others would time out
    if options.set:
        for item in items:
            if "overrides" in item.asked:
                item.asked["overrides"] += options.set
    items = matching(items, options.only)
    if options.list:
        print("\n".join(f"{one.name} ({one.prepares + one.timed:.0f} s)" for one in items))
        return 0
    kit = Kit(options, Card.here(options.device))
    todo = missing(items, read(options.results), kit.about)
    say(f"{kit.card.name}, {kit.card.gib:.0f} GiB; {len(todo)} of {len(items)} items to do")
    if kit.card.known is None:
        say("nothing is predicted for this card: it is not among those of pospre.plan")
    kit.run(todo)
    print(gpu_table.table([one for one in read(options.results) if one["card"] == kit.card.name]))
    size = sum(path.stat().st_size for path in options.cache.rglob("*") if path.is_file())
    say(f"results in {options.results}; compiled code in {options.cache}, {size / 2**20:.0f} MiB")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, help="when the command ends; without it, when all is done")
    add("--grid", action="store_true", help="every method, size and setting, on all GPUs")
    add("--data", help="images; the grid then has each item with them as well")
    add("--only", nargs="+", default=[], metavar="WORD", help="items whose names have one of these")
    add("--set", nargs="+", default=[], metavar="key=value", help="changes every recipe")
    add("--device", default="gpu", choices=("gpu", "cpu"), help="cpu: a rehearsal, tiny")
    add("--results", type=Path, help=f"JSON lines ({gpu_table.RESULTS.relative_to(ROOT)})")
    add("--work", type=Path, default=WORK, help="what processes say and compile (runs/…)")
    add("--cache", type=Path, help="compiled code (cache in --work)")
    add("--jobs", type=int, default=max(1, available_cores() // 2), help="processes at once")
    add("--revision", help="git's, where there is no checkout")
    add("--list", action="store_true", help="only show what would be done")
    options = parser.parse_args(argv)
    if options.device == "gpu" and not options.list and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu rehearses the command, with everything tiny")
    default = WORK / "rehearsal.jsonl" if options.device == "cpu" else gpu_table.RESULTS
    options.results = (options.results or default).absolute()
    options.work = options.work.absolute()
    options.cache = (options.cache or options.work / "cache").absolute()
    return options


if __name__ == "__main__":
    sys.exit(main())
