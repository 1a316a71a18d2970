"""``python -m pospre.certify RECIPE [key=value …]``: is a run that was killed the same run?"""

import sys

from pospre.command_line import recipe_parser
from pospre.errors import UserError, run_command
from pospre.recipe.recipe import load_recipe

_EPILOG = """\
examples:
  python -m pospre.certify yamls/demo/mae.yaml data.path=photos
  python -m pospre.certify yamls/demo/dinov2.yaml data.path=photos --kills 8 --steps 16
  python -m pospre.certify yamls/demo/mae.yaml data.path=photos --ranks 1 \\
      --also "data.path=photos.mds data.num_workers=0" --also trainer.microbatch_size=16

The recipe is trained for a few steps undisturbed, on one process, and again while it is ended and
started again: --kills times by SIGKILL in the middle of a step, in the middle of a save and before
the first step, and by SIGTERM; then on another number of ranks at every start (--ranks, over gloo
on CPUs), and, for each --also, with these keys at every second start. The moments are drawn from
--seed. Compared are, for every step: sample ids, boxes, flips, pixels, masks and all else that was
drawn, the losses and the weights; in the end optimiser and random state. On one process all must
be the same bits; on several ranks, and with other microbatches, losses and weights may differ by
1e-5, in fp32 (as which a recipe of another precision is run for it). Where a method looks at all
samples of a forward at once, as DINOv2's targets do, its losses depend on the number of ranks: it
is killed on the greatest of --ranks and compared with a run on as many.

What it runs lies in <trainer.run_folder>/<run_name>/certificate, beside the run's own checkpoints,
which it leaves alone; certificate.json and certificate.md stay there.

exit codes: 0 green; 1 red: something differs, the table says what and from which step on; 2 a
mistake in the recipe or the data, or a run that ended by itself (said in one message).
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = "Prove that a recipe gives the same model however often it is killed."
    parser = recipe_parser("pospre.certify", description, _EPILOG)
    add = parser.add_argument
    add("--kills", type=int, default=4, help="of the killed run (4)")
    add("--steps", type=int, default=12, help="that the runs have (12)")
    add("--save-every", type=int, default=2, metavar="STEPS", help="between checkpoints (2)")
    add("--ranks", default="1,2,1", help="of the starts of a further run (1,2,1); 1: no such run")
    add("--also", action="append", default=[], metavar="KEYS", help="of a further run; see below")
    add("--seed", type=int, default=0, help="of the moments (0)")
    arguments = parser.parse_intermixed_args(argv)
    for option, value, least in (
        ("--kills", arguments.kills, 1),
        ("--steps", arguments.steps, 4),
        ("--save-every", arguments.save_every, 1),
    ):
        if value < least:
            raise UserError(f"{option} is {value}; give at least {least}")
    ranks = _ranks(arguments.ranks)
    load_recipe(arguments.recipe, arguments.overrides)
    # Late, so that --help and a mistyped key answer at once.
    from pospre.certificate.certificate import Request, certify, headline, table
    from pospre.certificate.observer import train_observed

    request = Request(
        recipe=arguments.recipe,
        overrides=tuple(arguments.overrides),
        steps=arguments.steps,
        save_every=arguments.save_every,
        kills=arguments.kills,
        ranks=ranks,
        also=tuple(tuple(keys.split()) for keys in arguments.also),
        seed=arguments.seed,
    )
    certificate, folder = certify(request, train_observed)
    print(f"{table(certificate)}\n{headline(certificate)}\n{folder}/certificate.md")
    return 0 if certificate.is_green else 1


def _ranks(given: str) -> tuple[int, ...]:
    parts = given.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--ranks is '{given}'; give numbers of ranks such as 1,2,1")
    return tuple(map(int, parts))


if __name__ == "__main__":
    sys.exit(run_command(main))
