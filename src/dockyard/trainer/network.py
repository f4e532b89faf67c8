"""The torch model of a policy: adapters over frozen weights, and forward passes over packed rows.

Logits over the vocabulary exist only for a few tokens at a time, forward and backward.
"""

import copy
import gc
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn.functional import linear

from dockyard.config import TrainerConfig
from dockyard.engine.weights import other_attention, worth_compiling
from dockyard.errors import DockyardError
from dockyard.rl.pack import Example, PackedRow, pack
from dockyard.rl.trees import Tree
from dockyard.trainer import attention
from dockyard.trainer.attention import wide
from dockyard.trainer.kernels import rounded_up
from dockyard.trainer.layers import Keep, Layers
from dockyard.trainer.memory import gradient_bytes
from dockyard.types import IntArray

_CHUNK = 2048
"""Tokens whose logits exist at the same time."""
_CPU_CHUNK = 128
"""The same on a CPU, where this many logits fit in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Statistics of each trained token, at the temperature it was sampled with."""

    logprobs_N: Tensor
    entropy_N: Tensor
    """The entropy of the distribution it was sampled from."""
    likeliest_N: Tensor
    """Whether it was the most likely token."""


class Lora(lora.Linear):
    """PEFT's layer, with adapters in float32 that are multiplied in the model's own number format.

    PEFT would cast every activation to float32, which takes a third of an update's time and has no benefit.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shape = x.shape[:-1]
        if x.device.type == "cpu":
            x = x.flatten(0, -2)  # one matrix, so that adapters can be added to its product in place
        out = self.base_layer(x, *args, **kwargs)
        if not self.disable_adapters and not self.merged:
            for name in self.active_adapters:
                matrices: tuple[Any, Any] = self.lora_A[name], self.lora_B[name]
                down, up = (matrix.weight.to(x.dtype) for matrix in matrices)
                out = _plus_product(out, linear(x, down), up, self.scaling[name])
        return out if out.shape[:-1] == shape else out.unflatten(0, shape)


def _plus_product(out: Tensor, x: Tensor, weight: Tensor, scaling: float) -> Tensor:
    """`out + scaling * linear(x, weight)`. In place on a CPU, where passes over memory cost as much as the product."""
    if out.device.type == "cpu":
        return out.addmm_(x, weight.t(), alpha=scaling)
    return out + linear(x, weight) * scaling


def with_adapters(base: Any, trainer: TrainerConfig) -> Any:
    """The frozen base model with LoRA adapters on its linear layers, except the experts of a mixture."""
    head = base.get_output_embeddings()
    linears = {name for name, module in base.named_modules() if isinstance(module, nn.Linear) and module is not head}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        model = _adapted(base, trainer, {name.rpartition(".")[2] for name in linears})
    config = model.peft_config["default"]
    # If experts have matrices with the names of linear layers, PEFT applies those names to the experts.
    return _adapted(model.unload(), trainer, config.target_modules) if config.target_parameters else model


def _adapted(base: Any, trainer: TrainerConfig, targets: Iterable[str]) -> Any:
    config = LoraConfig(
        r=trainer.lora_r,
        lora_alpha=trainer.lora_alpha,
        target_modules=sorted(targets),
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: Lora})
    return get_peft_model(base, config)


class Network:
    """The torch model of a policy."""

    def __init__(self, base: Any, trainer: TrainerConfig, *, with_reference: bool = True) -> None:
        """`with_reference`: full training, which has no adapters to disable, keeps a copy of the base model."""
        full = trainer.method == "full"
        self._frozen: Network | None = None
        if full and with_reference:
            self._frozen = Network(copy.deepcopy(base), trainer, with_reference=False)
            self._frozen.model.requires_grad_(False)
        with _explained(base.config.model_type):
            self.model: Any = base.requires_grad_() if full else with_adapters(base, trainer)
        self.model.eval()  # with dropout, logprobs would differ from the engine's
        self._decoder: Any = base.get_decoder()
        self._head: Any = base.get_output_embeddings()
        with _explained(base.config.model_type):
            alone = [self._own_logits(example) for example in _FORK]
            base.set_attn_implementation(attention.NAME)
            self._check_head()
            _refuse_windows(base.config.get_text_config())
            self._check_rows(torch.cat(alone))
        self._on_gpu = self.model.device.type == "cuda"
        self._compiled = trainer.compile and worth_compiling(self.model)
        self._layers = Layers(
            self._decoder.layers,
            compiled=self._compiled,
            levels=_levels(trainer, on_gpu=self._on_gpu, compiled=self._compiled),
            head_bytes=_chunk(self._head.weight) * self._head.weight.shape[0] * (8 if self._on_gpu else 24),
            gradient_bytes=gradient_bytes(self.model) if full else 0,
        )

    @property
    def trained(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @contextmanager
    def prefix(self, token_ids: IntArray, longest_row: int) -> Generator["PrefixPass | None"]:
        """Run a pass over the prefix of a tree's rows; None if there is no prefix.

        It leaves enough memory for the longest of the rows to keep all of its activations.
        """
        if not len(token_ids):
            yield None
            return
        with attention.open_prefix(len(token_ids)) as keys_values:
            padded = _Padded.of(_sequence(token_ids), self.model.device, keys_values, computes_prefix=True)
            self._layers.reserved_tokens = longest_row
            try:
                hidden_PD = self._hidden(padded)[: len(token_ids)]
            finally:
                self._layers.reserved_tokens = 0
            yield PrefixPass(keys_values, hidden_PD)

    def scores(self, row: PackedRow, temperature: float, prefix: "PrefixPass | None" = None) -> TokenScores:
        """The statistics of a row's trained tokens."""
        device = self.model.device
        hidden_TD = self._hidden(_Padded.of(row, device, prefix and prefix.keys_values))
        if prefix:
            hidden_TD = torch.cat([prefix.hidden_PD, hidden_TD])
        sources_N = torch.from_numpy(row.sources).long().to(device)
        targets_N = torch.from_numpy(row.targets).long().to(device)
        logprobs_N, entropy_N, likeliest_N = _Head.apply(
            hidden_TD[sources_N], self._head.weight, targets_N, temperature, self._compiled
        )
        return TokenScores(logprobs_N=logprobs_N, entropy_N=entropy_N, likeliest_N=likeliest_N)

    def reference(self, tree: Tree, temperature: float) -> list[Tensor]:
        """The logprobs of each row's trained tokens under the base model: with adapters disabled, or by its copy."""
        with torch.no_grad(), nullcontext() if self._frozen else self.model.disable_adapter():
            return (self._frozen or self)._logprobs(tree, temperature)

    def _logprobs(self, tree: Tree, temperature: float) -> list[Tensor]:
        with self.prefix(tree.prefix, 0) as prefix:
            return [self.scores(row, temperature, prefix).logprobs_N for row in tree.rows]

    def save_memory(self) -> bool:
        """After running out of GPU memory: keep fewer activations. Returns False if there is nothing to save."""
        if not self._on_gpu:
            return False
        gc.collect()
        torch.cuda.empty_cache()
        self._layers.be_careful()
        return True

    def _hidden(self, padded: "_Padded") -> Tensor:
        embedded_1TD = self._decoder.get_input_embeddings()(padded.token_ids_1T)
        if torch.is_grad_enabled() and not embedded_1TD.requires_grad:
            embedded_1TD.requires_grad_()  # otherwise the first layer would be compiled separately
        return self._decoder(
            inputs_embeds=embedded_1TD,
            position_ids=padded.positions_1T,
            attention_mask=None,
            use_cache=False,
            **padded.layout.arguments,
        ).last_hidden_state[0]

    def _check_head(self) -> None:
        """Refuse models that scale or cap the logits of their head, which would be trained incorrectly."""
        device = self.model.device
        ids_1T = torch.arange(8, device=device)[None]
        row = _Padded(ids_1T, ids_1T, attention.RowLayout.one_sequence(8))
        with torch.no_grad():
            plain = self.model(
                input_ids=ids_1T, position_ids=ids_1T, attention_mask=None, use_cache=False, **row.layout.arguments
            ).logits[0]
            ours = linear(self._hidden(row), self._head.weight)
        if not torch.allclose(plain.float(), ours.float(), rtol=0.05, atol=0.05):
            raise DockyardError(
                f"`{self.model.config.model_type}` does more to its logits than a matrix product, which is not trained",
                hint="choose a model of another family",
            )

    def _own_logits(self, example: Example) -> Tensor:
        """The logits that the model family's own code computes."""
        ids_1T = torch.from_numpy(example.token_ids).long().to(self.model.device)[None]
        with torch.no_grad():
            return self.model(input_ids=ids_1T, use_cache=False).logits[0, :-1]

    def _check_rows(self, alone_NV: Tensor) -> None:
        """Refuse model families whose layers do not pass on the row's layout, or that attend differently."""
        [row] = pack(_FORK, 64)
        with torch.no_grad(), attention.watched() as calls:
            hidden_TD = self._hidden(_Padded.of(row, self.model.device))
            packed_NV = linear(hidden_TD[torch.from_numpy(row.sources).long()], self._head.weight)
        understood = len(calls) == len(self._decoder.layers) and all(calls)
        if self.model.dtype in (torch.float32, torch.float64):  # exact enough for a comparison
            distance = (packed_NV - alone_NV).abs().mean() / alone_NV.std()
            understood = understood and float(distance) < _SAME_LOGITS
        if not understood:
            raise DockyardError(
                f"`{self.model.config.model_type}` attends in a way that is not trained: several sequences in a row "
                "would see each other",
                hint="choose a model of another family",
            )


