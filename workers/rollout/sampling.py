"""Sampling of tokens from logits with given uniform numbers, so that nothing depends on a global generator."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TRAIN, VALIDATION = 0, 1  # the two streams of random numbers of a (seed, step)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy; top_k below 1, top_p 1 and min_p 0 are off."""

    temperature: float
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """How a batch's prompts are answered, besides the prompts. `stream` is TRAIN or VALIDATION."""

    params: SamplingParams
    max_tokens: int
    seed: int
    step: int
    stream: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStream:
    """The random numbers of B responses, each a function of (seed, step, stream, prompt, sample) alone.

    `stream` keeps validation's numbers apart from training's. The order or the company of rows changes nothing.
    """

    seed: int
    step: int
    stream: int
    prompt_index: Sequence[int]
    sample_index: Sequence[int]

    def sequences(self) -> Iterator[np.random.SeedSequence]:
        """The seed of each row."""
        for prompt, sample in zip(self.prompt_index, self.sample_index, strict=True):
            yield np.random.SeedSequence([self.seed, self.step, self.stream, prompt, sample])

    def uniform(self, num_tokens: int) -> Tensor:
        """Numbers in [0, 1), one per response token: [B, num_tokens] float64."""
        rows = [np.random.Generator(np.random.Philox(sequence)).random(num_tokens) for sequence in self.sequences()]
        return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, num_tokens)))

    def seeds(self) -> list[int]:
        """One 63-bit seed per row, for an engine with generators of its own."""
        return [int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)) for sequence in self.sequences()]


def sample_tokens(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-probability in nats under the distribution that it was drawn from.

    logits [B, V]; uniform [B] float64. The distribution is softmax(logits / temperature), cut by top-k, then top-p, then
    min-p, and renormalised. Greedy: the likeliest token, with its log-probability at temperature 1.
    """
    logits = logits.float()
    if params.greedy:
        token = logits.argmax(-1)
        return token, torch.log_softmax(logits, -1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    log_p = torch.log_softmax(_cut(logits / params.temperature, params), -1)
    cdf = log_p.double().exp().cumsum(-1)
    total = cdf[:, -1:]
    # Strictly below the total, or rounding could pick a token of probability 0 at the end.
    target = torch.minimum(
        uniform.unsqueeze(-1).to(cdf.device) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    token = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    return token, log_p.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _cut(logits: Tensor, params: SamplingParams) -> Tensor:
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if params.top_p < 1:
        ordered, index = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        # A token goes if those before it reach top_p already; the first one always stays.
        gone = p.cumsum(-1) - p >= params.top_p
        logits = logits.masked_fill(torch.zeros_like(gone).scatter(-1, index, gone), float("-inf"))
    if params.min_p > 0:
        p = logits.softmax(-1)
        logits = logits.masked_fill(p < params.min_p * p.amax(-1, keepdim=True), float("-inf"))
    return logits
