"""The rules of writing that a machine can check; CONTRIBUTING.md has all of them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
FOLDERS = ["deltanet_jax", "experiments", "examples", "benchmarks", "tests", "docs"]
SOURCES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
# A genitive or a bare pronoun: the reader must first find out what the sentence is about.
FIRST_WORDS = re.compile(r"(Of|What|Whoever|That of|Those|The one)\b")
WIDTH = 100


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Lines outside of code and mathematics, and outside of tables and pictures."""
    inside = None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = re.match(r"\s*(```|\$\$)", line)
        if fence and inside in (None, fence[1]):
            inside = None if inside else fence[1]
        elif inside is None and not line.startswith(("|", "![")):
            yield number, line


def docstrings(source: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def where(path: Path, number: int) -> str:
    return f"{path.relative_to(ROOT)}:{number}"


def test_prose_is_wrapped():
    long = [where(p, n) for p in PAGES for n, line in prose(p) if len(line) > WIDTH]
    assert long == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_a_docstring_begins_with_a_verb_or_a_noun():
    bad = [where(p, n) for p in SOURCES for n, text in docstrings(p) if FIRST_WORDS.match(text)]
    assert bad == []


def test_the_code_that_pages_name_exists():
    missing = []
    for page in PAGES:
        for path, name in re.findall(r"`([\w/]+\.py)(?:: (\w+))?`", page.read_text()):
            files = [f for f in (ROOT / path, ROOT / "deltanet_jax" / path) if f.exists()]
            defined = re.compile(rf"^ *(def |class )?{name}\b", re.M)
            if not files or not defined.search(files[0].read_text()):
                missing.append(f"{page.name}: {path} {name}".strip())
    assert missing == []


def test_the_pages_that_code_names_exist():
    named = {(p, page) for p in SOURCES for page in re.findall(r"docs/[\w/-]+\.md", p.read_text())}
    assert [f"{where(p, 1)} {page}" for p, page in named if not (ROOT / page).exists()] == []
