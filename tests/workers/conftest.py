"""Real models, configurations, batches and processes for the tests of the workers: small, on CPU, without a download."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen3Config,
)

from config.load import load_config
from config.pools import GLOBAL_POOL
from config.schema import GovernorConfig
from trainer.batch import PPOBatch, per_row
from workers.engine.fsdp import DeviceContext
from workers.placement import PoolSpec
from workers.pool import Pools, ResourcePool

VOCABULARY = 41
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    # Wide enough that a random model has opinions: with the usual 0.02 every distribution is nearly uniform.
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "qwen3": lambda **changes: Qwen3Config(**SHAPE | {"tie_word_embeddings": True} | changes),
    "llama": lambda **changes: LlamaConfig(**SHAPE | {"tie_word_embeddings": False} | changes),
    # Caps the logits at ±3, and each layer but every second one sees 4 tokens back.
    "gemma2": lambda **changes: Gemma2Config(
        **SHAPE | {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32, "sliding_window": 4} | changes
    ),
    "granite": lambda **changes: GraniteConfig(**SHAPE | {"logits_scaling": 0.25, "embedding_multiplier": 3.0} | changes),
    "cohere": lambda **changes: CohereConfig(**SHAPE | {"logit_scale": 2.0} | changes),
    "gpt2": lambda **changes: GPT2Config(
        **{
            "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.1,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5,
        }
        | changes
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def device_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceContext]:
    """A process group of this process alone, for engines without Ray."""
    torch.set_num_threads(1)
    rendezvous = tmp_path_factory.mktemp("gloo") / "rendezvous"
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield DeviceContext(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """write_model(kind, seed=0, **changes): folder of a Hugging Face model with random weights; the same one each time."""
    root, known = tmp_path_factory.mktemp("models"), {}

    def write(kind: str, *, seed: int = 0, **changes: Any) -> str:
        key = (kind, seed, repr(sorted(changes.items())))
        if key not in known:
            folder = root / f"{kind}-{len(known)}"
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                AutoModelForCausalLM.from_config(CONFIGS[kind](**changes), dtype=torch.float32).save_pretrained(folder)
            known[key] = str(folder)
        return known[key]

    return write


@pytest.fixture(scope="session")
def configure() -> Callable[..., GovernorConfig]:
    """configure(*overrides): a checked configuration in float32."""

    def load(*overrides: str) -> GovernorConfig:
        base = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
        return load_config(["experiment=copy_ppo", *base, *overrides])

    return load


@pytest.fixture(scope="session")
def prompts_of() -> Callable[..., PPOBatch]:
    """prompts_of(lengths, samples=1, seed=0): a batch of stage 1, prompts of these lengths, each `samples` times in a row."""

    def build(lengths: Sequence[int], *, samples: int = 1, seed: int = 0, width: int | None = None) -> PPOBatch:
        random = np.random.default_rng(seed)
        width = width or max(lengths)
        prompts = torch.zeros(len(lengths), width, dtype=torch.long)
        mask = torch.zeros(len(lengths), width, dtype=torch.bool)
        for row, length in enumerate(lengths):
            prompts[row, width - length :] = torch.from_numpy(random.integers(2, VOCABULARY, length))
            mask[row, width - length :] = True
        rows = [(prompt, sample) for prompt in range(len(lengths)) for sample in range(samples)]
        return PPOBatch(
            uid=per_row([f"1-{prompt}" for prompt, _ in rows]),
            extras=per_row([{"prompt_index": prompt, "sample_index": sample} for prompt, sample in rows]),
            prompts=prompts.repeat_interleave(samples, 0),
            prompt_mask=mask.repeat_interleave(samples, 0),
            batch_size=[len(rows)],
        )

    return build


@pytest.fixture(scope="session")
def answered(prompts_of: Callable[..., PPOBatch]) -> Callable[..., PPOBatch]:
    """answered(prompt_lengths, response_lengths, …): a batch after stage 2, with random responses of these lengths."""

    def build(
        prompt_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        samples: int = 1,
        width: int | None = None,
        seed: int = 0,
    ) -> PPOBatch:
        batch = prompts_of(prompt_lengths, samples=samples, seed=seed)
        width = width or max(max(response_lengths), 1)
        random = np.random.default_rng(seed + 1)
        batch.response_mask = torch.arange(width) < torch.tensor(response_lengths).unsqueeze(-1)
        tokens = torch.from_numpy(random.integers(2, VOCABULARY, (len(batch), width)))
        batch.responses = torch.where(batch.response_mask, tokens, 0)
        batch.loss_mask = batch.response_mask.clone()
        batch.attention_mask = torch.cat([batch.prompt_mask, batch.response_mask], dim=1)
        return batch

    return build


@pytest.fixture(scope="session")
def open_pools(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """open_pools(name=size, …): a context with pools of joined processes. They take all cores: one such is open at a time."""

    @contextlib.contextmanager
    def pools(**sizes: int) -> Iterator[Pools]:
        log_dir = str(tmp_path_factory.mktemp("logs"))
        specs = [
            PoolSpec(
                name=name, nnodes=1, devices_per_node=size, device="cpu", cpu_threads=1, timeout_s=60,
                placement_timeout_s=60, log_dir=log_dir,
            )
            for name, size in sizes.items()
        ]  # fmt: skip
        opened = Pools(specs)
        try:
            yield opened
        finally:
            opened.shutdown()

    return pools


@pytest.fixture(scope="session")
def open_pool(open_pools: Callable[..., Any]) -> Callable[[int], Any]:
    """open_pool(size): a context with one pool."""

    @contextlib.contextmanager
    def pool(size: int) -> Iterator[ResourcePool]:
        with open_pools(**{GLOBAL_POOL: size}) as pools:
            yield pools[GLOBAL_POOL]

    return pool


@pytest.fixture(scope="session")
def row_ids() -> Callable[[PPOBatch, int], list[int]]:
    """row_ids(batch, row): the row's real tokens, prompt and response, without padding."""

    def read(batch: PPOBatch, row: int) -> list[int]:
        assert batch.responses is not None
        assert batch.attention_mask is not None
        tokens = torch.cat([batch.prompts, batch.responses], dim=1)[row]
        return tokens[batch.attention_mask[row]].tolist()

    return read


@pytest.fixture(scope="session")
def read_weights() -> Callable[[Path], dict[str, torch.Tensor]]:
    """read_weights(folder): all tensors of a saved model."""
    from safetensors.torch import load_file

    def read(folder: Path) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            tensors |= load_file(path)
        return tensors

    return read
