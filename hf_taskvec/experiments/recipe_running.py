"""How a recipe is run as a script: what a terminal shows of its results, of errors and of Ctrl-C."""

import sys
from collections.abc import Callable

from hf_taskvec.distributed import processes
from hf_taskvec.errors import TaskVectorError
from hf_taskvec.escaping import readable_in_any_encoding


def run_recipe(main: Callable[[], object]) -> None:
    """Run a recipe's `main`; an error of ours is one line with exit code 1, Ctrl-C one with exit code 130.

    Args:
        main (`Callable`):
            The recipe.
    """
    readable_in_any_encoding()
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped; run the same command to go on", file=sys.stderr)
        sys.exit(130)
    except TaskVectorError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def print_once(text: str) -> None:
    """Print on the main process alone."""
    if processes().is_main_process:
        print(text, flush=True)
