"""The reward role: worker processes on CPUs that score responses in parallel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from config.schema import RewardConfig
from trainer.batch import PPOBatch, require
from trainer.ppo.core_algos import place_scores
from workers.pool import get
from workers.reward.function import Reward, RewardFunctionSpec, RewardRow
from workers.reward.worker import RewardWorker


@dataclass(slots=True)
class ScoredText:
    """A response as text, with its reward."""

    text: str
    ended: bool  # by an end token, and not by the length limit
    reward: Reward


class RewardGroup:
    """Scores batches on `reward.num_workers` processes."""

    def __init__(self, config: RewardConfig, tokenizer: Any, eos_token_ids: Sequence[int], *, log_dir: str) -> None:
        """Start the workers and import the function in each.

        Raises:
            RewardError: the function cannot be imported.
        """
        self.tokenizer = tokenizer
        self.eos_token_ids = set(eos_token_ids)
        custom = config.custom_reward_function
        spec = RewardFunctionSpec(path=custom.path, name=custom.name, kwargs=custom.reward_kwargs)
        remote = ray.remote(RewardWorker)
        self.workers = [
            remote.options(num_cpus=0).remote(spec, config.timeout_s, f"{log_dir}/reward_{index}.log")
            for index in range(config.num_workers)
        ]
        for worker in self.workers:
            get(worker.ready.remote(), "reward.ready")

    def compute_scores(self, batch: PPOBatch) -> list[ScoredText]:
        """Fill `token_level_scores`; the texts and rewards in the order of the rows. An empty response scores 0.

        Raises:
            RewardError: the reward function failed for a row.
        """
        responses, response_mask = require(batch, "responses", "response_mask")
        tokens = [row[mask].tolist() for row, mask in zip(responses, response_mask, strict=True)]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        ended = [bool(ids) and ids[-1] in self.eos_token_ids for ids in tokens]
        rows = [
            RewardRow(
                row=f"response {extras['sample_index']} to prompt {uid}",
                data_source=extras["data_source"],
                solution_str=text,
                ground_truth=extras["ground_truth"],
                extra_info={**extras["extra_info"], "response_ended": end},
            )
            for uid, extras, text, end in zip(batch.uid, batch.extras, texts, ended, strict=True)
        ]
        # Dealt out like cards and put back by index, so that neither order nor speed of the workers shows.
        count = len(self.workers)
        calls = [worker.score.remote(rows[index::count]) for index, worker in enumerate(self.workers)]
        rewards: list[Reward | None] = [None] * len(rows)
        for index, call in enumerate(calls):
            rewards[index::count] = get(call, "reward.score")
        scored = [
            ScoredText(text, end, reward if ids else Reward(score=0.0, extra={}))
            for text, end, reward, ids in zip(texts, ended, rewards, tokens, strict=True)
            if reward is not None
        ]
        batch.token_level_scores = place_scores([item.reward.score for item in scored], response_mask)
        return scored

    def shutdown(self) -> None:
        """End the workers and their children."""
        for worker in self.workers:
            worker.__ray_terminate__.remote()  # pyright: ignore[reportAttributeAccessIssue]
