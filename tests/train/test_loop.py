import asyncio
from dataclasses import dataclass, field

from dockyard.trainer.loop import train
from dockyard.types import Group


@dataclass
class Fake:
    """All three parts of the loop; writes down what it was asked."""

    version: int = 0
    events: list[str] = field(default_factory=list)

    async def collect(self, step: int) -> tuple[Group, ...]:
        self.events.append(f"collect {step} with weights {self.version}")
        return ()

    async def update(self, groups: tuple[Group, ...]) -> dict[str, float]:
        self.version += 1
        self.events.append("update")
        return {}

    async def publish(self) -> None:
        self.events.append(f"publish {self.version}")

    async def record(self, step: int, groups: tuple[Group, ...], metrics: dict[str, float]) -> None:
        self.events.append(f"record {step}")


def test_new_weights_are_served_before_the_next_rollouts():
    fake = Fake()
    asyncio.run(train(2, fake, fake, fake))
    assert fake.events == [
        *("collect 0 with weights 0", "update", "publish 1", "record 0"),
        *("collect 1 with weights 1", "update", "publish 2", "record 1"),
    ]


def test_a_resumed_loop_begins_at_the_version_of_its_weights():
    fake = Fake(version=2)
    asyncio.run(train(3, fake, fake, fake))
    assert fake.events[0] == "collect 2 with weights 2"
    assert fake.version == 3
