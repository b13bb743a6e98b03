"""Print the tests that a change reaches, for `make check`.

    python -m pytest $(python tests/reach.py)

The change is everything since the branch left `main`, committed or not. It reaches the tests of the
packages that it touches, and test files elsewhere that import what it touches, helpers in between.
Tests that use a module only through the public API are left to `make test`.
"""

import ast
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = ["tests/test_smoke.py", "tests/test_project.py", "tests/test_repository.py"]
APART = "tests/parity/"  # needs an environment of its own: `make test-parity`
PACKAGES = ("docs", "examples", "experiments")  # whose tests are in a folder of the same name


def changed() -> list[str]:
    """Return the files that differ from where this branch left main, and new ones."""

    def git(*words: str) -> list[str]:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return run.stdout.split() if run.returncode == 0 else []

    base = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main")
    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", *(base or ["HEAD"])), *new})


def module(path: str) -> str:
    """Return the dotted name of a source file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: Path) -> set[str]:
    """Return the modules, and names of modules, that a source file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def users(names: Iterable[str]) -> set[str]:
    """Return the files of tests that import these modules, directly or through other tests."""
    graph = {str(p.relative_to(ROOT)): imports(p) for p in (ROOT / "tests").rglob("*.py")}
    found: set[str] = set()
    wanted = set(names)
    while more := {path for path, imported in graph.items() if imported & wanted} - found:
        found |= more
        wanted = {module(path) for path in more}
    return found


def folder_of(path: str) -> str | None:
    """Return the folder of tests of the package that a file belongs to."""
    first, *rest = Path(path).parts
    if first == "tests" and rest[-1] in ("conftest.py", "__init__.py") and len(rest) > 1:
        return str(Path(path).parent)
    if first == "deltanet_jax" and len(rest) > 1:
        return f"tests/{rest[0]}"
    return f"tests/{first}" if first in PACKAGES else None


def reached(paths: list[str]) -> list[str]:
    """Return the tests of all these files, each once; a folder holds its files."""
    # The package itself is what every test imports.
    sources = {module(p) for p in paths if p.endswith(".py")} - {"deltanet_jax"}
    files = {p for p in {*paths, *users(sources)} if p.startswith("tests/")}
    files = {p for p in files if Path(p).name.startswith("test_") and not p.startswith(APART)}
    found = sorted(p for p in {*files, *map(folder_of, paths)} if p and (ROOT / p).exists())
    folders = [p for p in found if (ROOT / p).is_dir()]
    inside = [p for p in found if any(p.startswith(f"{folder}/") for folder in folders)]
    return ALWAYS + [p for p in found if p not in inside and p not in ALWAYS]


if __name__ == "__main__":
    print(*reached(changed()))
