"""Before grading: what the agent left in its container cannot touch it. And a grading that fails is done again."""

import uuid
from pathlib import Path

import pytest
from docker_engine import BASE
from docker_environment import COMPOSE, GRADE, code_of, containers_of, reward_of, run_trial, started

from dockyard.rollout.blame import SealError
from dockyard.rollout.environments import Site

pytestmark = pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning")  # Harbor's own

GRADE_THE_SECOND_TIME = "[ -e /second ] || { touch /second; %s; }\necho 1 >/logs/verifier/reward.txt"


TRAPS = {
    "a shadow of python3": "printf '#!/bin/sh\\necho evil\\n' >/usr/local/bin/python3; chmod +x /usr/local/bin/python3",
    "another bash": "cp /bin/true /usr/bin/bash.new && mv /usr/bin/bash.new /usr/bin/bash",
    "another grep of the same size and time": (
        "cp -p /usr/bin/grep /g; printf x | dd of=/usr/bin/grep bs=1 seek=9 conv=notrunc; touch -r /g /usr/bin/grep"
    ),
    "a folder for env": "rm /usr/bin/env; mkdir /usr/bin/env",
    "a missing cat": "rm /usr/bin/cat",
    "another target of the link python3": "cp /bin/echo /usr/bin/e; ln -sf e /usr/bin/python3",
    "a preloaded library": "touch /evil.so; echo /evil.so >/etc/ld.so.preload",
    "a profile": "echo 'echo evil' >'/etc/profile.d/e vil.sh'; echo 'echo evil' >>/root/.bashrc",
    "a sitecustomize": (
        "d=$(echo /usr/lib/python3.[0-9]*); echo 'print(\"evil\")' >$d/sitecustomize.py;"
        "mkdir -p /usr/local/lib/python3.99; touch /usr/local/lib/python3.99/sitecustomize.py"
    ),
    "a link for a home": "mkdir -p /h/bin; touch /h/bin/env; rm -rf /root/.local; ln -s /h /root/.local",
    "a shadow that comes back": "(while :; do cp /bin/echo /usr/local/bin/python3; done) >/dev/null 2>&1 &",
    "another libc": "cp /lib/x86_64-linux-gnu/libc.so.6 /c; printf x >>/c; mv /c /usr/lib/x86_64-linux-gnu/libc.so.6",
}
FINGERPRINT = """
for f in /usr/local/bin/* /usr/bin/bash /usr/bin/grep /usr/bin/env /usr/bin/cat /usr/bin/python3 /etc/ld.so.preload \
  /etc/profile.d/* /root/.bashrc /root/.local/bin/env /usr/lib/python3*/sitecustomize.py \
  /usr/local/lib/python3*/sitecustomize.py /usr/lib/*/libc.so.6; do
  [ -e "$f" ] && echo "$(readlink -f "$f") $(sha256sum "$f")"
done
"""


@pytest.mark.parametrize("trap", TRAPS)
async def test_the_seal_undoes(tmp_path: Path, trap: str):
    async with started(tmp_path) as environment:
        before = await environment.exec(FINGERPRINT)
        await environment.exec(TRAPS[trap])
        await environment.seal()
        after = await environment.exec(FINGERPRINT)
    assert before.stdout
    assert (after.return_code, after.stdout, after.stderr) == (before.return_code, before.stdout, before.stderr)


async def test_the_seal_ends_processes_and_empties_what_the_verifier_uses_but_keeps_the_work(tmp_path: Path):
    async with started(tmp_path) as environment:
        await environment.exec("echo mine >/work; mkdir -p /tests/deep; echo 1 >/tests/deep/.trap; chmod 000 /tests")
        await environment.exec("(while :; do echo 1 >/logs/verifier/reward.txt; done) >/dev/null 2>&1 &")
        await environment.exec("setsid nohup sleep 5678 >/dev/null 2>&1 &")
        await environment.seal()
        assert (await environment.exec("cat /work; ls -A /tests /logs/verifier")).stdout == (
            "mine\n/logs/verifier:\n\n/tests:\n"
        )
        assert await code_of(environment, "pgrep -f 'sleep 567[8]|while'") == 1
        assert (await environment.exec("stat -c %a /logs/verifier")).stdout == "777\n"


async def test_code_planted_into_the_first_process_dies_with_it(tmp_path: Path):
    async with started(tmp_path) as environment:
        started_at = "cut -d ' ' -f 22 /proc/1/stat"
        before = await environment.exec(started_at)
        await environment.seal()
        assert (await environment.exec(started_at)).stdout != before.stdout


