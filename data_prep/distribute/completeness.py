"""Whether the finished blocks are all there, and are those of one conversion."""

from collections.abc import Sequence

from data_prep.distribute.blocks import Block, Share
from data_prep.distribute.plan import Plan, ranges
from data_prep.distribute.tally import Record
from pospre.errors import UserError


def check_own(found: dict[int, Record], plan: Plan, where: str) -> None:
    """Refuse blocks of another conversion.

    Raises:
        UserError: there are some.
    """
    foreign = [number for number, record in found.items() if not plan.owns(record)]
    if foreign:
        raise UserError(
            f"{where} holds blocks of another conversion (blocks {ranges(foreign)}); remove these "
            "parts, or write them again from the same images with the same settings."
        )


def check_blocks(found: dict[int, Record], plan: Plan, where: str) -> None:
    """Refuse to go on without all blocks.

    Raises:
        UserError: some are missing or foreign.
    """
    check_own(found, plan, where)
    missing = set(range(plan.num_blocks)) - set(found)
    if missing:
        raise UserError(
            f"{where} lacks part {_which_parts(found, missing, plan)} (blocks {ranges(missing)} of "
            f"{plan.num_blocks}); write it, or copy it there, then merge."
        )


def check_samples(records: Sequence[Record], plan: Plan, source: object) -> None:
    """Refuse to make an empty data set.

    Raises:
        UserError: there is no sample in it.
    """
    if any(record.labels for record in records):
        return
    first = next(item for record in records for item in record.skipped)
    raise UserError(
        f"{source}: none of the {plan.num_items} {plan.noun} can be read ({first['path']}: "
        f"{first['reason']}); nothing was written."
    )


def _which_parts(found: dict[int, Record], missing: set[int], plan: Plan) -> str:
    """Name the parts that hold missing blocks, counted as those were that are there."""
    count = max((record.num_shares for record in found.values()), default=1)
    blocks = [Block(number, 0, 0) for number in range(plan.num_blocks)]
    shares = [Share(number, count) for number in range(1, count + 1)]
    return ", ".join(
        f"{share.number}/{count}"
        for share in shares
        if missing.intersection(block.number for block in share.of(blocks))
    )
