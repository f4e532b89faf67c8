"""The table of blame, as data: every failure really caused, by the infrastructure, by the settings, by the policy."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, override

import aiohttp
from gateway_fakes import FakeEngine, Said
from harbor import AgentContext, BaseEnvironment
from harbor.agents.installed.base import BaseInstalledAgent
from rows import GRADE, SOLVE, Row, Seen, environment_of, left_behind, run_row
from server_fakes import FakeVLLM, open_engine

from dockyard.config import AgentConfig, GatewayConfig, RolloutConfig
from dockyard.engine.protocol import ContextOverflow, Engine
from dockyard.rollout.blame import CAUSES
from dockyard.rollout.docker.docker_cli import ask
from dockyard.rollout.docker.environment import DockerEnvironment
from dockyard.rollout.environments import open_site
from dockyard.rollout.sandbox.environment import SandboxEnvironment
from dockyard.rollout.shell import API_KEY_VARIABLE, ShellAgent
from dockyard.types import Blame

HALF = "echo 0.5 > /logs/verifier/reward.txt\n"
ONCE = ("sandbox",)
"""For rows in which nothing depends on the environment: they run where a trial is cheapest."""
TOO_LONG = ContextOverflow(prompt_tokens=9, context_length=8)


async def end(environment: BaseEnvironment) -> None:
    """As a failing host would."""
    if isinstance(environment, DockerEnvironment):
        await ask("kill", await environment._container())
    else:
        assert isinstance(environment, SandboxEnvironment)
        process = environment._running()._process
        process.kill()
        await process.wait()


class Doomed(ShellAgent):
    """The shell agent, with something that happens before or after its first model call."""

    def __init__(self, *args: Any, fate: str, extra_env: dict[str, str], **kwargs: Any) -> None:
        key = {API_KEY_VARIABLE: extra_env["OPENAI_API_KEY"]}
        url = extra_env["OPENAI_BASE_URL"]
        super().__init__(*args, gateway_url=url, extra_env=extra_env | key, **kwargs)
        self._fate = fate

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        match self._fate:
            case "killed before":
                await end(environment)
                await environment.exec("true")
            case "slow setup":
                await environment.exec("sleep 60")
            case "broken setup":
                raise LookupError("no such thing")
            case _:
                pass

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        self._environment = environment
        if self._fate == "another model":
            self.model_name = "gpt-5"
        await super().run(instruction, environment, context)

    @override
    async def _ask(self, client: aiohttp.ClientSession) -> str | None:
        reply = await super()._ask(client)
        match self._fate:
            case "killed after":
                await end(self._environment)
            case "broken by a reply":
                raise LookupError(f"what does {reply!r} mean?")
            case "engine gone":
                os.environ["DOCKER_HOST"] = "unix:///nonexistent/docker.sock"
            case _:
                pass
        return reply


class CurlAgent(BaseInstalledAgent):
    """A program inside that asks the policy once, then does what the reply and it itself say."""

    def __init__(self, *args: Any, last: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last = last

    @staticmethod
    @override
    def name() -> str:
        return "curl-agent"

    @override
    async def install(self, environment: BaseEnvironment) -> None:
        await self.exec_as_agent(environment, "command -v curl")

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        body = '{"model": "policy", "messages": [{"role": "user", "content": "Do it."}]}'
        call = (
            'curl -sS --fail-with-body -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json"'
            f" -d '{body}' \"$OPENAI_BASE_URL/chat/completions\""
        )
        env = {name: self._extra_env[name] for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL")}
        await self.exec_as_agent(environment, f"{call} && {SOLVE} && {self._last}", env=env)

    @override
    def populate_context_post_run(self, context: AgentContext) -> None: ...


def doomed(fate: str) -> AgentConfig:
    return AgentConfig(name="blame_rows:Doomed", kwargs={"fate": fate})


def curl_agent(last: str) -> AgentConfig:
    return AgentConfig(name="blame_rows:CurlAgent", kwargs={"last": last})


def limits(**seconds: float) -> RolloutConfig:
    """What must happen before one is hit takes many times longer on a busy machine."""
    return RolloutConfig.model_validate({"retries": 1, **seconds})


@asynccontextmanager
async def server(*, back_after_s: float | None) -> AsyncGenerator[Engine]:
    """One that crashes before the first call, and comes back or does not."""
    fake = FakeVLLM(max_model_len=100_000)
    await fake.start()
    engine = await open_engine("vllm", fake, retry_s=60)

    async def come_back() -> None:
        if back_after_s is not None:
            await asyncio.sleep(back_after_s)
            await fake.start()

    await fake.stop()
    coming = asyncio.create_task(come_back())
    try:
        yield engine
    finally:
        coming.cancel()
        await engine.close()
        if coming.done() and not coming.cancelled():
            await fake.stop()


def broken_link(folder: Path) -> Path:
    """A folder that this machine cannot make."""
    if not (folder / "loop").is_symlink():
        (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop" / "trials"


def dropped(name: str, cause: str, **row: Any) -> Row:
    """Nothing that the policy did can have caused it: tried again where that may help, then lost."""
    return Row(**({"name": name, "cause": cause, "reward": None, "num_tries": 2} | row))


INFRASTRUCTURE = (
    dropped("build_error", "environment_build", image="FROM dockyard/base:1\nRUN exit 7\n"),
    dropped("base_image_missing", "environment_build", image="FROM dockyard/none:0\n", where=("docker",)),
    dropped(
        "image_missing",
        "image_missing",
        image="",
        files={"environment/README": "-"},
        toml='[environment]\ndocker_image = "dockyard/none:0"\n',
        where=("docker",),
    ),
    dropped(
        "build_timeout",
        "environment_timeout",
        image="FROM dockyard/base:1\nRUN sleep 61\n",
        limits=limits(build_timeout_s=2),
        where=("docker",),
    ),
    dropped("start_timeout", "environment_timeout", limits=limits(build_timeout_s=0.001), where=("sandbox",)),
    dropped(
        "unhealthy",
        "environment_unhealthy",
        toml='[environment.healthcheck]\ncommand = "false"\nretries = 1\ninterval_sec = 0.1\n',
    ),
    dropped("killed_before_the_first_call", "environment_died", agent=doomed("killed before")),
    dropped("setup_timeout", "agent_setup_timeout", agent=doomed("slow setup"), limits=limits(setup_timeout_s=1)),
    dropped("setup_error", "setup_error", agent=doomed("broken setup"), where=ONCE),
    dropped("agent_missing", "agent_missing", agent=AgentConfig(name="qwen-coder", install="never"), num_tries=1),
    dropped(
        "agent_that_does_nothing",
        "no_model_call",
        image="FROM dockyard/base:1\nWORKDIR /app\nCOPY --chmod=755 qwen /usr/local/bin/qwen\n",
        files={"environment/qwen": "#!/bin/sh\necho 1.0.0\n"},
        agent=AgentConfig(name="qwen-coder", install="never"),
        where=("docker",),
    ),
    dropped("host_error", "host_error", trials_dir=broken_link),
    dropped("engine_failed", "engine_failed", says=(SOLVE, RuntimeError("no memory")), where=ONCE),
    dropped(
        "engine_down",
        "engine_down",
        engine=lambda _: server(back_after_s=None),
        limits=limits(agent_timeout_s=10),
        where=ONCE,
    ),
    dropped("wrong_model", "wrong_model", agent=doomed("another model"), num_tries=1, where=ONCE),
    dropped("context_too_small", "context_too_small", says=(TOO_LONG,), num_tries=1, where=ONCE),
)
KEPT = (
    Row(name="engine_down_and_back", engine=lambda _: server(back_after_s=2), test=HALF, reward=0.5, where=ONCE),
    Row(name="turn_limit", says=(SOLVE, "rm /app/answer.txt"), agent=AgentConfig(max_turns=1), reward=1.0, where=ONCE),
    Row(
        name="call_limit",
        says=(SOLVE, "rm /app/answer.txt"),
        policy_use=GatewayConfig(max_calls=1),
        cause="model_limit",
        reward=1.0,
        where=ONCE,
    ),
    Row(name="context_overflow", says=(SOLVE, TOO_LONG), cause="context_overflow", reward=1.0, where=ONCE),
    Row(
        name="agent_timeout",
        says=(f"{SOLVE}; sleep 60",),
        limits=limits(agent_timeout_s=15),
        cause="agent_timeout",
        reward=1.0,
    ),
    Row(name="agent_crash", agent=curl_agent("exit 3"), cause="agent_crash", reward=1.0),
    Row(
        name="output_limit",
        agent=curl_agent("echo 'response exceeded the 32000 output token maximum'; exit 1"),
        cause="output_limit",
        reward=1.0,
    ),
    Row(name="agent_error", agent=doomed("broken by a reply"), cause="agent_error", where=ONCE),
    Row(name="killed_after_the_first_call", says=(SOLVE,), agent=doomed("killed after"), cause="environment_died"),
    Row(name="rollout_timeout", says=("sleep 60",), limits=limits(total_timeout_s=20), cause="rollout_timeout"),
    Row(
        name="seal_failed",
        says=(f"{SOLVE}; cp -a /usr/local /app/local; rm -rf /usr/local; ln -s /app/local /usr/local",),
        cause="seal_failed",
        where=("docker",),
    ),
    Row(name="negative_reward", says=(SOLVE,), test="echo -0.5 > /logs/verifier/reward.txt", reward=-0.5, where=ONCE),
)


def ungraded(name: str, cause: str, **row: Any) -> Row:
    """The policy has solved its task, and its tests fail to say so, twice. It can have caused that, so it gets 0."""
    return Row(name=name, says=(SOLVE,), cause=cause, **row)


SMALL = {"override_storage_mb": 16}
VERIFIER = (
    ungraded("verifier_timeout", "verifier_timeout", test="sleep 60", limits=limits(verifier_timeout_s=2)),
    ungraded("verifier_crash", "reward_missing", test=f"kill -9 $$\n{HALF}"),
    ungraded("reward_missing", "reward_missing", test="true", where=ONCE),
    ungraded("reward_empty", "reward_empty", test=": > /logs/verifier/reward.txt", where=ONCE),
    ungraded("reward_nan", "reward_unreadable", test="echo nan > /logs/verifier/reward.txt", where=ONCE),
    ungraded("reward_word", "reward_unreadable", test="echo good > /logs/verifier/reward.txt", where=ONCE),
    ungraded(
        "reward_nan_in_json", "reward_unreadable", test="echo '{\"r\": NaN}' > /logs/verifier/reward.json", where=ONCE
    ),
    ungraded(
        "tests_too_large",
        "verifier_upload",
        files={"tests/large": "x" * (20 << 20)},
        overrides=SMALL,
        where=("sandbox",),
    ),
    ungraded(
        "verifier_logs_too_large",
        "verifier_download",
        test=f"{HALF}cat /dev/zero > /logs/verifier/log",
        overrides=SMALL,
        where=("sandbox",),
    ),
)

RUN_APP = f"#!/bin/bash\nbash /app/run.sh\n{GRADE.partition(chr(10))[2]}"
EAT = 'python3 -c "x = [bytearray(1 << 20) for _ in range(100000)]"'
SMALL_DISKS = """services:
  main:
    image: dockyard/base:1
    command: ["sh", "-c", "sleep infinity"]
    working_dir: /app
    tmpfs: ["/app:size=4m", "/tmp:size=4m", "/root:size=4m", "/logs/agent:size=4m", "/logs/artifacts:size=4m"]
