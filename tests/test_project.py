"""Properties of the source as a whole."""

import ast
import importlib.metadata
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import deltanet_jax
from deltanet_jax._version import __version__

ROOT = Path(deltanet_jax.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
PRIVATE = re.compile(r"os\.environ|getenv|jax\._src|jaxlib\._")


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def public_names(path: Path) -> tuple[list[str], bool]:
    """Return the public functions and classes of a module, and whether it has `__all__`."""
    body = ast.parse(path.read_text()).body
    defined = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    targets = [t for n in body if isinstance(n, ast.Assign) for t in n.targets]
    assigned = {t.id for t in targets if isinstance(t, ast.Name)}
    return [name for name in defined if not name.startswith("_")], "__all__" in assigned


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


def test_import_and_a_call_on_a_cpu_load_no_pallas():
    """Beside the modules that JAX and Flax load by themselves."""
    code = """
import sys, flax.nnx, jax.numpy as jnp
def pallas():
    return {m for m in sys.modules if "pallas" in m or "mosaic" in m}
before = pallas()
import deltanet_jax
x = jnp.ones((1, 20, 1, 2))
deltanet_jax.delta_rule(x, x / 2, x, x[..., 0])
print(sorted(pallas() - before))
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout.strip() == "[]"


def test_source_reads_no_environment_and_nothing_private_to_jax():
    found = {path.name: PRIVATE.findall(path.read_text()) for path in SOURCES}
    assert {name: words for name, words in found.items() if words} == {}


def test_source_is_short():
    limits = {path: 600 if "kernels" in path.parts else 400 for path in SOURCES}
    assert {p.name: n for p, most in limits.items() if (n := lines_of(p)) > most} == {}


def test_median_source_is_short():
    assert statistics.median(n for path in SOURCES if (n := lines_of(path)) > 1) <= 150


def test_modules_list_their_public_names():
    modules = {path: public_names(path) for path in SOURCES}
    assert {p.name: names for p, (names, listed) in modules.items() if names and not listed} == {}
