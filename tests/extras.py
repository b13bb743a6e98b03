"""Install a wheel with each of its extras in an empty environment, and import what it adds.

Run by `make test-extras`.
"""

import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

# What each extra makes possible; the others are tools.
IMPORTS = {
    "": "deltanet_jax.models, deltanet_jax.parallel",
    "train": "deltanet_jax.models.training, deltanet_jax.models.checkpoint",
    "convert": "deltanet_jax.convert, safetensors",
}


def main(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        extras = Parser().parsestr(file.read(name).decode()).get_all("Provides-Extra") or []
    for extra in ["", *extras]:
        with tempfile.TemporaryDirectory() as directory:
            venv.create(directory, with_pip=True)
            python = str(Path(directory) / "bin" / "python")
            what = f"{wheel.resolve()}[{extra}]" if extra else str(wheel.resolve())
            code = f"import deltanet_jax, {IMPORTS.get(extra, 'jax')}"
            for command in (["-m", "pip", "install", "--quiet", what], ["-m", "pip", "check"]):
                subprocess.run([python, *command], check=True, cwd=directory)
            subprocess.run([python, "-c", code], check=True, cwd=directory)
            print(f"{extra or 'no extra'}: installs and imports", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
