"""The client of the reward-model role, which `RewardGroup` calls."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from config.schema import RewardModelConfig
from trainer.data.rows import Prompt
from trainer.errors import RewardError
from trainer.ppo.minibatch import plan_micro_batches
from workers.groups import micro_batching
from workers.pool import ResourcePool
from workers.reward.conversation import ConversationTokenizer
from workers.reward.model import RewardModel


class RewardModelGroup:
    """A frozen sequence-classification model."""

    NAME = "reward_model"

    def __init__(self, pool: ResourcePool, config: RewardModelConfig) -> None:
        """Load tokenizer and model.

        Raises:
            ConfigError: one of them cannot be used.
        """
        self.pool = pool
        self.tokenizer = ConversationTokenizer(config)
        self.bound = micro_batching(
            dynamic=config.use_dynamic_bsz,
            max_rows=config.micro_batch_size_per_gpu,
            max_tokens=config.forward_max_token_len_per_gpu,
        )
        assert config.model_path is not None, "config.reward_rules asks for it"
        # The devices' processes need not have this one's working directory.
        pool.build(self.NAME, RewardModel, replace(config, model_path=str(Path(config.model_path).resolve())))

    def compute_scores(self, prompts: Sequence[Prompt], responses: Sequence[str], names: Sequence[str]) -> list[float]:
        """The score of each response to its prompt; `names` are the rows' for messages.

        Raises:
            RewardError: a conversation cannot be scored, or its score is not finite.
        """
        rows = [self.tokenizer.encode(*row) for row in zip(prompts, responses, names, strict=True)]
        if not rows:
            return []
        lengths = np.array([len(row) for row in rows])
        plan = plan_micro_batches(np.arange(len(rows)), lengths, num_ranks=self.pool.size, bound=self.bound)
        calls = [([[rows[index] for index in piece] for piece in pieces],) for pieces in plan]
        order = np.concatenate([piece for pieces in plan for piece in pieces])
        scores = [0.0] * len(rows)
        answers = self.pool.call(self.NAME, "compute_scores", calls)
        for index, score in zip(order, [score for answer in answers for score in answer], strict=True):
            scores[index] = score
        for name, score in zip(names, scores, strict=True):
            if not math.isfinite(score):
                raise RewardError(f"reward.reward_model gave {score} for {name}; a reward is a finite number")
        return scores
