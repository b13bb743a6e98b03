"""Properties of the source as a whole."""

import ast
import importlib.metadata
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import deltanet_jax
from deltanet_jax._version import __version__

ROOT = Path(deltanet_jax.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]
each_source = pytest.mark.parametrize("path", SOURCES, ids=NAMES)


def test_version_is_that_of_the_distribution():
    assert importlib.metadata.version("deltanet_jax") == __version__ == deltanet_jax.__version__


def test_public_names_exist():
    missing = [name for name in deltanet_jax.__all__ if not hasattr(deltanet_jax, name)]
    assert missing == []


def test_the_package_is_typed():
    assert (ROOT / "py.typed").exists()


def test_import_needs_only_the_runtime_dependencies():
    forbidden = ["beartype", "chex", "hypothesis", "matplotlib", "pytest", "tensorboardX", "tyro"]
    code = f"import sys, deltanet_jax; print([m for m in {forbidden} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@each_source
def test_source_reads_no_environment_and_nothing_private_to_jax(path):
    text = path.read_text()
    found = [word for word in ("os.environ", "getenv", "jax._src", "jaxlib._") if word in text]
    assert found == []


@each_source
def test_source_is_short(path):
    limit = 600 if "kernels" in path.parts else 400
    assert len(path.read_text().splitlines()) <= limit


def test_median_source_is_short():
    lengths = [n for path in SOURCES if (n := len(path.read_text().splitlines())) > 1]
    assert statistics.median(lengths) <= 150


@each_source
def test_module_lists_its_public_names(path):
    tree = ast.parse(path.read_text())
    defined = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    public = [n.name for n in defined if not n.name.startswith("_")]
    assigned = {
        t.id
        for n in tree.body
        if isinstance(n, ast.Assign)
        for t in n.targets
        if isinstance(t, ast.Name)
    }
    assert not public or "__all__" in assigned, f"{path.name} defines {public} and no __all__"