"""
FILL = "for f in /app /tmp /root /logs/agent /logs/artifacts /dev/shm; do cat /dev/zero > $f/full; done; df"


def _provoked() -> Iterator[Row]:
    """What the policy does to its own sandbox. It has not solved its task, and may not gain by any of it."""
    commands = {
        "kills_everything": "kill -9 -1",
        "kills_the_first_process": "kill -9 1; kill -TERM 1; kill -INT 1; kill -HUP 1; kill -SEGV 1",
        "kills_what_runs_it": "kill -9 $PPID $$",
        "deletes_the_programs": "rm -rf /usr/bin /usr/sbin /bin /sbin",
        "deletes_everything": "rm -rf --no-preserve-root / 2>/dev/null",
        "deletes_the_tests_folder": "rm -rf /tests; rmdir /tests; mkdir /tests; chmod 000 /tests",
        "deletes_the_logs": "rm -rf /logs; rmdir /logs",
        "deletes_the_working_folder": "rm -rf /app; cd /; rmdir /app; touch /app",
        "closes_the_reward_file": "cd /logs/verifier; echo 1 > reward.txt; chmod 000 reward.txt .",
        "prints_a_lot": "yes policy | head -c 60000000",
        "prints_an_endless_line": "cat /dev/zero | head -c 60000000",
        "prints_the_engines_words": "echo 'Error response from daemon: container is not running' >&2;"
        " echo 'Cannot connect to the Docker daemon' >&2; exit 137",
        "writes_a_large_log": "head -c 300000000 /dev/zero > /logs/agent/large",
        "writes_many_logs": "cd /logs/agent; for i in {1..5000}; do : > $i; done",
        "writes_strange_logs": "cd /logs/agent; mkfifo pipe; ln -s / root; ln -s /nowhere gone; mkdir -m 000 closed;"
        " printf x > $'a\\nb'; printf x > $'\\xff\\xfe'; mkdir -p $(printf 'd/%.0s' {1..300});"
        " : > $(printf 'n%.0s' {1..255})",
    }
    for name, command in commands.items():
        yield Row(name=name, says=(command,))
    yield Row(
        name="writes_a_sparse_log", says=("truncate -s 8G /logs/agent/sparse",), limits=limits(total_timeout_s=60)
    )
    yield Row(name="fork_bomb", says=(":(){ :|:& };:",), kwargs={"max_processes": 100})
    yield Row(name="exhausts_memory", says=(EAT, EAT), overrides={"override_memory_mb": 64})
    yield Row(
        name="offers_its_first_process_to_the_kernel",
        says=(f"echo 1000 > /proc/1/oom_score_adj; {EAT}",),
        overrides={"override_memory_mb": 64},
        where=("docker",),
    )
    yield Row(
        name="leaves_memory_used",
        says=("(python3 -c 'import time; x = bytearray(60 << 20); time.sleep(99)' >/dev/null 2>&1 &); sleep 1",),
        overrides={"override_memory_mb": 64},
    )
    yield Row(
        name="hangs_the_tests",
        says=("echo 'sleep 1000' > /app/run.sh",),
        test=RUN_APP,
        limits=limits(verifier_timeout_s=2),
        cause="verifier_timeout",
    )
    yield Row(
        name="kills_the_tests",
        says=("echo 'kill -9 -1; kill -9 $PPID' > /app/run.sh",),
        test=RUN_APP,
    )
    yield Row(name="fills_the_disk", says=(FILL,), overrides={"override_storage_mb": 32}, where=("sandbox",))
    yield Row(
        name="fills_small_disks",
        says=(FILL,),
        image="",
        toml='[environment]\ndocker_image = "dockyard/base:1"\n',
        files={"environment/docker-compose.yaml": SMALL_DISKS},
        kwargs={"network": "auto", "network_name": None},
        where=("docker",),
    )


PROVOKED = tuple(_provoked())
ROWS = (*INFRASTRUCTURE, *KEPT, *VERIFIER)
UNREACHABLE = dropped("docker_unreachable", "docker_unreachable", says=("true",), agent=doomed("engine gone"))
NOT_CAUSED = {
    "out_of_memory": "what Harbor's remote environments report; ours say `environment_died`, or lose a process only",
}
"""Causes that nothing on this machine can bring about, and why."""


def assert_blamed(row: Row, seen: Seen) -> None:
    """Cause, blame, reward and number of tries are the row's."""
    failure = seen.rollout.failure
    print(seen.rollout.seconds, failure)
    blame = Blame.INFRASTRUCTURE if row.reward is None else Blame.POLICY
    assert (failure and failure.cause, failure and failure.blame) == (row.cause, row.cause and blame), failure
    assert (seen.rollout.reward, seen.num_tries) == (row.reward, row.num_tries), failure


