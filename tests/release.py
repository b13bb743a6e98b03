"""Fail unless a tag is that of the package's version and the changelog has a closed section for it.

python tests/release.py v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """Return the version of the package, without an import of it."""
    text = (ROOT / "deltanet_jax" / "_version.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.M)[0]


def fault(tag: str) -> str | None:
    """Return why this tag cannot be released, or None."""
    if tag != f"v{version()}":
        return f"the tag must be v{version()}, the version of the package; got {tag}"
    section = re.compile(rf"^## {re.escape(version())} - \d{{4}}-\d\d-\d\d$", re.M)
    if not section.search((ROOT / "CHANGELOG.md").read_text()):
        return f"CHANGELOG.md must have a section `## {version()} - YYYY-MM-DD`"
    return None


if __name__ == "__main__":
    sys.exit(fault(sys.argv[1]))
