"""Fails unless the package that Python finds from here is installed, typed and of one version.

Run by `make test-wheel` in a folder that has the tests and not the package. With `--types` mypy
reads a user's code beside the installed package.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import jax

import deltanet_jax

USER_CODE = Path(__file__).parent / "typed_user.py"


def main() -> None:
    package = Path(deltanet_jax.__file__).resolve().parent
    if not package.is_relative_to(Path(sys.prefix).resolve()):
        sys.exit(f"deltanet_jax comes from {package}, which is not installed in {sys.prefix}")
    if deltanet_jax.__version__ != importlib.metadata.version("deltanet_jax"):
        sys.exit("the version of the package is not that of its distribution")
    shipped = {path.parts[0] for path in importlib.metadata.files("deltanet_jax") or []}
    extra = {name for name in shipped if not name.startswith(("deltanet_jax", ".."))}
    if extra:
        sys.exit(f"the wheel also installs {sorted(extra)}")
    python = ".".join(map(str, sys.version_info[:2]))
    print(f"Python {python}, jax {jax.__version__}: {package}", flush=True)
    if "--types" in sys.argv[1:]:
        sys.exit(subprocess.run([sys.executable, "-m", "mypy", "--strict", USER_CODE]).returncode)


if __name__ == "__main__":
    main()
