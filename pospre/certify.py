"""``python -m pospre.certify RECIPE [key=value …]``: prove that killed runs give the same model."""

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

The recipe trains for a few steps in one undisturbed process. It then trains again, killed and
restarted --kills times: by SIGKILL during a step, during a save and before the first step, and by
SIGTERM. A third run has other ranks at every start (--ranks, over gloo on CPUs). For each --also,
one more run uses those keys at every second start. --seed sets the times of the kills.

For every step, these are compared: sample ids, boxes, flips, pixels, masks and all other draws, the
losses and the weights; at the end, optimiser and random state. In one process all of them must be
bit-equal. On several ranks, and with other microbatches, losses and weights may differ by 1e-5 in
fp32. A recipe of another precision is run in fp32 for this. If a method looks at all samples of a
forward at once, as DINOv2's targets do, its losses depend on the number of ranks. It is then killed
on the largest number in --ranks and compared with a run on as many; --ranks 2,2,2 does so for any
method. On two ranks beside two, all must be bit-equal. A recipe with stages is killed near their
ends; its stages become equally long, of two steps or more.

All files are in <trainer.run_folder>/<run_name>/certificate. The run's own checkpoints are not
touched. certificate.json and certificate.md stay there.

exit codes: 0 green; 1 red, and the table says what differs from which step on; 2 a mistake in the
recipe or the data, or a run that failed by itself, with one message.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = "Prove that a recipe gives the same model, no matter how often it is killed."
    parser = recipe_parser("pospre.certify", description, _EPILOG)
    add = parser.add_argument
    add("--kills", type=int, default=4, help="kills of the killed run (4)")
    add("--steps", type=int, default=12, help="steps of each run (12)")
    add("--save-every", type=int, default=2, metavar="STEPS", help="steps between checkpoints (2)")
    add(
        "--ranks",
        default="1,2,1",
        help="ranks at each start of the third run (1,2,1); 1: no such run",
    )
    add(
        "--also",
        action="append",
        default=[],
        metavar="KEYS",
        help="keys of one more run; see below",
    )
    add("--seed", type=int, default=0, help="seed of the times of the kills (0)")
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
    # late imports, so that --help and mistyped keys are fast
    from pospre.certificate.certificate import Request, certify, headline, table
    from pospre.certificate.step_records import train_observed

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