async def test_folders_of_the_verifier_cannot_be_replaced_by_links(tmp_path: Path):
    async with started(tmp_path) as environment:
        assert await code_of(environment, "rm -rf /tests && ln -s /tmp /tests") != 0
        assert await code_of(environment, "mv /logs/verifier /logs/v") != 0


async def test_an_environment_that_cannot_be_made_safe_is_not_graded(tmp_path: Path):
    async with started(tmp_path) as environment:
        await environment.exec("cp -a /usr/local /elsewhere; rm -rf /usr/local; ln -s /elsewhere /usr/local")
        with pytest.raises(SealError, match="the agent replaced /usr/local by a link"):
            await environment.seal()


async def test_what_the_image_has_in_the_verifiers_folders_is_there_after_the_seal(tmp_path: Path, dockerfile: str):
    text = f"{dockerfile}RUN mkdir -p /tests && echo data >/tests/data\nUSER nobody\n"
    async with started(tmp_path, files={"Dockerfile": text}) as environment:
        await environment.exec("echo changed >/tests/data; touch /tests/more", user="root")
        await environment.seal()
        assert (await environment.exec("cat /tests/*; whoami")).stdout == "data\nnobody\n"


async def test_a_compose_task_is_sealed_too_and_its_other_services_stay(tmp_path: Path, dockerfile: str):
    run = uuid.uuid4().hex
    async with started(
        tmp_path, files={"docker-compose.yaml": COMPOSE, "Dockerfile": dockerfile}, run=run
    ) as environment:
        await environment.service_exec("touch /stays", service="other")
        await environment.exec("touch /tests/trap; sleep 777 >/dev/null 2>&1 &")
        await environment.seal()
        assert (await environment.exec("ls /tests; pgrep -f 'sleep 77[7]'")).stdout == ""
        assert (await environment.service_exec("ls /stays", service="other")).stdout == "/stays\n"
        assert len(containers_of(run)) == 1
    assert containers_of(run) == []


async def test_a_process_that_keeps_writing_the_reward_does_not_get_it(tmp_path: Path, site: Site):
    solve = "(setsid sh -c 'while :; do echo 1 >/logs/verifier/reward.txt; done' >/dev/null 2>&1 &)"
    assert reward_of(await run_trial(tmp_path, site, solve=solve)) == 0


async def test_a_grading_that_fails_is_done_once_more(tmp_path: Path, site: Site):
    assert reward_of(await run_trial(tmp_path, site, test=GRADE_THE_SECOND_TIME % "exit")) == 1


async def test_a_grading_that_hangs_is_done_once_more(tmp_path: Path, site: Site):
    assert reward_of(await run_trial(tmp_path, site, test=GRADE_THE_SECOND_TIME % "sleep 600", timeout_s=15)) == 1


@pytest.mark.parametrize(
    ("test", "error", "timeout_s"),
    [
        ("true", "RewardFileNotFoundError", None),
        (": >/logs/verifier/reward.txt", "RewardFileEmptyError", None),
        ("echo nan >/logs/verifier/reward.txt", "VerifierOutputParseError", None),
        ("sleep 600", "VerifierTimeoutError", 2),
    ],
)
async def test_a_grading_that_fails_twice_is_a_failure(
    tmp_path: Path, site: Site, test: str, error: str, timeout_s: float | None
):
    result = await run_trial(tmp_path, site, test=f"echo >>/count\n{test}", timeout_s=timeout_s)
    assert result.exception_info is not None
    assert result.exception_info.exception_type == error


async def test_a_separate_verifier_is_graded_again_with_what_it_holds(tmp_path: Path, site: Site):
    separate = 'artifacts = ["/answer.txt"]\n[verifier]\nenvironment_mode = "separate"'
    test = f"[ -e /second ] || {{ touch /second; exit; }}\n{GRADE}"
    assert reward_of(await run_trial(tmp_path, site, test=test, toml=separate)) == 1
    assert containers_of(site.environment.kwargs["run"]) == []


async def test_tests_that_fill_a_verifier_image_are_not_uploaded_over_it(tmp_path: Path, site: Site):
    toml = '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\nworkdir = "/"'
    (tmp_path / "tiny" / "tests").mkdir(parents=True)
    (tmp_path / "tiny" / "tests" / "Dockerfile").write_text(
        f"FROM {BASE}\nCOPY test.sh /tests/test.sh\nRUN echo 'echo 1 >/logs/verifier/reward.txt' >>/tests/test.sh\n"
    )
    assert reward_of(await run_trial(tmp_path, site, test="true", toml=toml)) == 1
