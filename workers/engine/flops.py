"""Model FLOPs utilisation: the arithmetic that an update needs, over what its devices could do in its time."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Words of torch.cuda.get_device_name, and dense bfloat16 FLOP/s by the vendor's data sheet; the first row that fits.
PEAK_BF16_FLOPS: list[tuple[str, float]] = [
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
]


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its name; None for one that is not in the table."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    if words & {"Laptop", "MIG"}:  # less than the whole GPU of that name
        return None
    return next((peak for name, peak in PEAK_BF16_FLOPS if words.issuperset(name.split())), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What decides a transformer's arithmetic."""

    body: int  # parameters but the input embedding, which is looked up, and the output layer
    trained_body: int  # those of them that are trained
    head: int  # parameters of the output layer
    trained_head: int
    num_layers: int
    attention_width: int  # query heads times head dimension


def model_size(model: Any) -> ModelSize:
    """The size of a Hugging Face causal language model."""
    embedding, head = (
        list(part.parameters()) for part in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    elsewhere = {id(parameter) for parameter in (*embedding, *head)}
    body = [parameter for parameter in model.parameters() if id(parameter) not in elsewhere]
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelSize(
        body=sum(parameter.numel() for parameter in body),
        trained_body=sum(parameter.numel() for parameter in body if parameter.requires_grad),
        head=sum(parameter.numel() for parameter in head),
        trained_head=sum(parameter.numel() for parameter in head if parameter.requires_grad),
        num_layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * head_dim,
    )


def update_flops(size: ModelSize, *, lengths: Iterable[int], num_response_tokens: int) -> float:
    """FLOPs of one forward and backward over rows of these lengths, prompt and response.

    Per token 6 for each parameter (2 forward, 2 for the gradient of the input, 2 for its own unless it is frozen), the
    output layer's only for tokens that a response token follows; and 12 · layers · width · length for attention, which
    counts a causal mask's zeros too. What gradient checkpointing computes again does not count.

    Source: PaLM (arXiv:2204.02311, appendix B).
    """
    lengths = list(lengths)
    body = (4 * size.body + 2 * size.trained_body) * sum(lengths)
    head = (4 * size.head + 2 * size.trained_head) * num_response_tokens
    attention = 12 * size.num_layers * size.attention_width * sum(length**2 for length in lengths)
    return float(body + head + attention)


def actor_mfu(
    size: ModelSize,
    *,
    lengths: Iterable[int],
    num_response_tokens: int,
    epochs: int,
    seconds: float,
    num_devices: int,
    peak: float | None,
) -> dict[str, float]:
    """`perf/mfu/actor` of a step's updates that took so long; nothing where the devices' peak is not known."""
    if peak is None:
        return {}
    flops = epochs * update_flops(size, lengths=lengths, num_response_tokens=num_response_tokens)
    return {"perf/mfu/actor": flops / (seconds * num_devices * peak)}
