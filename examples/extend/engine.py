"""An engine of your own: `dockyard train run.toml --engine.type engine:PlainEngine` in this folder.

It samples with plain `transformers`, one request at a time. Replace `_sample` by a call to the server that you use.
"""

import asyncio
from pathlib import Path

import numpy as np
import torch

from dockyard.engine.protocol import EngineSetup, GenerateRequest, Generation
from dockyard.engine.weights import load_model, load_weights
from dockyard.types import Finish


class PlainEngine:
    """Implements `CustomEngine`."""

    def __init__(self, setup: EngineSetup) -> None:  # further arguments are the keys of `engine.kwargs`
        self._model = load_model(setup.model_dir, setup.model)
        self._version = 0
        self._turn = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> Generation:
        async with self._turn:  # other requests and new weights wait
            return await asyncio.to_thread(self._sample, request)

    async def publish(self, folder: Path, version: int) -> None:
        async with self._turn:
            self._model, self._version = load_weights(self._model, folder), version

    async def close(self) -> None:
        del self._model

    @torch.no_grad()
    def _sample(self, request: GenerateRequest) -> Generation:
        random = torch.Generator(self._model.device).manual_seed(request.seed)
        new = torch.from_numpy(request.prompt_ids).long()[None].to(self._model.device)
        cache, ids, logprobs = None, [], []
        while len(ids) < request.max_new_tokens and not (ids and ids[-1] in request.stop_ids):
            output = self._model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            scores = torch.log_softmax(output.logits[0, -1].float() / (request.temperature or 1.0), dim=-1)
            new = torch.multinomial(scores.exp(), 1, generator=random) if request.temperature else scores.argmax()
            new = new.view(1, 1)
            ids.append(int(new))
            logprobs.append(float(scores[ids[-1]]))
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=np.full(len(ids), self._version, np.int32),
            finish=Finish.STOP if ids[-1] in request.stop_ids else Finish.LENGTH,
        )