class PrefixPass:
    """The results of a pass over the prefix that the rows of a tree have in common."""

    def __init__(self, keys_values: attention.PrefixKV, hidden_PD: Tensor) -> None:
        self.keys_values = keys_values
        self.hidden_PD = hidden_PD.detach().requires_grad_(hidden_PD.requires_grad)
        """What rows use. Their gradients stop here."""
        self._computed_PD = hidden_PD

    def grads(self, asked_PD: Tensor, trained: list[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of the trained weights from those of `hidden_PD`, and of keys and values that rows left."""
        return torch.autograd.grad(self._computed_PD, trained, asked_PD, materialize_grads=True)


def _sequence(token_ids: IntArray) -> PackedRow:
    """A row of one sequence without trained tokens."""
    num = len(token_ids)
    none, no_numbers = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
    return PackedRow(
        token_ids=token_ids,
        positions=np.arange(num, dtype=np.int32),
        ends=np.full(num, num, dtype=np.int32),
        sources=none,
        targets=none,
        old_logprobs=no_numbers,
        advantages=no_numbers,
        weights=no_numbers,
        segments=none,
    )


@dataclass(frozen=True, slots=True)
class _Padded:
    """A row as the model takes it. On a GPU it is padded to one of a few lengths."""

    token_ids_1T: Tensor
    positions_1T: Tensor
    layout: attention.RowLayout

    @classmethod
    def of(
        cls,
        row: PackedRow,
        device: torch.device,
        prefix: attention.PrefixKV | None = None,
        *,
        computes_prefix: bool = False,
    ) -> Self:
        num = len(row.token_ids)
        spare = rounded_up(num) - num if device.type == "cuda" else 0
        blocks = attention.blocks_of(row.positions, row.ends)
        blocks[-1, [1, 3]] += spare  # the causal block of the last run: no token sees the padding behind it
        return cls(
            torch.from_numpy(np.pad(row.token_ids, (0, spare))).long().to(device)[None],
            torch.from_numpy(np.pad(row.positions, (0, spare))).long().to(device)[None],
            attention.RowLayout.of(blocks, prefix, computes_prefix=computes_prefix),
        )


class _Head(torch.autograd.Function):
    """Logprobs from hidden states, in chunks of tokens.

    The backward pass recomputes the logits of each chunk. On a CPU, where that is a third of the work, it does not need
    to if the head is frozen: the gradient of a hidden state is that of its logprob times a vector that the forward pass
    computes.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float, fused: bool
    ) -> Any:
        statistics = _fused_statistics if fused else _statistics
        ctx.temperature = temperature
        ctx.slope = _fused_slope if fused else _slope
        at_once = hidden_ND.device.type == "cpu" and ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        parts: list[tuple[Tensor, ...]] = []
        slopes: list[Tensor] = []
        size = _chunk(hidden_ND)
        for hidden, targets in zip(hidden_ND.split(size), targets_N.split(size), strict=True):
            logits_CV = linear(hidden, weight_VD)
            parts.append(statistics(logits_CV, targets, temperature))
            if at_once:
                lse_C = parts[-1][1]
                slopes.append(ctx.slope(logits_CV, targets, lse_C, torch.ones_like(lse_C), temperature) @ weight_VD)
        logprobs_N, lse_N, entropy_N, likeliest_N = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, lse_N, torch.cat(slopes) if at_once else None)
        ctx.mark_non_differentiable(entropy_N, likeliest_N)
        return logprobs_N, entropy_N, likeliest_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_N = grads[0]
        hidden_ND, weight_VD, targets_N, lse_N, slopes_ND = ctx.saved_tensors
        if slopes_ND is not None:
            return (slopes_ND * grad_N[:, None]).to(hidden_ND.dtype), None, None, None, None
        size = _chunk(hidden_ND)
        columns = zip(*(x.split(size) for x in (hidden_ND, targets_N, lse_N, grad_N)), strict=True)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(wide(weight_VD)) if ctx.needs_input_grad[1] else None
        for out, (hidden, targets, lse, grad) in zip(grad_hidden_ND.split(size), columns, strict=True):
            logits_CV = linear(hidden, weight_VD)
            grad_CV = ctx.slope(logits_CV, targets, lse, grad, ctx.temperature)
            torch.mm(grad_CV, weight_VD, out=out)
            if grad_weight_VD is not None:
                grad_weight_VD += grad_CV.T @ hidden
        return grad_hidden_ND, grad_weight_VD, None, None, None


