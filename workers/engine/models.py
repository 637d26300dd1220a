"""The models that the engines run, over Hugging Face models: log-probabilities and values of response tokens."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from config.schema import FSDPConfig
from trainer.errors import ConfigError, first_line
from trainer.ppo.core_algos import entropy_from_logits, log_prob_from_logits
from trainer.ppo.limiters import LogitGeometry, logit_geometry
from workers.engine.chunked import LanguageModelHead, figures_in_chunks

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

# What transformers raises: no class for this kind of model; no weights; weights of another shape; a file that is cut short.
LOAD_ERRORS = (ValueError, OSError, RuntimeError, SafetensorError)
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of a weight file, in its fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """Folders of a policy's LoRA adapters, in peft's format."""

    path: str  # the one that is trained, as it stands
    reference: str | None  # the frozen one of the reference; None: the reference has none, or there is no reference


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """Which weights a policy starts from, and the tokens that end and pad a response."""

    path: str
    eos_token_ids: list[int]
    pad_token_id: int
    adapter: AdapterSpec | None = None  # with LoRA, on the frozen weights of `path`


def load_model(
    kind: type, path: str, *, dtype: torch.dtype, override_config: dict[str, Any], trust_remote_code: bool, **extra: Any
) -> Any:
    """A Hugging Face model on the CPU, in evaluation mode: dropout is off for good, gradients flow all the same.

    `kind` is an Auto class. The weights keep `dtype`, whatever the file holds.

    Raises:
        ConfigError: the folder has no such model, or one that cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **override_config, **extra)
        attention = attention_of(config)
        model = kind.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    except LOAD_ERRORS as error:
        raise ConfigError(f"{path}: cannot be loaded with {kind.__name__}: {first_line(error)}") from None
    return model.eval()


def weights_fingerprint(folder: str) -> str:
    """A hash over the sizes and over samples of a model's weight files: milliseconds at any size."""
    digest = hashlib.sha256()
    for path in sorted(file for kind in ("*.safetensors", "*.bin") for file in Path(folder).glob(kind)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(sample * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def attention_of(config: Any) -> str:
    """The implementation that computes a model's attention rightly: sdpa passes over a soft cap (Gemma 2) without a word."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"


def master_dtype(config: FSDPConfig) -> torch.dtype:
    """The precision of a model's weights, whatever they are computed in."""
    return torch.float64 if config.dtype == "float64" else torch.float32


class PolicyOutput(NamedTuple):
    """What a policy says of the labels; all [b, T]."""

    log_prob: Tensor  # nats
    entropy: Tensor | None  # nats
    geometry: LogitGeometry | None  # for the limiters' pushes; no gradient


def at_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """The columns `positions` [b, T] of hidden [b, L, D]."""
    return hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


class PolicyModel(nn.Module):
    """A causal language model that returns log-probabilities and entropies of given tokens, not logits.

    Only the hidden states that predict a response token reach the output layer, by a hook on its input; all that the
    model does to the logits afterwards (scaling, capping) stays. With a chunk size, in tokens, whole logits never exist.
    """

    def __init__(self, model: Any, *, logits_chunk_size: int | None = None) -> None:
        super().__init__()
        self.model = model
        self._positions: Tensor | None = None
        self._chunk_size = logits_chunk_size
        self._head = None if logits_chunk_size is None else LanguageModelHead(model)
        model.get_output_embeddings().register_forward_pre_hook(self._select_positions)

    @classmethod
    def load(cls, path: str, *, logits_chunk_size: int | None = None, **kwargs: Any) -> "PolicyModel":
        """From a Hugging Face folder; the other arguments are those of `load_model`."""
        return cls(load_model(AutoModelForCausalLM, path, **kwargs), logits_chunk_size=logits_chunk_size)

    def _select_positions(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._head is not None:
            return args
        hidden, *rest = args
        assert self._positions is not None
        return (at_positions(hidden, self._positions), *rest)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        labels: Tensor,
        temperature: float,
        *,
        with_entropy: bool = False,
        with_geometry: bool = False,
    ) -> PolicyOutput:
        """Log-probability of the labels [b, T] in nats at the temperature, and what else is asked for.

        input_ids [b, L] right-padded; positions [b, T] the columns whose output predicts the labels.
        """
        if self._head is not None and self._chunk_size is not None:
            hidden = at_positions(self._head.hidden(input_ids), positions)
            figures = figures_in_chunks(
                self._head,
                hidden.flatten(0, 1),
                labels.flatten(),
                temperature,
                chunk_size=self._chunk_size,
                with_entropy=with_entropy,
                with_geometry=with_geometry,
            )
            # Cloned, since FSDP2 hooks the backward of what its modules return, which is unsafe for views.
            log_prob, _, entropy, others, geometry_entropy = (
                None if figure is None else figure.view(labels.shape).clone() for figure in figures
            )
            assert log_prob is not None
            return PolicyOutput(log_prob, entropy, None if others is None else LogitGeometry(others, geometry_entropy))
        self._positions = positions
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        geometry = None
        if with_geometry:
            geometry = logit_geometry(logits.detach(), labels, temperature, with_entropy=with_entropy)
        return PolicyOutput(
            log_prob=log_prob_from_logits(logits, labels, temperature),
            entropy=entropy_from_logits(logits, temperature) if with_entropy else None,
            geometry=geometry,
        )


class ValueModel(nn.Module):
    """A transformer with a one-number head: the value of the state before each response token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @classmethod
    def load(cls, path: str, **kwargs: Any) -> "ValueModel":
        """From a Hugging Face folder of either kind: a causal model gets a new head, a saved critic keeps its own."""
        return cls(load_model(AutoModelForTokenClassification, path, num_labels=1, **kwargs))

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Values [b, T] float32 at the columns `positions` [b, T] of input_ids [b, L]."""
        values = self.model(input_ids=input_ids, use_cache=False).logits.squeeze(-1)
        values = values.gather(1, positions)
        return values.to(torch.promote_types(values.dtype, torch.float32))
