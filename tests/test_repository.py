"""Rules of the repository's own files: workflows, metadata, changelog, source distribution."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from tests.release import fault, version

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in GITHUB.glob("workflows/*.yml")}
JOBS = {(f, j): job for f, workflow in WORKFLOWS.items() for j, job in workflow["jobs"].items()}
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)


def test_every_yaml_file_can_be_read():
    files = [*GITHUB.rglob("*.yml"), *ROOT.glob(".*.yaml"), ROOT / "CITATION.cff"]
    assert len(files) >= 9
    assert [path for path in files if not yaml.safe_load(path.read_text())] == []


def test_actions_are_pinned_by_commit_and_say_their_version():
    used = [
        line.strip()
        for path in GITHUB.glob("workflows/*.yml")
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    pin = re.compile(r"- uses: [\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    assert used
    assert [line for line in used if not pin.fullmatch(line)] == []
    assert len({line.partition("@")[0] for line in used}) == len(set(used))  # one pin an action


def test_workflows_may_only_read_and_one_job_may_ask_to_be_trusted():
    assert {workflow["permissions"]["contents"] for workflow in WORKFLOWS.values()} == {"read"}
    assert all(len(workflow["permissions"]) == 1 for workflow in WORKFLOWS.values())
    more = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert more == {("release.yml", "publish"): {"id-token": "write"}}


def test_jobs_end_and_checkouts_keep_no_credentials():
    assert [name for name, job in JOBS.items() if "timeout-minutes" not in job] == []
    steps = [step for job in JOBS.values() for step in job["steps"]]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_nothing_of_an_event_is_pasted_into_a_shell():
    steps = [step for job in JOBS.values() for step in job["steps"]]
    assert [step["run"] for step in steps if "${{" in step.get("run", "")] == []


def test_ci_lints_first():
    jobs = WORKFLOWS["ci.yml"]["jobs"]
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        name: None if name == "lint" else "lint" for name in jobs
    }


def test_shards_hold_every_test_once():
    shards = " ".join(WORKFLOWS["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["tests"]).split()
    folders = {f"tests/{p.parent.name}" for p in ROOT.glob("tests/*/test_*.py")}
    apart = {"tests/parity"}  # in an environment of its own
    assert sorted(shards) == sorted({"tests/test_*.py", *folders} - apart)


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_workflows_run_targets_that_exist(workflow):
    text = (GITHUB / "workflows" / workflow).read_text()
    matrix = [t for job in WORKFLOWS[workflow]["jobs"].values() for t in targets_of(job)]
    named = [*re.findall(r"run: make ([a-z-]+)", text), *matrix]
    assert named
    assert set(named) <= set(TARGETS)


def targets_of(job: dict) -> list[str]:
    """Return the targets that a job's matrix names."""
    matrix = job.get("strategy", {}).get("matrix", {})
    rows = [row["target"] for row in matrix.get("include", []) if "target" in row]
    return [target.split()[0] for target in [*matrix.get("target", []), *rows]]


def test_the_wheel_is_tested_on_the_versions_of_the_local_run():
    legs = re.findall(r'"(3\.\d+) (newest|[\d.]+)"', (ROOT / ".ci/run").read_text())
    rows = WORKFLOWS["ci.yml"]["jobs"]["wheel"]["strategy"]["matrix"]["include"]
    assert [(row["python"], row["jax"]) for row in rows] == legs


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version()
    assert citation["license"] == PROJECT["license"]
    closed = f"## {version()} - {citation['date-released']}"
    assert closed in (ROOT / "CHANGELOG.md").read_text().splitlines()


def test_only_the_tag_of_this_version_can_be_released():
    assert fault(f"v{version()}") is None
    assert "got v0.0.0" in fault("v0.0.0")


def test_the_changelog_is_open_at_its_top():
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == "Unreleased"
    dates = [re.fullmatch(r"\d+\.\d+\.\d+ - (\d{4}-\d\d-\d\d)", name) for name in sections[1:]]
    assert dates
    assert all(dates)


def test_urls_are_placeholders_that_say_so():
    urls = [*PROJECT["urls"].values(), (ROOT / "CITATION.cff").read_text()]
    assert [url for url in urls if "PLACEHOLDER" not in url] == []


STRAY = ["a.swp", ".a.swo", "a~", "a.orig", "a.rej", ".DS_Store", "Thumbs.db", "a.pyc"]


def test_the_source_distribution_leaves_out_files_of_editors_and_desktops():
    lines = [line.partition("#")[0] for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    left_out = [
        word for line in lines if line.startswith("global-exclude") for word in line.split()
    ]
    kept = [name for name in STRAY if not any(fnmatch(name, pattern) for pattern in left_out)]
    assert kept == []
