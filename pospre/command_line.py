"""What the commands share, and those that take a recipe."""

import argparse


def command_parser(command: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """Return a parser to which the command adds its options.

    Args:
        command: the module that is run.
        description: what it does, in a sentence.
        epilog: examples and more, printed as it is.
    """
    return argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def recipe_parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser of ``RECIPE [key=value …]``, see ``command_parser``."""
    parser = command_parser(command, description, epilog)
    parser.add_argument("recipe", help="YAML file; see yamls/")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="change a value of the recipe, for instance trainer.max_duration=2ep",
    )
    return parser
