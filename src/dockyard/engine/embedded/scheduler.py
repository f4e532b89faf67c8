"""The scheduler: which requests are decoded together, when, and where in the pool.

Prompts are computed in passes of a limited number of tokens, between which all other requests get a token. A request
that does not fit in the pool waits. If requests in progress need more than there is, the youngest waits again.
"""

import random
import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from dockyard.engine.embedded.decode import Next, Steps, sample
from dockyard.engine.embedded.kv import Beginning, Known, KVPool, Region, longest_beginning
from dockyard.engine.embedded.model import Piece, PooledModel, pack
from dockyard.engine.protocol import GenerateRequest, Generation
from dockyard.errors import EngineError
from dockyard.types import Finish, IntArray, common_prefix

_PASS_TOKENS = {"cpu": 8192, "cuda": 16384}
"""Tokens in one pass over prompts."""
_SPARE_TOKENS = 256
"""Tokens that a region has spare, so that a sequence can grow."""
_WORTH_WAITING = 16
"""Tokens that two prompts must share for one to wait for the other's keys and values."""


@dataclass(slots=True)
class Counts:
    """How much work an engine has done, and how long it took."""

    passes: int = 0
    pass_tokens: int = 0
    pass_s: float = 0.0
    steps: int = 0
    step_tokens: int = 0
    step_s: float = 0.0


