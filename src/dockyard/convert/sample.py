"""A training sample with SLiME's field names: one per segment, as stored in files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dockyard.errors import DockyardError
from dockyard.types import BoolArray, FloatArray, IntArray


class SampleStatus(StrEnum):
    """How the rollout ended."""

    PENDING = "pending"
    """Appears only in SLiME's own files."""
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """A limit of time, turns or context ended it."""
    ABORTED = "aborted"
    """The infrastructure caused the failure: there is no reward."""
    FAILED = "failed"
    """The policy caused another failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One segment of a rollout. All segments of a rollout have its `rollout_id` and its whole reward."""

    group_index: int
    """The same for all rollouts of a task."""
    index: int
    """Unique within a file."""
    rollout_id: int
    prompt: str
    """For people to read, like `response`. It is never tokenised."""
    tokens: IntArray
    """Prompt and response."""
    response: str
    response_length: int
    """The number of `tokens` after the first prompt, tool results included."""
    label: str
    """The name of the task."""
    reward: float | None
    """None if the rollout is dropped from its group."""
    loss_mask: BoolArray
    """Over the response: True where the policy drew the token."""
    rollout_log_probs: FloatArray | None
    """Over the response, 0 where not sampled. None if they were not recorded."""
    versions: IntArray | None = None
    """Over the response: the weight version that drew the token, -1 where not sampled. None if not recorded."""
    status: str
    remove_sample: bool
    """True if it must not be trained on."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    def row(self) -> dict[str, Any]:
        """The fields as plain lists and numbers."""
        return {
            "group_index": self.group_index,
            "index": self.index,
            "rollout_id": self.rollout_id,
            "prompt": self.prompt,
            "tokens": self.tokens.tolist(),
            "response": self.response,
            "response_length": self.response_length,
            "label": self.label,
            "reward": self.reward,
            "loss_mask": self.loss_mask.astype(np.int8).tolist(),
            "rollout_log_probs": None if self.rollout_log_probs is None else self.rollout_log_probs.tolist(),
            "versions": None if self.versions is None else self.versions.tolist(),
            "status": self.status,
            "remove_sample": self.remove_sample,
            "metadata": self.metadata,
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any], where: str) -> Self:
        """Parse the output of `row`, or of SLiME's `Sample.to_dict`. Errors name the place and the field."""
        try:
            fields = _Row.model_validate(row)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            name = ".".join(map(str, problem["loc"]))
            raise _broken(where, f"`{name}`: {problem['msg']}") from error
        fields.check(where)
        response, logprobs, versions = fields.response_length, fields.rollout_log_probs, fields.versions
        return cls(
            group_index=fields.group_index,
            index=fields.index,
            rollout_id=fields.index if fields.rollout_id is None else fields.rollout_id,
            prompt=fields.prompt if isinstance(fields.prompt, str) else "",
            tokens=np.array(fields.tokens, np.int32),
            response=fields.response,
            response_length=response,
            label=fields.label or "",
            # SLiME stores a number where there is no reward, and excludes the sample from the loss instead.
            reward=None if fields.remove_sample else fields.reward,
            loss_mask=np.ones(response, np.bool_) if fields.loss_mask is None else np.array(fields.loss_mask, np.bool_),
            rollout_log_probs=None if logprobs is None else np.array(logprobs, np.float32),
            versions=None if versions is None else np.array(versions, np.int32),
            status=fields.status.value,
            remove_sample=fields.remove_sample,
            metadata=fields.metadata,
        )


type _Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class _Row(BaseModel):
    """A sample as stored in a file. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    group_index: int
    index: int
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[_Int32]
    response: str = ""
    response_length: int = Field(ge=0)
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    versions: list[_Int32] | None = None
    status: SampleStatus
    remove_sample: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)

    def check(self, where: str) -> None:
        """Refuse lists whose lengths do not agree."""
        if self.response_length > len(self.tokens):
            raise _broken(where, f"`response_length` is {self.response_length}, with {len(self.tokens)} `tokens`")
        lists = (
            ("loss_mask", self.loss_mask),
            ("rollout_log_probs", self.rollout_log_probs),
            ("versions", self.versions),
        )
        first = (self.loss_mask or [1])[0] if self.response_length else 0
        if first and self.response_length == len(self.tokens):
            raise _broken(where, "its first token is marked as sampled, but there is no prompt before it")
        for name, values in lists:
            if values is not None and len(values) != self.response_length:
                raise _broken(where, f"`{name}` has {len(values)} values, `response_length` is {self.response_length}")


def _broken(where: str, problem: str) -> DockyardError:
    return DockyardError(f"{where} is not a sample: {problem}", hint="write it again with `dockyard convert`")
