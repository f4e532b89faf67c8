"""A run's environments: checked before anything starts, opened once, and connected to the gateway.

A remote environment reaches the gateway through a tunnel: a command of the user that prints a URL and runs until it is
stopped. Such commands print other URLs too, so the tunnel's URL is the one at which the gateway answers.
"""

# pyright: reportMissingTypeStubs=false

import asyncio
import contextlib
import difflib
import logging
import os
import re
import signal
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from inspect import Parameter, signature

import aiohttp
from harbor import TrialEnvironmentConfig
from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.utils.optional_import import MissingExtraError
from yarl import URL

from dockyard.config import EnvironmentConfig, GatewayConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.gateway.server import Gateway
from dockyard.process import ends_with
from dockyard.rollout import sandbox
from dockyard.rollout.sandbox.check import choose_mechanism
from dockyard.rollout.sandbox.client import LANDLOCK
from dockyard.rollout.sandbox.launch import remove_leftovers

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PATIENCE_S = 60.0
LOCAL = ("sandbox", "docker")
"""Types that Dockyard runs itself, on this machine. All others are Harbor's, and most of them are remote."""
_PROBE_TIMEOUT_S = 10.0
_PAUSE_S = 0.5
_URL = re.compile(r"https?://[\w.:\[\]-]+")
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_NOT_FOR_USERS = {
    *("run", "network_name", "seal_level", "mechanism", "logger", "stream", "mounts", "auto_mounts", "auto_mounting"),
    *("network_policy", "phase_network_policies", "enable_environment_dir_upload"),
    *("override_cpus", "override_memory_mb", "override_storage_mb"),
}
"""Options that Dockyard or Harbor sets, or that have settings of their own."""
_CREDENTIALS = {
    "modal": "`modal token new`",
    "daytona": "`export DAYTONA_API_KEY=...`; also `DAYTONA_API_URL`, for a Daytona of your own",
}
_TERMINAL_AGENTS = ("terminus", "terminus-1", "terminus-2")
_NETWORK_NOTES = {"daytona": "; Daytona's lower tiers let sandboxes reach a list of known services only"}
_HOW_TO_REACH = (
    "`--gateway.public_url URL` with your own tunnel to `--gateway.port N`, "
    "or `--gateway.tunnel 'cloudflared tunnel --url http://localhost:{port}'`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One kind of environment, ready for trials."""

    environment: TrialEnvironmentConfig
    """Harbor's settings for every trial."""
    listen: tuple[str, ...] = (LOOPBACK,)
    """Addresses of this machine where the gateway listens, loopback first."""
    host: str | None = None
    """The gateway's host for agents inside. None: they cannot reach this machine."""


def options_of(made: type) -> set[str]:
    """Return the optional arguments of a class's constructor, including those of its bases."""
    found: dict[str, Parameter] = {}
    for base in reversed(made.__mro__[:-1]):  # the last is `object`
        if "__init__" in vars(base):
            found |= signature(vars(base)["__init__"]).parameters
    return {name for name, one in found.items() if one.default is not Parameter.empty and one.kind not in _VARIADIC}


def check_options(setting: str, given: Iterable[str], known: Collection[str], *, of: str) -> None:
    """Refuse an option that would have no effect, or that is not for users."""
    for name in given:
        if name not in known:
            raise UsageError(f"`{setting}.{name}` is not an option of `{of}`", hint=nearest(name, sorted(known)))


def nearest(name: str, known: list[str]) -> str:
    """Return a hint for a misspelled name."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"


@asynccontextmanager
async def open_tunnel(command: str, port: int, patience_s: float = PATIENCE_S) -> AsyncGenerator[str]:
    """Provide the tunnel's URL. The command and everything it started are killed when the block ends."""
    process = await asyncio.create_subprocess_shell(
        command.replace("{port}", str(port)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    heard: list[str] = []
    reading = asyncio.create_task(_listen(process.stdout, heard))  # to its end: a full pipe would stop the tunnel
    try:
        url = await _find(process, heard, port, patience_s)
        if url is None:
            raise DockyardError(
                f"`gateway.tunnel` is `{command}`, which opened no way to the gateway in {patience_s:g} s: "
                + (" / ".join(heard[-3:]) or "it printed nothing"),
                hint="run it by hand, or open a tunnel yourself and pass its URL as `--gateway.public_url`",
            )
        logger.info("agents reach the gateway at %s", url)
        async with ends_with(process, lambda: _ended(process, command)):
            yield url
    finally:
        reading.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _ended(process: asyncio.subprocess.Process, command: str) -> DockyardError:
    """Return the error that ends the run: agents that cannot reach their model would count as crashed."""
    message = f"`gateway.tunnel` ended with code {process.returncode} in the middle of the run"
    return DockyardError(message, hint=f"run `{command}` by hand; `--resume` continues the run")


async def _listen(output: asyncio.StreamReader, heard: list[str]) -> None:
    async for raw in output:
        if len(heard) < 1000 and (line := raw.decode(errors="replace").strip()):
            heard.append(line)


async def _find(process: asyncio.subprocess.Process, heard: list[str], port: int, patience_s: float) -> str | None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s), aiohttp.ClientSession(trust_env=True) as client:
            while process.returncode is None:
                printed = dict.fromkeys(url.rstrip(".:") for line in list(heard) for url in _URL.findall(line))
                for url in printed:
                    if _port(url) != port and await _is_gateway(client, url):
                        return url
                await asyncio.sleep(_PAUSE_S)
    return None


def _port(url: str) -> int | None:
    try:
        return URL(url).port
    except ValueError:
        return None


async def _is_gateway(client: aiohttp.ClientSession, url: str) -> bool:
    """Whether the gateway answers at this URL: it refuses requests without a key with a known error."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S), client.get(f"{url}/v1/models") as response:
            return response.status == 401 and "invalid_api_key" in await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return False


def check_environment(config: EnvironmentConfig, gateway: GatewayConfig, *, agent: str, inside: bool) -> None:
    """Refuse what cannot run, before anything starts. `inside`: the agent calls the model from the environment."""
    types = ["sandbox", *(kind.value for kind in EnvironmentType)]
    if config.type not in types:
        message = f"`environment.type` is `{config.type}`, which is not an environment"
        raise UsageError(message, hint=nearest(config.type, types))
    _check_network(config, agent=agent, inside=inside)
    _check_mechanism(config, agent=agent)
    _check_seal(config)
    _check_kwargs(config)
    _check_way(gateway, agent=agent, inside=inside)
    if config.type not in LOCAL:
        _check_credentials(config.type)
        if inside and not (gateway.public_url or gateway.tunnel):
            message = f"`{agent}` would call the gateway from `{config.type}`, which cannot reach this machine"
            raise UsageError(message, hint=_HOW_TO_REACH + _NETWORK_NOTES.get(config.type, ""))


def _check_mechanism(config: EnvironmentConfig, *, agent: str) -> None:
    if config.type != "sandbox" and config.sandbox != "auto":
        message = f"`environment.sandbox` is `{config.sandbox}`, but `environment.type` is `{config.type}`"
        raise UsageError(message, hint="remove `environment.sandbox`, or `--environment.type sandbox`")
    if config.type == "sandbox" and agent in _TERMINAL_AGENTS and not choose_mechanism(config.sandbox).has_terminals:
        message = f"`{agent}` needs tmux, and a sandbox without namespaces has terminals only when you are root"
        raise UsageError(message, hint="`--agent.name shell`, run as root, or `--environment.type docker`")


def _check_seal(config: EnvironmentConfig) -> None:
    known = {"sandbox": ("off", "standard"), "docker": ("off", "processes", "standard", "strict")}
    levels = known.get(config.type, ("standard",))  # the default, which has no effect there
    if config.seal not in levels:
        message = f"`environment.seal` is `{config.seal}`, which `{config.type}` does not have"
        raise UsageError(message, hint="`--environment.seal standard`")


def _check_kwargs(config: EnvironmentConfig) -> None:
    if config.type in LOCAL and config.kwargs:
        known = options_of(_class_of(config.type)) - _NOT_FOR_USERS
        check_options("environment.kwargs", config.kwargs, known, of=config.type)


def _class_of(local: str) -> type:
    if local == "sandbox":
        from dockyard.rollout.sandbox.environment import SandboxEnvironment

        return SandboxEnvironment
    from dockyard.rollout.docker.environment import DockerEnvironment

    return DockerEnvironment


def _check_way(gateway: GatewayConfig, *, agent: str, inside: bool) -> None:
    ways = {"`gateway.public_url`": gateway.public_url, "`gateway.tunnel`": gateway.tunnel}
    named = [name for name, way in ways.items() if way]
    if len(named) > 1:
        hint = "remove `public_url`: the URL of `gateway.tunnel` is read from its output"
        raise UsageError(f"{' and '.join(named)} are both set", hint=hint)
    if named and not inside:
        message = f"{named[0]} has no effect: `{agent}` calls the gateway from this machine"
        raise UsageError(message, hint=f"remove {named[0]}")


def _check_network(config: EnvironmentConfig, *, agent: str, inside: bool) -> None:
    if inside and config.network == "none":
        raise UsageError(
            f"`environment.network` is `none`, but `{agent}` calls the model from inside the environment",
            hint="`--environment.network gateway` lets it reach the gateway and nothing else",
        )
    if inside and config.type == "sandbox" and config.network != "public":
        raise UsageError(
            f"`{agent}` runs inside the environment, and a sandbox has neither its program nor a network",
            hint="`--environment.type docker`, or an agent that runs here: `shell`, `terminus-2`",
        )
    supported = {"sandbox": ("auto", "none", "public"), "docker": ("auto", "none", "gateway", "public")}
    if config.network not in supported.get(config.type, ("auto",)):
        raise UsageError(
            f"`environment.network` is `{config.network}`, which `{config.type}` does not support",
            hint="`--environment.network auto` uses the task's `network_mode`; `docker` supports all values",
        )


def _check_credentials(kind: str) -> None:
    """Run Harbor's own check, which names what is missing and prints no values."""
    try:
        EnvironmentFactory.run_preflight(EnvironmentType(kind))
    except MissingExtraError as error:
        raise DockyardError(
            f"`environment.type` is `{kind}`: {error}", hint=f"`pip install 'harbor[{kind}]'`"
        ) from None
    except (SystemExit, ValueError, ImportError) as error:
        raise DockyardError(
            f"`environment.type` is `{kind}`: {error}",
            hint=_CREDENTIALS.get(kind, "set what the message names, then try again"),
        ) from None


@asynccontextmanager
async def open_site(config: EnvironmentConfig, *, inside: bool, run: str | None = None) -> AsyncGenerator[Site]:
    """Provide what the environments of a run share, and remove it when the block ends. `run` is the run's name."""
    match config.type:
        case "sandbox":
            mechanism = choose_mechanism(config.sandbox)
            if mechanism.name == LANDLOCK:
                remove_leftovers()
                logger.warning(
                    "sandboxes use %s. Not guaranteed: %s", mechanism.describe(), "; ".join(mechanism.not_held)
                )
            yield sandbox_site(config, mechanism.name)
        case "docker":
            from dockyard.rollout.docker.site import docker_site

            async with docker_site(config, inside=inside, run=run) as site:
                yield site
        case _:
            logger.warning(
                "`%s` has no seal: a process that an agent leaves running could rewrite its reward, unless the task's "
                "verifier has its own environment",
                config.type,
            )
            yield Site(environment=harbor_config(config, harbor_type=EnvironmentType(config.type)))


def sandbox_site(config: EnvironmentConfig, mechanism: str = "auto") -> Site:
    """Return the site of sandboxes, which share nothing that would have to be opened."""
    kwargs = {"mechanism": mechanism} | ({"network": True} if config.network == "public" else {})
    return Site(environment=harbor_config(config, import_path=sandbox.ENVIRONMENT, kwargs=kwargs), host=LOOPBACK)


def harbor_config(
    config: EnvironmentConfig,
    *,
    harbor_type: EnvironmentType | None = None,
    import_path: str | None = None,
    kwargs: Mapping[str, object] | None = None,
) -> TrialEnvironmentConfig:
    """Return Harbor's settings for one of its types or for a class. `environment.kwargs` overrides `kwargs`."""
    return TrialEnvironmentConfig(
        type=harbor_type,
        import_path=import_path,
        kwargs={**(kwargs or {}), **config.kwargs},
        override_cpus=config.cpus,
        override_memory_mb=config.memory_mb,
        override_storage_mb=config.storage_mb,
    )


@asynccontextmanager
async def reachable(gateway: Gateway, site: Site, config: GatewayConfig, *, inside: bool) -> AsyncGenerator[str]:
    """Provide the gateway's root URL for this run's agents."""
    async with AsyncExitStack() as stack:
        if not inside:
            yield gateway.root_url
        elif config.public_url:
            yield config.public_url.rstrip("/").removesuffix("/v1")
        elif config.tunnel:
            yield await stack.enter_async_context(open_tunnel(config.tunnel, gateway.port))
        elif site.host:
            yield f"http://{site.host}:{gateway.port}"
        else:
            message = "agents call the gateway from inside their containers, which cannot reach this machine"
            raise UsageError(message, hint=_HOW_TO_REACH)
