"""Which GPUs train, which sample, and how the model is split over them."""

from dataclasses import dataclass

from dockyard.backends.slime.models import Split
from dockyard.config import RunConfig
from dockyard.errors import UsageError

_OPTIMIZER_BYTES = 16
"""Per weight: gradient, master copy and both moments in float32. Megatron spreads them over all training GPUs."""
_MOST_OPTIMIZER_GB = 40.0
"""Per GPU of 80 GB; more of it goes to the host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Numbers of GPUs."""

    train: int
    engines: int
    colocated: bool
    """Whether engines and trainer take turns on the same GPUs."""
    per_node: int
    per_engine: int
    tensor: int
    context: int
    pipeline: int
    expert: int
    offload: bool
    """Whether the optimiser's state is kept in the host's memory."""

    @property
    def data(self) -> int:
        """How many replicas share a batch."""
        return self.train // (self.tensor * self.context * self.pipeline)

    @property
    def train_nodes(self) -> int:
        """Machines that train."""
        return max(1, self.train // self.per_node)

    @property
    def nodes(self) -> int:
        """Machines in all."""
        return -(-(self.train + (0 if self.colocated else self.engines)) // self.per_node)

    def __str__(self) -> str:
        place = "engines and trainer take turns" if self.colocated else f"{self.train} train, {self.engines} sample"
        return (
            f"{place}; trainer: tensor {self.tensor} × context {self.context} × pipeline {self.pipeline} × "
            f"data {self.data}, experts over {self.expert}; "
            f"{self.engines // self.per_engine} engines of {self.per_engine}"
        )


def lay_out(config: RunConfig, split: Split) -> Layout:
    """As the run says, else as suits the model. What cannot be split so is an error."""
    slime = config.slime
    apart = slime.rollout_gpus or (max(slime.num_gpus // 2, 1) if config.rollout.max_staleness else 0)
    train = slime.num_gpus - apart
    layout = Layout(
        train=train,
        engines=apart or train,
        colocated=not apart,
        per_node=slime.gpus_per_node,
        per_engine=slime.gpus_per_engine or min(split.engine, apart or train),
        tensor=slime.tensor_parallel or min(split.tensor, max(train, 1)),
        context=slime.context_parallel or _for_context(config),
        pipeline=slime.pipeline_parallel,
        expert=slime.expert_parallel or min(split.expert, max(train, 1)),
        offload=slime.flavour == "slime" and split.num_params_b * _OPTIMIZER_BYTES > _MOST_OPTIMIZER_GB * max(train, 1),
    )
    _check(config, layout)
    return layout


def _for_context(config: RunConfig) -> int:
    """As few GPUs as hold the longest sequence; powers of 2."""
    context = 1
    while context * config.trainer.micro_batch_tokens < (config.engine.context_length or 0):
        context *= 2
    return context


def _check(config: RunConfig, layout: Layout) -> None:
    slime, batch = config.slime, config.grpo.tasks_per_step * config.grpo.group_size
    model_gpus = layout.tensor * layout.context * layout.pipeline
    rules = (
        (layout.train >= 1, f"engines of their own leave none of {slime.num_gpus} GPUs to train", "slime.num_gpus"),
        (
            layout.train > 0 and layout.train % model_gpus == 0,
            f"{layout.train} training GPUs are no multiple of tensor {layout.tensor} × context {layout.context} × "
            f"pipeline {layout.pipeline}",
            "slime.num_gpus",
        ),
        (
            layout.train < layout.per_node or layout.train % layout.per_node == 0,
            f"{layout.train} training GPUs fill no whole machines of {layout.per_node}",
            "slime.rollout_gpus",
        ),
        (
            layout.engines % layout.per_engine == 0,
            f"{layout.engines} GPUs for engines are no multiple of {layout.per_engine}, which one engine takes",
            "slime.gpus_per_engine",
        ),
        (
            layout.train % (layout.expert * layout.pipeline) == 0,
            f"{layout.train} training GPUs are no multiple of expert {layout.expert} × pipeline {layout.pipeline}",
            "slime.expert_parallel",
        ),
        (
            batch % max(layout.data, 1) == 0,
            f"a step's {config.grpo.tasks_per_step} × {config.grpo.group_size} rollouts cannot be dealt out evenly "
            f"to {layout.data} replicas",
            "grpo.tasks_per_step",
        ),
    )
    for holds, problem, what in rules:
        if not holds:
            raise UsageError(problem, hint=f"`--{what} N` is one way out")
