"""What the commands that take a recipe share."""

import argparse


def recipe_parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser of ``RECIPE [key=value …]``; the command adds its own options.

    Args:
        command: the module that is run.
        description: what it does, in a sentence.
        epilog: examples and more, printed as it is.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="YAML file; see yamls/")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="change a value of the recipe, for instance trainer.max_duration=2ep",
    )
    return parser
