"""Facts of the pages about the project, and the code that they show."""

import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_table_of_versions_is_that_of_the_project_and_of_ci():
    rows = re.findall(
        r"^\| (3\.\d+) \| (newest|[\d.]+) \|", (ROOT / "docs/support.md").read_text(), re.M
    )
    run = (ROOT / ".ci/run").read_text()
    legs = [tuple(leg.split()) for leg in re.findall(r'"(3\.\d+ (?:newest|[\d.]+))"', run)]
    assert rows == legs
    assert len(rows) >= 3
    floor = next(d.removeprefix("jax>=") for d in PROJECT["dependencies"] if d.startswith("jax>="))
    assert f"jaxlib>={floor}" in PROJECT["dependencies"]
    assert rows[0] == (PROJECT["requires-python"].removeprefix(">="), floor)
    assert rows[-1][1] == "newest"
    prefix = "Programming Language :: Python :: 3."
    minor = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert [f"3.{m}" for m in minor] == [python for python, _ in rows]


def test_the_table_of_versions_names_every_extra():
    text = (ROOT / "docs/support.md").read_text()
    line = re.search(r"belong to extras: (.*?)\.$", text, re.M | re.S)
    assert line is not None
    assert re.findall(r"`([\w-]+)`", line[1]) == list(PROJECT["optional-dependencies"])


RUN = ["README.md", "docs/index.md", "docs/quickstart.md", "docs/packing.md", "docs/adding.md"]


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_from_top_to_bottom(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    arrays = [x for x in names.values() if isinstance(x, jax.Array) and x.dtype == jnp.float32]
    assert arrays
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in arrays)
