"""Print the tests that a change reaches: smoke tests, and those of every package it touches.

    python -m pytest $(python tests/reach.py)

The change is everything since the branch left `main`, committed or not.
"""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = ["tests/test_smoke.py", "tests/test_project.py"]


def changed() -> list[str]:
    """Return the files that differ from where this branch left main, and new ones."""

    def git(*words: str) -> list[str]:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return run.stdout.split() if run.returncode == 0 else []

    base = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main")
    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", *(base or ["HEAD"])), *new})


def tests_of(path: str) -> list[str]:
    """Return the test files or folders that a changed file reaches."""
    folder, *rest = Path(path).parts
    if folder == "tests":
        return [path] if Path(path).name.startswith("test_") and (ROOT / path).exists() else []
    if folder == "deltanet_jax" and len(rest) > 1:
        return [f"tests/{rest[0]}"]
    if folder in ("experiments", "docs", "examples"):
        return [f"tests/{folder}"]
    return []


def reached(paths: list[str]) -> list[str]:
    """Return the tests of all these files, each once; a folder holds its files."""
    found = sorted({test for path in paths for test in tests_of(path) if (ROOT / test).exists()})
    folders = [test for test in found if (ROOT / test).is_dir()]
    inside = [f for f in found if any(f != d and f.startswith(f"{d}/") for d in folders)]
    return ALWAYS + [test for test in found if test not in inside and test not in ALWAYS]


if __name__ == "__main__":
    print(*reached(changed()))