def _chunk(x: Tensor) -> int:
    return min(_CHUNK, _CPU_CHUNK) if x.device.type == "cpu" else _CHUNK


def _statistics(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, ...]:
    scaled_CV = wide(logits_CV) / temperature
    lse_C = scaled_CV.logsumexp(-1)
    logprobs_C = scaled_CV.gather(1, targets_C[:, None])[:, 0] - lse_C
    entropy_C = lse_C - ((scaled_CV - lse_C[:, None]).exp() * scaled_CV).sum(-1)
    return logprobs_C, lse_C, entropy_C, scaled_CV.argmax(-1) == targets_C


def _slope(logits_CV: Tensor, targets_C: Tensor, lse_C: Tensor, grad_C: Tensor, temperature: float) -> Tensor:
    """The gradient of the logits, given that of the logprobs."""
    drawn_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    probabilities_CV = (wide(logits_CV) / temperature - lse_C[:, None]).exp()
    slope_CV = torch.where(drawn_CV, 1 - probabilities_CV, -probabilities_CV)
    return (slope_CV * (grad_C[:, None] / temperature)).to(logits_CV.dtype)


_fused_statistics: Any = torch.compile(_statistics, dynamic=True)
_fused_slope: Any = torch.compile(_slope, dynamic=True)
"""Compiled into one kernel each on a GPU, where separate passes over the vocabulary would dominate."""


