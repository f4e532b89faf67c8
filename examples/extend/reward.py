"""Give half of the reward in proportion to the tests that pass, and subtract a little from rollouts that hit a limit.

`ctrf.json` is the report of pytest-json-ctrf, which the tests of many Harbor tasks write. Read what the verifier wrote
itself: the policy can influence what its code prints while it is tested.

`--grpo.reward examples.extend.reward:reward` from the root of the repository.
"""

import json
from contextlib import suppress

from dockyard import FinishedRollout

PARTIAL, LIMIT = 0.5, 0.1


def reward(rollout: FinishedRollout) -> float:
    share = 0.0
    with suppress(ValueError, KeyError, TypeError, ZeroDivisionError):  # no report, or an incomplete one
        summary = json.loads(rollout.verifier_text("ctrf.json"))["results"]["summary"]
        share = summary["passed"] / summary["tests"]
    return (1 - PARTIAL) * rollout.reward + PARTIAL * share - LIMIT * rollout.cut_short
