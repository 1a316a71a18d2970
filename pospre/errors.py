"""What a user's mistake looks like: one message, exit code 2, no traceback."""

import difflib
import os
import sys
import time
from collections.abc import Callable, Iterable


class UserError(ValueError):
    """A mistake the user can mend; its message names the key or path, the value and the remedy."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest of ``known``, or list them if none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f" Did you mean '{near[0]}'?" if near else f" Known: {', '.join(names)}."


def run_command(main: Callable[[], int]) -> int:
    """Run a command-line entry and return its exit code (2 for a ``UserError``, 130 for Ctrl-C)."""
    try:
        return main()
    except UserError as error:
        if int(os.environ.get("RANK", "0")) > 0:
            # rank 0 has mostly met the same mistake: it speaks, and the launcher ends the others
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