class DecodeRequest:
    """One request in progress."""

    def __init__(self, request: GenerateRequest, max_new_tokens: int) -> None:
        self.request = request
        self.future: Future[Generation] = Future()
        self.random = random.Random(request.seed)
        self.num_prompt = len(request.prompt_ids)
        self._ids = np.empty(self.num_prompt + max_new_tokens, dtype=np.int32)
        self._ids[: self.num_prompt] = request.prompt_ids
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.region = Region(0, 0)
        self.num_run = 0
        """The number of its tokens whose keys and values are in the pool."""

    def __len__(self) -> int:
        return self.num_prompt + len(self._logprobs)

    @property
    def ids(self) -> IntArray:
        return self._ids[: len(self)]

    @property
    def known(self) -> Known:
        return Known(self._ids[: self.num_run], self.region)

    @property
    def num_wanted(self) -> int:
        """The number of tokens that its region should hold."""
        return min(len(self) + _SPARE_TOKENS, len(self._ids))

    def append(self, token_id: int, logprob: float, version: int) -> None:
        self._ids[len(self)] = token_id
        self._logprobs.append(logprob)
        self._versions.append(version)

    @property
    def finish(self) -> Finish | None:
        if self._logprobs and int(self._ids[len(self) - 1]) in self.request.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self) == len(self._ids) else None

    def answer(self, finish: Finish) -> None:
        if self.future.set_running_or_notify_cancel():
            generation = Generation(
                token_ids=self.ids[self.num_prompt :].copy(),
                logprobs=np.array(self._logprobs, dtype=np.float32),
                versions=np.array(self._versions, dtype=np.int32),
                finish=finish,
            )
            self.future.set_result(generation)

    def fail(self, error: EngineError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Scheduler:
    """All requests of an engine."""

    def __init__(self, model: PooledModel, steps: Steps, max_batch: int, version: int, *, shares: bool) -> None:
        """`shares`: compute a prefix that prompts share only once."""
        self._model = model
        self.pool: KVPool = model.pool
        self._steps = steps
        self._max_batch = max_batch
        self._version = version
        self._shares = shares
        self._device = self.pool.shape.device
        self._pass_tokens = _PASS_TOKENS[self._device.type]
        self._waiting: list[DecodeRequest] = []
        self._rows: list[DecodeRequest] = []
        self._num_moves = self.pool.num_moves
        self._addresses = model.addresses
        self.counts = Counts()

    @property
    def idle(self) -> bool:
        return not self._rows and not self._waiting

    def add(self, row: DecodeRequest) -> None:
        self._waiting.append(row)

    def advance(self) -> None:
        """Run a pass over prompts, if there are any, then decode one token of every other request."""
        self._drop_cancelled()
        self._admit()
        self._run_prompts()
        self._decode()

    def start_over(self, model: object, version: int) -> None:
        """Use new weights and discard everything that the old ones computed."""
        self.pool.clear()
        for row in self._rows:
            row.num_run, row.region = 0, Region(0, 0)
        self._waiting = [*self._rows, *self._waiting]
        self._rows = []
        self._version = version
        self._model.take_over(model)
        if self._addresses != self._model.addresses:
            self._addresses = self._model.addresses
            self._steps.forget()

    def fail(self, error: EngineError) -> None:
        for row in [*self._rows, *self._waiting]:
            row.fail(error)
        self._rows, self._waiting = [], []

    def _drop_cancelled(self) -> None:
        self._waiting = [row for row in self._waiting if not row.future.cancelled()]
        for row in [row for row in self._rows if row.future.cancelled()]:
            self._leave(row)

    def _leave(self, row: DecodeRequest) -> None:
        self._rows.remove(row)
        self.pool.give_back(row.region)
        row.num_run, row.region = 0, Region(0, 0)

    # Who may join.

    def _admit(self) -> None:
        """Admit waiting requests to the batch and the pool, in the order of their arrival."""
        skipped: list[DecodeRequest] = []
        while self._waiting and len(self._rows) < self._max_batch:
            row = self._waiting.pop(0)
            beginning = self._beginning(row)
            if self._shares and self._being_run(row) > (beginning.length if beginning else 0) + _WORTH_WAITING:
                skipped.append(row)
            elif not self._place(row, beginning):
                skipped.append(row)
                break
        self._waiting = [*skipped, *self._waiting]

    def _beginning(self, row: DecodeRequest) -> Beginning | None:
        if not self._shares:
            return None
        return longest_beginning(row.ids, [*self.pool.finished, *(other.known for other in self._rows)])

    def _being_run(self, row: DecodeRequest) -> int:
        """The tokens it shares with an admitted prompt that are not computed yet."""
        others = (other for other in self._rows if other.num_run < len(other) - 1)
        return max((common_prefix(other.ids, row.ids[:-1]) for other in others), default=0)

    def _place(self, row: DecodeRequest, beginning: Beginning | None) -> bool:
        """Admit a request. Returns False if it does not fit yet."""
        region = self._region_from(row, beginning) if beginning else self.pool.take(row.num_wanted)
        if region is None and not self._rows:  # no other request will free memory, so it gets all there is
            beginning, region = None, self.pool.take(row.num_wanted)
        if region is None:
            if not self._rows:
                row.fail(_no_memory(row))
            return not self._rows
        row.region, row.num_run = region, beginning.length if beginning else 0
        self._rows.append(row)
        return True

    def _region_from(self, row: DecodeRequest, beginning: Beginning) -> Region | None:
        """A region with the cached prefix of a prompt. A finished sequence that continues keeps its own."""
        known, length = beginning.known, beginning.length
        is_finished = any(known is finished for finished in self.pool.finished)
        if is_finished and beginning.whole:
            self.pool.withdraw(known)
            region = self.pool.resize(known.region, length, row.num_wanted)
            if region is None:
                self.pool.keep(known.ids, known.region)
            return region
        if is_finished:
            self.pool.touch(known)
        region = self.pool.take(row.num_wanted, besides=known)
        if region is not None:
            self.pool.copy(known.region, region, length)
        return region

    # What is run.

    def _run_prompts(self) -> None:
        """Run a pass over the tokens of requests that have more than one to compute."""
        room, rows, pieces = self._pass_tokens, list[DecodeRequest](), list[Piece]()
        for row in self._rows:
            if room and len(row) - row.num_run > 1:
                pieces.append(Piece(row.ids[row.num_run :][:room], row.num_run, row.region.start))
                rows.append(row)
                room -= len(pieces[-1].token_ids)
        if not rows:
            return
        start = time.perf_counter()
        packed = pack(pieces, self._device)
        for row, piece in zip(rows, pieces, strict=True):
            row.num_run += len(piece.token_ids)
        ends = np.cumsum([len(piece.token_ids) for piece in pieces]) - 1
        complete = [index for index, row in enumerate(rows) if row.num_run == len(row)]
        logits_NV = self._model.logits(packed, torch.from_numpy(ends[complete]).to(self._device))
        done = [rows[index] for index in complete]
        if done:
            drawn = sample(logits_NV, [row.request.temperature for row in done], [row.random.random() for row in done])
            self._append(done, *drawn)
        self.counts.passes += 1
        self.counts.pass_tokens += self._pass_tokens - room
        self.counts.pass_s += time.perf_counter() - start

    def _decode(self) -> None:
        """Decode one token of each request whose tokens are all computed but the last."""
        ready = [row for row in self._rows if row.num_run == len(row) - 1]
        for row in ready:
            self._make_room(row)
        rows = [row for row in ready if row.region.size]  # making room for one may have preempted another
        if not rows:
            return
        start = time.perf_counter()
        self._forget_steps_if_moved()
        drawn = self._steps.run([_next(row) for row in rows], self._num_shared(rows))
        for row in rows:
            row.num_run += 1
        self._append(rows, *drawn)
        self.counts.steps += 1
        self.counts.step_tokens += len(rows)
        self.counts.step_s += time.perf_counter() - start

    def _num_shared(self, rows: list[DecodeRequest]) -> int:
        """The length of their common prefix if it is worth using, at least one less than each sequence."""
        if not self._shares or self._device.type != "cpu" or len(rows) == 1:
            return 0
        return min(common_prefix(rows[0].ids[:-1], row.ids[:-1]) for row in rows[1:])

    def _make_room(self, row: DecodeRequest) -> None:
        """Make room for its next token, preempting the youngest request, which may be this one."""
        while 0 < row.region.size < len(row):
            if (region := self.pool.resize(row.region, row.num_run, row.num_wanted)) is not None:
                row.region = region
            else:
                youngest = self._rows[-1]
                self._leave(youngest)
                self._waiting.insert(0, youngest)

    def _append(self, rows: list[DecodeRequest], token_ids: list[int], logprobs: list[float]) -> None:
        for row, token_id, logprob in zip(rows, token_ids, logprobs, strict=True):
            row.append(token_id, logprob, self._version)
            if (finish := row.finish) is not None:
                self._rows.remove(row)
                if self._shares:
                    self.pool.keep(row.ids[: row.num_run].copy(), row.region)
                else:
                    self.pool.give_back(row.region)
                row.answer(finish)

    def _forget_steps_if_moved(self) -> None:
        if self.pool.num_moves != self._num_moves:
            self._num_moves = self.pool.num_moves
            self._steps.forget()


def _next(row: DecodeRequest) -> Next:
    return Next(
        token_id=int(row.ids[-1]),
        start=row.region.start,
        length=len(row),
        temperature=row.request.temperature,
        draw=row.random.random(),
    )


def _no_memory(row: DecodeRequest) -> EngineError:
    return EngineError(
        f"there is no memory for the keys and values of a request of {len(row):,} tokens",
        hint="give the engine more with `--engine.kv_cache_gb`, or lower `--trainer.micro_batch_tokens`",
    )
