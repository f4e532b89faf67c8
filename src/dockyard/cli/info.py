"""`dockyard agents` and `dockyard doctor`."""

from dockyard.cli.args import DEBUG, JSON, Flag, Given, Verb
from dockyard.cli.terminal import print_data


def _agents(given: Given) -> int:
    from dockyard.rollout.agents.wiring import list_agents

    print_data(list_agents(as_json=given.flags.json).rstrip("\n") + "\n")
    return 0


def _doctor(given: Given) -> int:
    from dockyard.doctor import main as doctor_main

    about = [given.flags.model] if given.flags.model is not None else []
    return doctor_main([*about, *(["--json"] if given.flags.json else [])])


VERBS = (
    Verb(
        name="agents",
        about="List every agent: the API that it calls, how it is connected to the gateway, and what was validated.",
        act=_agents,
        flags=(JSON, DEBUG),
    ),
    Verb(
        name="doctor",
        about="Check what this machine can run, and print the command that fixes what it cannot. With MODEL, show how "
        "that model's prompts are built and which agents fit it.",
        act=_doctor,
        flags=(
            Flag("model", "a model folder, a Hub name, or `smollm2-135m`", {"metavar": "MODEL", "nargs": "?"}),
            JSON,
            DEBUG,
        ),
    ),
)