@contextmanager
def _explained(family: str) -> Generator[None]:
    """Turn the various errors of unsupported model families into one message."""
    try:
        yield
    except (DockyardError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        raise DockyardError(
            f"`{family}` cannot be trained here: {type(error).__name__}: {error}",
            hint="choose a model of another family",
        ) from error


def _sampled(*token_ids: int) -> Example:
    """An example whose tokens are all trained but the first."""
    targets = np.arange(1, len(token_ids), dtype=np.int32)
    return Example(
        token_ids=np.array(token_ids, np.int32), targets=targets, old_logprobs=None, advantage=1.0, weight=1.0
    )


_FORK = (_sampled(3, 5, 2, 7, 1, 6, 4), _sampled(3, 5, 2, 8, 6, 0))
"""Sequences with a common prefix, in the order of a row."""
_SAME_LOGITS = 0.01
"""The largest mean difference, in standard deviations of the logits."""


def _levels(trainer: TrainerConfig, *, on_gpu: bool, compiled: bool) -> list[Keep]:
    """What layers may keep, from most to least."""
    if not on_gpu:
        return [Keep.EVERYTHING, Keep.NOTHING]
    between = [Keep.PRODUCTS, Keep.ATTENTION] if compiled else []
    last = [Keep.OFFLOADED] if trainer.offload else []
    return [Keep.EVERYTHING, *between, Keep.NOTHING, *last]


def _refuse_windows(config: Any) -> None:
    """Refuse sliding windows and recurrent states: rows support full attention only."""
    if kinds := other_attention(config):
        raise DockyardError(
            f"only full attention is trained; `{config.model_type}` has {', '.join(kinds)}",
            hint="choose a model without sliding or linear attention layers",
        )
