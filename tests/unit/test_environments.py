from pathlib import Path

import pytest

from dockyard.collect.open import check_run
from dockyard.config import EnvironmentConfig, GatewayConfig, RunConfig, TasksConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.rollout.environments import check_environment, open_site, sandbox_site


def check(kind: str, *, inside: bool, network: str = "auto", **gateway: str) -> None:
    environment = EnvironmentConfig.model_validate({"type": kind, "network": network})
    check_environment(environment, GatewayConfig.model_validate(gateway), agent="qwen-coder", inside=inside)


def test_an_unknown_type_is_refused_with_the_nearest_known():
    with pytest.raises(UsageError) as caught:
        check("dockr", inside=False)
    assert caught.value.message == "`environment.type` is `dockr`, which is not an environment"
    assert caught.value.hint == "did you mean `docker`?"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("modal", ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")),
        ("daytona", ("DAYTONA_API_KEY",)),
        ("e2b", ("E2B_API_KEY",)),
        ("runloop", ("RUNLOOP_API_KEY",)),
    ],
)
def test_missing_credentials_are_named_before_anything_starts(
    kind: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))  # where Modal keeps its own
    for variable in ("DAYTONA_JWT_TOKEN", *names):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(DockyardError) as caught:
        check(kind, inside=False)
    assert all(name in caught.value.message for name in names)
    commands = {"modal": "`modal token new`", "daytona": "DAYTONA_API_URL"}
    assert commands.get(kind, "set what the message names") in caught.value.hint


def test_credentials_are_never_printed(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-very-secret")
    monkeypatch.delenv("MODAL_TOKEN_SECRET", raising=False)
    with pytest.raises(DockyardError) as caught:
        check("modal", inside=False)
    said = caught.value.message + caught.value.hint + "".join(capsys.readouterr())
    assert "very-secret" not in said


def test_an_agent_that_calls_from_afar_needs_a_way_to_the_gateway(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("E2B_API_KEY", "k")
    with pytest.raises(
        UsageError, match="`qwen-coder` would call the gateway from `e2b`, which cannot reach"
    ) as caught:
        check("e2b", inside=True)
    assert "gateway.public_url" in caught.value.hint
    assert "gateway.tunnel" in caught.value.hint
    check("e2b", inside=True, public_url="https://gateway.example.org")
    check("e2b", inside=True, tunnel="ssh -R 80:localhost:{port} serveo.net")
    check("e2b", inside=False)


def test_daytonas_network_is_noted_where_an_agent_would_call_from_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DAYTONA_API_KEY", "k")
    with pytest.raises(UsageError) as caught:
        check("daytona", inside=True)
    assert "Daytona's lower tiers let sandboxes reach a list of known services only" in caught.value.hint


def test_a_way_to_the_gateway_that_nobody_would_take_is_refused():
    with pytest.raises(
        UsageError, match="`gateway.public_url` has no effect: `qwen-coder` calls the gateway from this"
    ):
        check("docker", inside=False, public_url="https://gateway.example.org")
    with pytest.raises(UsageError, match="`gateway.public_url` and `gateway.tunnel` are both set"):
        check("docker", inside=True, public_url="https://gateway.example.org", tunnel="x")


@pytest.mark.parametrize(
    ("kind", "network", "inside", "message"),
    [
        ("docker", "none", True, "calls the model from inside the environment"),
        ("sandbox", "auto", True, "has neither its program nor a network"),
        ("sandbox", "gateway", False, "`gateway`, which `sandbox` does not support"),
        ("podman", "none", False, "`none`, which `podman` does not support"),
    ],
)
def test_a_network_that_cannot_be_had_is_refused(kind: str, network: str, inside: bool, message: str):
    with pytest.raises(UsageError, match=message):
        check(kind, inside=inside, network=network)


@pytest.mark.parametrize(("kind", "network", "inside"), [("docker", "gateway", True), ("sandbox", "none", False)])
def test_a_network_that_can_be_had_is_accepted(kind: str, network: str, inside: bool):
    check(kind, inside=inside, network=network)


@pytest.mark.parametrize(("kind", "seal"), [("sandbox", "strict"), ("sandbox", "processes"), ("podman", "off")])
def test_a_seal_that_cannot_be_had_is_refused(kind: str, seal: str):
    environment = EnvironmentConfig.model_validate({"type": kind, "seal": seal})
    with pytest.raises(UsageError, match=f"`environment.seal` is `{seal}`, which `{kind}` does not have"):
        check_environment(environment, GatewayConfig(), agent="shell", inside=False)


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("sandbox", "max_proceses", "did you mean `max_processes`?"),
        ("docker", "max_proceses", "did you mean `max_processes`?"),
        ("docker", "keep_container", "did you mean `keep_containers`?"),
        ("sandbox", "zzz", "known are "),
        ("docker", "run", "known are "),
        ("docker", "network_name", ""),
        ("docker", "seal_level", ""),
        ("docker", "session_id", ""),
        ("sandbox", "logger", ""),
        ("sandbox", "trial_paths", ""),
        ("docker", "kwargs", ""),
    ],
)
def test_an_option_that_an_environment_does_not_have_or_that_is_not_for_users_is_refused(
    kind: str, name: str, hint: str
):
    environment = EnvironmentConfig(type=kind, kwargs={name: 1})
    with pytest.raises(UsageError) as caught:
        check_environment(environment, GatewayConfig(), agent="shell", inside=False)
    assert caught.value.message == f"`environment.kwargs.{name}` is not an option of `{kind}`"
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("sandbox", ("network", "max_processes", "persistent_env")),
        ("docker", ("network", "max_processes", "keep_containers", "persistent_env", "extra_docker_compose")),
    ],
)
def test_an_environments_own_options_and_those_of_its_bases_are_accepted(kind: str, names: tuple[str, ...]):
    environment = EnvironmentConfig(type=kind, kwargs=dict.fromkeys(names, 1))
    check_environment(environment, GatewayConfig(), agent="shell", inside=False)


def test_limits_and_network_reach_harbor():
    limits = EnvironmentConfig(cpus=2, memory_mb=512, storage_mb=256, network="public", kwargs={"max_processes": 9})
    environment = sandbox_site(limits).environment
    assert (environment.override_cpus, environment.override_memory_mb, environment.override_storage_mb) == (2, 512, 256)
    assert environment.kwargs == {"network": True, "max_processes": 9, "mechanism": "auto"}
    assert sandbox_site(EnvironmentConfig(), "landlock").environment.kwargs == {"mechanism": "landlock"}


async def test_any_other_type_is_handed_to_harbor_with_its_own_settings():
    async with open_site(EnvironmentConfig(type="daytona", kwargs={"auto_stop_interval_mins": 5}), inside=True) as site:
        assert site.environment.type is not None
        assert site.environment.type.value == "daytona"
        assert site.environment.kwargs == {"auto_stop_interval_mins": 5}
        assert site.host is None


@pytest.mark.parametrize(
    ("setting", "config"),
    [
        ("run_dir", RunConfig(run_dir=Path("/usr/src/app/runs/mine"))),
        ("tasks.train", RunConfig(tasks=TasksConfig(train=Path("/usr/../usr/local/tasks")))),
        ("tasks.heldout", RunConfig(tasks=TasksConfig(heldout=Path("/lib/tasks")))),
    ],
)
def test_what_every_sandbox_could_read_is_refused(setting: str, config: RunConfig):
    with pytest.raises(UsageError, match=f"`{setting}` is `.*`, which every task in a `sandbox` could read"):
        check_run(config)
