"""Entry point of `python -m experiments`."""

import sys

__all__ = ["main"]

try:
    from experiments.command_line import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] in ("deltanet_jax", "experiments"):
        raise
    sys.exit(
        f"error: `python -m experiments` needs {error.name}; "
        "run pip install '.[experiments]' in a checkout"
    )

if __name__ == "__main__":
    sys.exit(main())
