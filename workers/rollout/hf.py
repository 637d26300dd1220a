"""The `hf` back end: decodes with a key-value cache over a full copy of the transformers model on each device.

No collective happens while it decodes, so devices may take different numbers of rows and stop at different lengths.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from workers.rollout.sampling import RowStream, SamplingParams, sample_tokens


class Responses(NamedTuple):
    """Right-padded responses of B rows, R the longest allowed."""

    tokens: Tensor  # [B, R] int64
    mask: Tensor  # [B, R] bool, up to and including the first end token
    log_probs: Tensor  # [B, R] float32, of the sampled tokens; 0 under mask 0


def response_mask(responses: Tensor, eos_token_ids: Iterable[int]) -> Tensor:
    """True up to and including the first end token of any kind: [B, R] bool. Never derived from the padding token."""
    ended = torch.isin(responses, torch.tensor(list(eos_token_ids), device=responses.device))
    return ended.cumsum(-1) - ended.long() == 0


class HFRollout:
    """A model in the sampler's precision and the loop that decodes with it."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        eos_token_ids: list[int],
        pad_token_id: int,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        self.model = model.to(device)
        self.eos_token_ids = torch.tensor(eos_token_ids, device=device)
        self.pad_token_id = pad_token_id
        self.max_num_seqs = max_num_seqs
        self.device = device

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the trainer's weights in, by name; each is rounded to the sampler's precision."""
        own = dict(self.model.named_parameters())
        for name, value in weights:
            own.pop(name).copy_(value)
        assert not own, f"weights not received: {sorted(own)}"

    @torch.inference_mode()
    def generate(
        self, prompts: Tensor, prompt_mask: Tensor, rows: RowStream, *, params: SamplingParams, max_tokens: int
    ) -> Responses:
        """One response per row. prompts [B, P] left-padded."""
        uniform = rows.uniform(max_tokens)
        num_rows = len(prompts)
        tokens = torch.full((num_rows, max_tokens), self.pad_token_id, dtype=torch.long)
        log_probs = torch.zeros(num_rows, max_tokens)
        for start in range(0, num_rows, self.max_num_seqs):
            chunk = slice(start, start + self.max_num_seqs)
            self._decode(prompts[chunk], prompt_mask[chunk], uniform[chunk], params, tokens[chunk], log_probs[chunk])
        mask = response_mask(tokens, self.eos_token_ids.tolist())
        return Responses(tokens, mask, log_probs.where(mask, 0.0))

    def _decode(
        self,
        prompts: Tensor,
        prompt_mask: Tensor,
        uniform: Tensor,
        params: SamplingParams,
        tokens: Tensor,
        log_probs: Tensor,
    ) -> None:
        """Fill tokens and log_probs [b, R] in place; rows that have ended leave the batch when half of it has."""
        first = int(prompt_mask.int().argmax(-1).min())  # columns that are padding in all rows are left out
        prompts, prompt_mask = prompts[:, first:].to(self.device), prompt_mask[:, first:].to(self.device)
        cache = DynamicCache()
        logits, mask, next_position = self._prefill(prompts, prompt_mask, cache)
        rows = torch.arange(len(tokens))  # of the chunk, those still in the batch
        ended = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        for t in range(tokens.shape[1]):
            token, log_prob = sample_tokens(logits, uniform[rows, t], params)
            running = ~ended.cpu()
            tokens[rows[running], t] = token.cpu()[running]
            log_probs[rows[running], t] = log_prob.cpu()[running]
            ended |= torch.isin(token, self.eos_token_ids)
            if t + 1 == tokens.shape[1] or bool(ended.all()):
                return
            if int(ended.sum()) * 2 >= len(ended):
                keep = (~ended).nonzero().squeeze(-1)
                cache.batch_select_indices(keep)
                token, mask, next_position, ended = token[keep], mask[keep], next_position[keep], ended[keep]
                rows = rows[keep.cpu()]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = self._forward(token.unsqueeze(-1), mask, next_position, cache)
            next_position = next_position + 1

    def _prefill(self, prompts: Tensor, prompt_mask: Tensor, cache: DynamicCache) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the first token, mask and next position per row; a prompt repeated row after row runs once."""
        both, repeats = torch.unique_consecutive(
            torch.cat([prompts, prompt_mask.long()], 1), dim=0, return_inverse=True
        )
        unique_prompts, unique_mask = both.chunk(2, dim=1)
        positions = (unique_mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(unique_prompts, unique_mask, positions, cache)
        cache.batch_select_indices(repeats)
        return logits[repeats], unique_mask[repeats], positions[repeats, -1:] + 1

    def _forward(self, input_ids: Tensor, mask: Tensor, position_ids: Tensor, cache: DynamicCache) -> Tensor:
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
