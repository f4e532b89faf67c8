"""The environments of a run: checked before anything starts, opened once, and a way from them to the gateway."""

# pyright: reportMissingTypeStubs=false

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from harbor import TrialEnvironmentConfig
from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.utils.optional_import import MissingExtraError

from dockyard.config import EnvironmentConfig, GatewayConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.gateway.app import Gateway
from dockyard.rollout import sandbox
from dockyard.rollout.options import check_options, nearest, options_of
from dockyard.rollout.sandbox.check import choose_mechanism
from dockyard.rollout.sandbox.client import LANDLOCK
from dockyard.rollout.sandbox.confined import remove_leftovers
from dockyard.rollout.site import Site
from dockyard.rollout.tunnel import open_tunnel

logger = logging.getLogger(__name__)

LOCAL = ("sandbox", "docker")
"""Types that we run ourselves, on this machine. All others are Harbor's, and mostly far away."""
_NOT_FOR_USERS = {
    *("run", "network_name", "seal_level", "mechanism", "logger", "stream", "mounts", "auto_mounts", "auto_mounting"),
    *("network_policy", "phase_network_policies", "enable_environment_dir_upload"),
    *("override_cpus", "override_memory_mb", "override_storage_mb"),
}
"""Options that we or Harbor set, or for which there are settings."""
_CREDENTIALS = {
    "modal": "`modal token new`",
    "daytona": "`export DAYTONA_API_KEY=...`; `DAYTONA_API_URL` too, for a Daytona of your own",
}
_TERMINAL_AGENTS = ("terminus", "terminus-1", "terminus-2")
_NETWORK_NOTES = {"daytona": "; Daytona's lower tiers let sandboxes reach a list of known services only"}
_HOW_TO_REACH = (
    "`--gateway.public_url URL` with a tunnel of yours to `--gateway.port N`, "
    "or `--gateway.tunnel 'cloudflared tunnel --url http://localhost:{port}'`"
)


def check_environment(config: EnvironmentConfig, gateway: GatewayConfig, *, agent: str, inside: bool) -> None:
    """Refuse what cannot run, before anything starts. `inside`: the agent calls the model from the environment."""
    types = ["sandbox", *(kind.value for kind in EnvironmentType)]
    if config.type not in types:
        message = f"`environment.type` is `{config.type}`, which is no environment"
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
    levels = known.get(config.type, ("standard",))  # the default, which means nothing there
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
        raise UsageError(f"{' and '.join(named)} are both set", hint="a tunnel's URL is found out: remove `public_url`")
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
    told = {"sandbox": ("auto", "none", "public"), "docker": ("auto", "none", "gateway", "public")}
    if config.network not in told.get(config.type, ("auto",)):
        raise UsageError(
            f"`environment.network` is `{config.network}`, which `{config.type}` cannot be told",
            hint="`--environment.network auto` leaves it to the task's `network_mode`; `docker` can be told",
        )


def _check_credentials(kind: str) -> None:
    """By Harbor's own check, which names what is missing and prints no values."""
    try:
        EnvironmentFactory.run_preflight(EnvironmentType(kind))
    except MissingExtraError as error:
        raise DockyardError(
            f"`environment.type` is `{kind}`: {error}", hint=f"`pip install 'harbor[{kind}]'`"
        ) from None
    except (SystemExit, ValueError, ImportError) as error:
        raise DockyardError(
            f"`environment.type` is `{kind}`: {error}",
            hint=_CREDENTIALS.get(kind, "set what it names, then try again"),
        ) from None


@asynccontextmanager
async def open_site(config: EnvironmentConfig, *, inside: bool, run: str | None = None) -> AsyncGenerator[Site]:
    """Whatever the environments of a run share, removed with the block. `run` is the run's own name, if it has one."""
    match config.type:
        case "sandbox":
            mechanism = choose_mechanism(config.sandbox)
            if mechanism.name == LANDLOCK:
                remove_leftovers()
                logger.warning(
                    "sandboxes are made by %s. Not held: %s", mechanism.describe(), "; ".join(mechanism.not_held)
                )
            yield sandbox_site(config, mechanism.name)
        case "docker":
            from dockyard.rollout.docker import docker_site

            async with docker_site(config, inside=inside, run=run) as site:
                yield site
        case _:
            logger.warning(
                "`%s` has no seal: what an agent leaves running could rewrite its reward, unless a task's verifier "
                "has an environment of its own",
                config.type,
            )
            yield Site(environment=_harbor(config, type=EnvironmentType(config.type)))


def sandbox_site(config: EnvironmentConfig, mechanism: str = "auto") -> Site:
    """Nothing to open: every sandbox stands alone."""
    kwargs = {"mechanism": mechanism} | ({"network": True} if config.network == "public" else {})
    environment = _harbor(config, import_path=sandbox.ENVIRONMENT)
    return Site(environment=environment.model_copy(update={"kwargs": kwargs | config.kwargs}), host="127.0.0.1")


def _harbor(config: EnvironmentConfig, **which: object) -> TrialEnvironmentConfig:
    return TrialEnvironmentConfig.model_validate(
        {
            "kwargs": config.kwargs,
            "override_cpus": config.cpus,
            "override_memory_mb": config.memory_mb,
            "override_storage_mb": config.storage_mb,
            **which,
        }
    )


@asynccontextmanager
async def reachable(gateway: Gateway, site: Site, config: GatewayConfig, *, inside: bool) -> AsyncGenerator[str]:
    """The gateway's root URL as this run's agents see it."""
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
            message = "agents inside would call the gateway, but their containers cannot reach this machine"
            raise UsageError(message, hint=_HOW_TO_REACH)
