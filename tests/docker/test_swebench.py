"""SWE-bench tasks in real containers: what an agent may leave behind is judged as the `swebench` package judges it."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from docker_engine import docker, use_engine
from scripted_policy import ScriptedEngine, lines
from swebench_issues import ISSUES, Built, build, run_in
from trials import attempt_at, trial_runner

from dockyard.config import AgentConfig, EnvironmentConfig
from dockyard.tasks.folder import load_tasks
from dockyard.tasks.swebench import write_swebench_tasks
from dockyard.tasks.swebench.instance import public_image

pytestmark = [
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # Harbor's own
]
NAMES = [issue.instance_id for issue in ISSUES]
GOLD = "git apply /work/gold.patch\n"
CLAIM = "import os, sys\nsys.stdout.write(open('/work/claims').read())\nsys.stdout.flush()\nos._exit({code})\n"
TAMPER = "printf 'def test_all():\\n    pass\\n' >{test_file}\n"


@dataclass(frozen=True, slots=True)
class World:
    """The issues, their rows in a file and their tasks."""

    folder: Path
    built: dict[str, Built]

    def tests_of(self, name: str) -> Path:
        return self.folder / "tasks" / name / "tests"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from swebench.harness.log_parsers import PARSER_REGISTRY

    use_engine()
    folder = tmp_path_factory.mktemp("swebench")
    built = {
        issue.instance_id: build(issue, lambda log, issue=issue: PARSER_REGISTRY[issue.log_parser](log, None))  # type: ignore
        for issue in ISSUES
    }
    (folder / "rows.json").write_text(json.dumps([each.row for each in built.values()]))
    written = write_swebench_tasks(folder / "tasks", dataset=str(folder / "rows.json"))
    assert (written.names, written.skipped) == (NAMES, [])
    yield World(folder, built)
    for name in NAMES:
        docker("image", "rm", "--force", public_image(name))


def works_of(built: Built) -> dict[str, str]:
    """What an agent may do, as shell scripts in the repository."""
    issue = built.issue

    def add(code: str) -> str:
        return f"cat >>{built.issue.source} <<'EOF'\n\n{code}\nEOF\n"

    skip = "import unittest; raise unittest.SkipTest('not today')"
    return {
        "nothing": "true\n",
        "gold": GOLD,
        "half": "git apply /work/half.patch\n",
        "syntax_error": GOLD + add("def ("),
        "breaks_another": GOLD + add(issue.spare.format(do="raise RuntimeError('broken')")),
        "skips_the_broken": add(issue.target.format(do=skip)),
        "skips_another": GOLD + add(issue.spare.format(do=skip)),
        "removes_the_file": f"rm {built.issue.source}\n",
        "hangs": add("while True: pass"),
        "kills_the_script": GOLD + add("import os; os.kill(os.getppid(), 9)"),
        "crashes": GOLD + add("import os; os.abort()"),
        "claims_and_fails": add(CLAIM.format(code=1)),
        "claims_and_ends_well": add(CLAIM.format(code=0)),
        "prints_odd_bytes": GOLD + add(r"import os; os.write(1, b'\xff\xfe \r\n')"),
        "prints_fail": GOLD + add("import os; os.write(1, b'FAIL:\\n')"),
        "tampers_with_tests": TAMPER.format(test_file=issue.test_file),
        "tampers_and_mends": GOLD + TAMPER.format(test_file=issue.test_file),
    }


RESOLVED = {"gold", "prints_odd_bytes", "tampers_and_mends"}
AS_THE_RUNNER_SAYS = {"skips_another", "prints_fail", "claims_and_ends_well"}
"""pytest names no skipped test and holds back what is printed on import; one of the parsers stumbles.

That claims are believed where they reach the log is a hole of judging by logs, which SWE-bench has too.
"""


def run_works(world: World, name: str) -> Path:
    built, tests = world.built[name], world.tests_of(name)
    hurried = world.folder / f"hurried-{name}"
    shutil.copytree(tests, hurried)
    task = json.loads((tests / "instance.json").read_text())
    (hurried / "instance.json").write_text(json.dumps(task | {"timeout_s": 3}))
    work = world.folder / f"work-{name}"
    (work / "scripts").mkdir(parents=True)
    for about, script in works_of(built).items():
        (work / "scripts" / f"{about}.sh").write_text(script)
    (work / "gold.patch").write_text(built.row["patch"])
    (work / "half.patch").write_text(built.half)
    passing = [*json.loads(built.row["FAIL_TO_PASS"]), *json.loads(built.row["PASS_TO_PASS"])]
    (work / "claims").write_text("".join(f"{built.issue.claim.format(test=test)}\n" for test in passing))
    out = world.folder / f"out-{name}"
    out.mkdir()
    command = (
        "for script in /work/scripts/*.sh; do name=$(basename $script .sh); tests=/tests; "
        "[ $name = hangs ] && tests=/hurried; "
        "git reset --quiet --hard; git clean --quiet -ffdx; "
        "bash $script; bash $tests/test.sh --out /out/$name || exit 1; done"
    )
    files: dict[str, str | Path] = {"/work": work, "/tests": tests, "/hurried": hurried}
    run_in(public_image(name), files, command, out)
    return out


def verdict_of_swebench(row: dict[str, Any], log: Path) -> dict[str, Any] | None:
    """From the installed package. None where it stumbles, which its own runs count as not resolved."""
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    spec = make_test_spec(row)
    prediction = {"instance_id": row["instance_id"], "model_name_or_path": "m", "model_patch": "x"}
    try:
        return get_eval_report(spec, prediction, str(log), include_tests_status=True)[row["instance_id"]]
    except IndexError:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_logs_of_real_tests_are_judged_as_swebench_judges_them(world: World, name: str):
    written = json.loads((world.tests_of(name) / "instance.json").read_text())["instance"]
    row = written | world.built[name].row  # what the row leaves open is as we filled it in
    out = run_works(world, name)
    resolved: set[str] = set()
    for about in works_of(world.built[name]):
        report = json.loads((out / about / "report.json").read_text())
        theirs = verdict_of_swebench(row, out / about / "test_output.txt")
        assert report == theirs if theirs is not None else not report["resolved"], about
        assert (out / about / "reward.txt").read_text() == f"{int(report['resolved'])}\n"
        resolved |= {about} if report["resolved"] else set()
    print(f"{name}: {len(works_of(world.built[name]))} logs, resolved: {', '.join(sorted(resolved))}")
    assert resolved - AS_THE_RUNNER_SAYS == RESOLVED


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
async def test_the_gold_patch_resolves_and_doing_nothing_does_not(
    world: World, agent: str, reward: float, tmp_path: Path
):
    environment = EnvironmentConfig(type="docker", network="gateway")
    async with trial_runner(ScriptedEngine(lines()), tmp_path, AgentConfig(name=agent), environment) as runner:
        for task in load_tasks(world.folder / "tasks"):
            rollout = await runner.run(attempt_at(task, task.name))
            assert (rollout.reward, rollout.failure) == (reward, None), task.name
            report = json.loads((tmp_path / "trials" / task.name / "verifier" / "report.json").read_text())
            assert report["resolved"] == bool(reward)