def assert_does_not_pay(row: Row, seen: Seen) -> None:
    """A policy that breaks its sandbox gets what it would have got without: nothing, and no second try."""
    failure = seen.rollout.failure
    print(seen.rollout.seconds, failure)
    assert failure is None or failure.blame is Blame.POLICY, failure
    assert (seen.rollout.reward, seen.num_tries) == (0.0, 1), failure
    if row.cause is not None:
        assert failure is not None
        assert failure.cause == row.cause


async def cancel_at_work(kind: str, folder: Path) -> list[str]:
    """What is left of a rollout that is cancelled while its command runs."""
    slow = f"sleep 60.{os.getpid():09}{time.time_ns() % 10**9:09}"  # as nobody else's
    engine = FakeEngine([Said(f"```bash\n{slow}\n```")])
    row = Row(name="cancelled", engine=lambda _: nullcontext(engine))
    async with open_site(environment_of(kind), inside=False) as site:
        running = asyncio.create_task(run_row(row, site, folder))
        async with asyncio.timeout(600):  # only against hanging
            while not _runs(slow):
                await asyncio.sleep(0.05)
                assert not running.done()
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=600)  # only against hanging
        assert running in done, "it does not end"
        assert running.cancelled()
        return await left_behind(kind, [site])


def _runs(command: str) -> bool:
    """As this machine sees it, also in a sandbox or container."""
    wanted = "".join(f"{word}\0" for word in command.split()).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes() == wanted:
                return True
    return False


def uncaused(kinds: tuple[str, ...]) -> set[str]:
    """Causes that no row of these environments brings about, but those that are excused."""
    rows = [row for row in (*ROWS, UNREACHABLE) if set(row.where) & set(kinds)]
    return {cause.name for cause in CAUSES} - {row.cause for row in rows} - NOT_CAUSED.keys() - {"cancelled"}
