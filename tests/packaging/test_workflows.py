"""Tests that the hosted CI runs the steps of .ci/run, with time limits. The step lint checks the workflow files."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION = ROOT / ".github" / "actions" / "ci-steps" / "action.yml"


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([ROOT / ".ci" / "run", *arguments], capture_output=True, text=True)


def listed(option: str) -> list[str]:
    return [line.split()[0] for line in run(option).stdout.splitlines()]


def hosted(workflow: Path) -> Counter:
    """Returns the steps of .ci/run that the jobs of a workflow run."""
    groups = re.findall(r"^ +(?:- )?steps: ([\[a-z].*)$", workflow.read_text(), re.MULTILINE)
    return Counter(name for group in groups for name in re.findall(r"[^\s,\[\]]+", group))


def by_name() -> dict[str, Counter]:
    return {workflow.stem: hosted(workflow) for workflow in WORKFLOWS}


def test_every_step_that_a_workflow_names_exists():
    known = {*listed("--list"), *listed("--list-others")}
    for name, steps in by_name().items():
        assert steps and set(steps) <= known, name


def test_every_default_step_is_in_one_job_of_the_hosted_ci():
    assert {name: by_name()["ci"][name] for name in listed("--list")} == dict.fromkeys(listed("--list"), 1)


def test_every_other_step_is_in_one_job_of_a_workflow():
    steps = sum((by_name()[name] for name in ("ci", "nightly", "weekly")), Counter())
    others = listed("--list-others")
    assert not set(others) & set(listed("--list"))
    assert {name: steps[name] for name in others} == dict.fromkeys(others, 1)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_ends_and_may_only_read(workflow):
    text = workflow.read_text()
    jobs = re.split(r"^  \w+:\n", text.split("\njobs:\n")[1], flags=re.MULTILINE)[1:]
    assert jobs and all(job.count("    timeout-minutes: ") == 1 for job in jobs)
    assert re.findall(r"permissions:\n((?: +.+\n)+)", text) == ["  contents: read\n"]
    minutes = [int(number) for number in re.findall(r"minutes: (\d+)$", text, re.MULTILINE)]
    assert minutes and max(minutes) <= (15 if workflow.stem in ("ci", "docs") else 240)


def test_the_required_job_needs_every_other_job():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    first, *others, required = re.findall(r"^  (\w+):\n    ", text.split("\njobs:\n")[1], re.MULTILINE)
    job = text.split("\n  required:\n")[1]
    assert required == "required" and f"needs: [{', '.join((first, *others))}]\n" in job and "if: always()" in job
    assert all(f"needs.{name}.result" in job for name in (first, *others)) and '[ "$RESULT" = success ]' in job


@pytest.mark.parametrize("file", [*WORKFLOWS, ACTION], ids=lambda path: path.stem)
def test_actions_are_pinned(file):
    used = re.findall(r"uses: (\S+)(.*)", file.read_text())
    for action, comment in used:
        assert action == "./.github/actions/ci-steps" or (
            re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) and re.fullmatch(r" # v\d+\.\d+\.\d+", comment)
        ), action
    assert used


def test_a_kept_environment_follows_what_defines_it():
    assert re.fullmatch(r"[0-9a-f]{16}\n", run("--key").stdout)
    assert ".ci/run --key" in ACTION.read_text()
    kept = re.findall(r"^ +\$\{\{ runner\.temp \}\}/ci/(\S+)$", ACTION.read_text(), re.MULTILINE)
    made = re.findall(r"\$work/([a-z]+)", (ROOT / ".ci" / "run").read_text())
    assert {re.match(r"[a-z]+", path)[0] for path in kept} - {"checkout"} <= {*made, "docs", "workflows", "zig"}


def test_ci_refuses_an_unknown_step():
    refused = run("tests", "test")
    assert refused.returncode == 2
    assert refused.stderr == ".ci/run: expected a step of --list or --list-others, got test\n"
