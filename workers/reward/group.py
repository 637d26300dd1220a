"""The reward role: worker processes on CPUs that call reward functions, a reward model beside or instead, one score."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from config.schema import RewardConfig
from trainer.batch import PPOBatch, require
from trainer.ppo.core_algos import place_scores
from workers.pool import get
from workers.reward.function import Reward, RewardFunctionSpec, RewardRow
from workers.reward.manager import combine
from workers.reward.model_group import RewardModelGroup
from workers.reward.verifiers import package_of
from workers.reward.worker import RewardWorker


@dataclass(slots=True)
class ScoredText:
    """A response as text, with its reward."""

    text: str
    ended: bool  # by an end token, and not by the length limit
    reward: Reward
    parts: dict[str, float] = field(default_factory=dict)  # what the score was made of, where it is not one thing


class RewardFunctions:
    """Calls reward functions on `reward.num_workers` processes, or on one where the function takes whole batches."""

    def __init__(self, config: RewardConfig, data_sources: Collection[str], *, log_dir: str) -> None:
        """Start the workers and import the function in each.

        Raises:
            RewardError: the function cannot be imported.
        """
        custom = config.custom_reward_function
        spec = RewardFunctionSpec(
            path=custom.path,
            name=custom.name,
            kwargs=custom.reward_kwargs,
            batched=custom.batched,
            max_concurrency=custom.max_concurrency,
            packages=sorted({package for source in data_sources if (package := package_of(source))}),
        )
        remote = ray.remote(RewardWorker)
        self.workers = [
            remote.options(num_cpus=0).remote(spec, config.timeout_s, f"{log_dir}/reward_{index}.log")
            for index in range(1 if custom.batched else config.num_workers)
        ]
        for worker in self.workers:
            get(worker.ready.remote(), "reward.ready")

    def score(self, rows: Sequence[RewardRow]) -> list[Reward]:
        """The rows' rewards, in their order.

        Raises:
            RewardError: the reward function failed for a row.
        """
        # Dealt out like cards and put back by index, so that neither order nor speed of the workers shows.
        count = len(self.workers)
        calls = [worker.score.remote(rows[index::count]) for index, worker in enumerate(self.workers)]
        rewards: list[Reward] = [Reward(score=0.0, extra={})] * len(rows)
        for index, call in enumerate(calls):
            rewards[index::count] = get(call, "reward.score")
        return rewards

    def shutdown(self) -> None:
        """End the workers and their children."""
        for worker in self.workers:
            worker.__ray_terminate__.remote()  # pyright: ignore[reportAttributeAccessIssue]


class RewardGroup:
    """Scores batches: by reward functions, by a reward model, or by both, as the reward manager puts them together."""

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        *,
        max_response_length: int,
        functions: RewardFunctions | None,
        model: RewardModelGroup | None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.eos_token_ids = set(eos_token_ids)
        self.max_response_length = max_response_length
        self.functions = functions
        self.model = model

    def compute_scores(self, batch: PPOBatch) -> list[ScoredText]:
        """Fill `token_level_scores`; the texts and rewards in the order of the rows. An empty response scores 0.

        Raises:
            RewardError: a row could not be scored.
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
        rules: list[Reward | None] = [None] * len(rows)
        if self.functions is not None:
            rules = [*self.functions.score(rows)]
        model_scores = self._model_scores(batch, rows, [len(ids) for ids in tokens])
        scored = []
        for text, end, ids, rule, model_score in zip(texts, ended, tokens, rules, model_scores, strict=True):
            out = combine(
                self.config, rule=rule, model_score=model_score, length=len(ids), max_length=self.max_response_length
            )
            scored.append(ScoredText(text, end, out.reward, out.parts))
        batch.token_level_scores = place_scores([item.reward.score for item in scored], response_mask)
        return scored

    def _model_scores(self, batch: PPOBatch, rows: Sequence[RewardRow], lengths: Sequence[int]) -> list[float | None]:
        """The reward model's scores; None without one, and for responses without a token."""
        scores: list[float | None] = [None] * len(rows)
        if self.model is None:
            return scores
        shown = [index for index, length in enumerate(lengths) if length]
        answers = self.model.compute_scores(
            [batch.extras[index]["prompt"] for index in shown],
            [rows[index].solution_str for index in shown],
            [rows[index].row for index in shown],
        )
        for index, score in zip(shown, answers, strict=True):
            scores[index] = score
        return scores
