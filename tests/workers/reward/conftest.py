"""Reward workers with real child processes, and small reward models."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from trainer.random_model import build_tokenizer
from workers.reward.function import RewardFunctionSpec, RewardRow
from workers.reward.worker import RewardWorker


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., RewardWorker]]:
    """start_worker(code, timeout_s=…, **fields of the spec): a worker with its child, ready; code None: built-in."""
    workers: list[RewardWorker] = []

    def start(code: str | None, *, timeout_s: float = 10.0, **changes: Any) -> RewardWorker:
        path = None
        if code is not None:
            path = tmp_path / f"reward_{len(workers)}.py"
            path.write_text(code)
        fields = {"name": "compute_score", "kwargs": {}, "batched": False, "max_concurrency": 16, "packages": []}
        spec = RewardFunctionSpec(path=path and str(path), **(fields | changes))
        worker = RewardWorker(spec, timeout_s, str(tmp_path / "reward.log"))
        workers.append(worker)
        worker.ready()
        return worker

    yield start
    for worker in workers:
        worker.__ray_shutdown__()


@pytest.fixture(scope="session")
def reward_rows() -> Callable[..., list[RewardRow]]:
    """reward_rows(texts, source=…, truths=…): rows named "row 0", "row 1", …"""

    def rows(texts: Sequence[str], *, source: str = "any", truths: Sequence[Any] | None = None) -> list[RewardRow]:
        return [
            RewardRow(
                row=f"row {i}", data_source=source, solution_str=text, ground_truth=truth, extra_info={"index": i}
            )
            for i, (text, truth) in enumerate(zip(texts, truths or [None] * len(texts), strict=True))
        ]

    return rows


# Not the policy's: another alphabet, so other ids, and another form of the conversation.
RM_TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
RM_KINDS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


@pytest.fixture(scope="session")
def rm_tokenizer() -> PreTrainedTokenizerFast:
    """Characters in another order than the policy's, and a template without start and end tokens."""
    tokenizer = build_tokenizer(":zyxwvutsrqponmlkjihgfedcba9876543210 ")
    tokenizer.chat_template = RM_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def write_reward_model(
    tmp_path_factory: pytest.TempPathFactory, rm_tokenizer: PreTrainedTokenizerFast
) -> Callable[..., str]:
    """write_reward_model(kind, **changes of its config): folder of a random model with one label, and its tokenizer."""
    root = tmp_path_factory.mktemp("reward_models")

    def write(kind: str = "llama", **changes: Any) -> str:
        folder = root / f"{kind}-{len(list(root.iterdir()))}"
        shape = {
            "vocab_size": len(rm_tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "initializer_range": 0.1, "num_labels": 1,
            "pad_token_id": rm_tokenizer.pad_token_id, "max_position_embeddings": 64,
        }  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(3)
            config = RM_KINDS[kind](**(shape | changes))
            model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
        rm_tokenizer.save_pretrained(folder)
        return str(folder)

    return write
