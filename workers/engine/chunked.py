"""Log-probabilities, entropies and the limiters' sums from hidden states, a chunk of tokens at a time.

Logits of a piece are [tokens, vocabulary], and softmax and gradient as many numbers again: with a vocabulary of 49,152
far more than a small model's weights. Here a chunk's logits live until its figures are taken, and backward makes them
once more, so that what is kept is [tokens, hidden].
"""

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.ppo.limiters import geometry_of_, rows_in_cache, shifted_softmax_


class LanguageModelHead:
    """A causal language model in two parts: its body, and all that it does to the body's output to make logits.

    The second part is the model's own forward with a body that answers at once, so that scaling, capping and adapters of
    any model stay what they are. It must treat each token by itself.

    Raises:
        ConfigError: the model has no body of its own.
    """

    def __init__(self, model: Any) -> None:
        self.model: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # under peft's wrapper
        self.body: nn.Module = self.model.base_model
        if self.body is self.model:
            raise self._unfit("has no body apart from its output layer")
        self._answer: Any = None  # the type of the body's output

    def hidden(self, input_ids: Tensor) -> Tensor:
        """What the body says of input_ids [b, L]: [b, L, D]."""
        output = self.body(input_ids=input_ids, use_cache=False)
        self._answer = type(output)
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, D]; after `hidden`."""
        with self._body_answers(hidden.unsqueeze(0)) as answers:
            no_tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits = self.model(input_ids=no_tokens, use_cache=False).logits
        if len(answers) != 1:
            raise self._unfit(f"calls its body {len(answers)} times")
        return logits.squeeze(0)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters outside of the body, and those that it shares with the output layer: all that logits can need."""
        inside = set(self.body.modules())
        outside = [module for module in self.model.modules() if module not in inside]
        return list({id(p): p for module in outside for p in module.parameters(recurse=False)}.values())

    @contextlib.contextmanager
    def _body_answers(self, hidden: Tensor) -> Iterator[list[None]]:
        """Inside, the body gives `hidden` without running; the list grows by one at each of its calls."""
        calls: list[None] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return self._answer(last_hidden_state=hidden)

        own = self.body.__dict__.get("forward")  # where something else has replaced the class's
        self.body.forward = forward
        try:
            yield calls
        finally:
            del self.body.forward
            if own is not None:
                self.body.forward = own

    def _unfit(self, what: str) -> ConfigError:
        return ConfigError(
            f"actor_rollout_ref.model.logits_chunk_size: {type(self.model).__name__} {what}, so its logits cannot be made "
            "in chunks of tokens; set it to null"
        )


class TokenFigures(NamedTuple):
    """Figures of each token, all [n], in float32 at least; None for what was not asked for."""

    log_prob: Tensor  # nats
    log_sum: Tensor  # log of the sum over the vocabulary of exp(logits / temperature)
    entropy: Tensor | None  # nats
    others: Tensor | None  # LogitGeometry.others
    geometry_entropy: Tensor | None  # LogitGeometry.entropy


def figures_in_chunks(
    head: LanguageModelHead,
    hidden: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    chunk_size: int,
    with_entropy: bool,
    with_geometry: bool,
) -> TokenFigures:
    """Figures of the labels [n] after hidden states [n, D], `chunk_size` tokens at a time.

    Log-probability and entropy carry the gradient, to the hidden states and the head's parameters.
    """
    out = _ChunkedFigures.apply(
        head, hidden, labels, temperature, chunk_size, with_entropy, with_geometry, *head.parameters()
    )
    return TokenFigures(*out)  # pyright: ignore[reportGeneralTypeIssues]


def chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    """As few chunks of at most `chunk_size` as there can be, of even sizes: a short last one would be slow for its tokens."""
    count = -(-num_tokens // chunk_size)
    edges = [num_tokens * index // count for index in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(edges)]


def token_figures(
    logits: Tensor, labels: Tensor, temperature: float, *, with_entropy: bool, with_geometry: bool
) -> TokenFigures:
    """Figures of the labels [n] under softmax(logits / temperature), logits [n, V], in one pass.

    With u the scaled logits less their maximum and Z = Σ exp(u): log p_y = u_y - log Z, and H = log Z - Σ p u, in which
    no two large numbers cancel. The sums of the limiters are those of `logit_geometry`.
    """
    size = rows_in_cache(logits)
    parts = [
        _figures_of_rows(*rows, temperature, with_entropy=with_entropy, with_geometry=with_geometry)
        for rows in zip(logits.split(size), labels.split(size), strict=True)
    ]
    return join(parts)


def join(parts: list[TokenFigures]) -> TokenFigures:
    """The figures of consecutive tokens, put together."""
    columns = (None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True))
    return TokenFigures(*columns)  # pyright: ignore[reportArgumentType]


def _figures_of_rows(
    logits: Tensor, labels: Tensor, temperature: float, *, with_entropy: bool, with_geometry: bool
) -> TokenFigures:
    scaled, labels = _scaled(logits, temperature), labels.unsqueeze(-1)
    chosen = scaled.gather(-1, labels).squeeze(-1)
    softmax = shifted_softmax_(scaled)
    top, log_z = softmax.top.squeeze(-1), softmax.z.log()
    mean = softmax.mean() if with_entropy else None
    others, geometry_entropy = geometry_of_(softmax, labels, mean) if with_geometry else (None, None)
    return TokenFigures(
        log_prob=chosen - top - log_z,
        log_sum=top + log_z,
        entropy=None if mean is None else log_z - mean,
        others=others,
        geometry_entropy=geometry_entropy,
    )


def logit_gradient(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    figures: TokenFigures,
    d_log_prob: Tensor,
    d_entropy: Tensor | None,
) -> Tensor:
    """The loss's gradient at logits [n, V], from its derivatives [n] by log-probability and entropy.

    d log p_y / d z_j = ([j = y] - p_j) / T and dH / d z_j = -p_j (log p_j + H) / T.
    """
    out = torch.empty_like(logits)
    for start in range(0, len(logits), size := rows_in_cache(logits)):
        rows = slice(start, start + size)
        # -inf to a number, whose exponential is 0: else 0 · inf.
        log_p = _scaled(logits[rows], temperature).sub_(figures.log_sum[rows, None]).clamp_(min=-1000.0)
        p = log_p.exp()
        weight = d_log_prob[rows, None]
        if d_entropy is not None and figures.entropy is not None:
            weight = log_p.add_(figures.entropy[rows, None]).mul_(d_entropy[rows, None]).add_(weight)
        gradient = p.mul_(weight).neg_().scatter_add_(-1, labels[rows, None], d_log_prob[rows, None])
        out[rows] = gradient.div_(temperature)
    return out


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


class _ChunkedFigures(torch.autograd.Function):
    """`figures_in_chunks`; the head's parameters are arguments so that autograd brings their gradients home."""

    @staticmethod
    def forward(
        ctx: Any,
        head: LanguageModelHead,
        hidden: Tensor,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
        with_geometry: bool,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor | None, ...]:
        parts = [
            token_figures(head.logits(h), y, temperature, with_entropy=with_entropy, with_geometry=with_geometry)
            for h, y in ((hidden[rows], labels[rows]) for rows in chunks(len(hidden), chunk_size))
        ]
        figures = join(parts)
        ctx.head, ctx.temperature, ctx.chunk_size = head, temperature, chunk_size
        ctx.save_for_backward(hidden, labels, figures.log_prob, figures.log_sum, figures.entropy)
        constants = [x for x in (figures.log_sum, figures.others, figures.geometry_entropy) if x is not None]
        ctx.mark_non_differentiable(*constants)
        ctx.set_materialize_grads(False)
        return tuple(figures)

    @staticmethod
    def backward(ctx: Any, d_log_prob: Tensor | None, _: None, d_entropy: Tensor | None, *__: None) -> Any:  # pyright: ignore
        hidden, labels, log_prob, log_sum, entropy = ctx.saved_tensors
        if d_log_prob is None:
            d_log_prob = torch.zeros_like(log_prob)
        needs_hidden, needs_parameters = ctx.needs_input_grad[1], ctx.needs_input_grad[7:]
        # Anew: FSDP2 has gathered them again since the forward.
        parameters = [p for p, needed in zip(ctx.head.parameters(), needs_parameters, strict=True) if needed]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        # In float32, since a sum over chunks in bfloat16 would lose the small ones.
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        for rows in chunks(len(hidden), ctx.chunk_size):
            h = hidden[rows].detach().requires_grad_(needs_hidden)
            with torch.enable_grad():
                logits = ctx.head.logits(h)
            figures = TokenFigures(
                log_prob[rows], log_sum[rows], None if entropy is None else entropy[rows], None, None
            )
            d_logits = logit_gradient(
                logits.detach(),
                labels[rows],
                ctx.temperature,
                figures,
                d_log_prob[rows],
                None if d_entropy is None else d_entropy[rows],
            )
            inputs = [h, *parameters] if needs_hidden else parameters
            gradients = list(torch.autograd.grad(logits, inputs, d_logits))
            if d_hidden is not None:
                d_hidden[rows] = gradients.pop(0)
            for total, part in zip(sums, gradients, strict=True):
                total.add_(part)
        found = (total.to(p.dtype) for total, p in zip(sums, parameters, strict=True))
        return (
            None,
            d_hidden,
            None,
            None,
            None,
            None,
            None,
            *(next(found) if needed else None for needed in needs_parameters),
        )
