"""The reward-model role: a sequence-classification model that scores whole conversations."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from config.schema import RewardModelConfig
from trainer.errors import ConfigError, first_line
from workers.engine.fsdp import DeviceContext, FSDPEngine
from workers.engine.models import LOAD_ERRORS, attention_of, master_dtype
from workers.reward.conversation import read_settings

Conversation = list[int]  # tokens, without padding


class ScoreModel(nn.Module):
    """A causal transformer with a one-label head, read at each row's last token.

    The last token is found as transformers finds it for a single row without padding: the last that is not the model's
    padding token, where it has one. Padding on the right is never seen, since no causal token looks ahead, so a row's
    score does not depend on its neighbours.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.pad_token_id: int | None = model.config.get_text_config().pad_token_id

    @classmethod
    def load(cls, config: RewardModelConfig) -> "ScoreModel":
        """From a Hugging Face folder.

        Raises:
            ConfigError: the folder's model has no such head, or one of several labels, or cannot be loaded.
        """
        assert config.model_path is not None, "config.reward_rules asks for it"
        path, settings = config.model_path, read_settings(config)
        wanted = f"reward.reward_model.model_path={path}: a sequence-classification model with one label is wanted"
        if settings.num_labels != 1:
            raise ConfigError(f"{wanted}, this one has {settings.num_labels}")
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                path,
                config=settings,
                dtype=master_dtype(config.fsdp_config),
                attn_implementation=attention_of(settings),
                output_loading_info=True,
                trust_remote_code=config.trust_remote_code,
            )
        except LOAD_ERRORS as error:
            raise ConfigError(f"{wanted}: {first_line(error)}") from None
        missing = sorted(report["missing_keys"])
        if missing or not isinstance(getattr(model, "score", None), nn.Module) or model.base_model is model:
            raise ConfigError(
                f"{wanted}, this is a {type(model).__name__} without {', '.join(missing) or 'a head `score`'}"
            )
        return cls(model.eval())

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Scores [b] float32 of conversations input_ids [b, L], right-padded; lengths [b] in tokens."""
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        real = columns < lengths.unsqueeze(-1)
        if self.pad_token_id is not None:
            real = real & (input_ids != self.pad_token_id)
        last = torch.where(real, columns, 0).amax(-1)
        logits = self.model.score(hidden[torch.arange(len(hidden), device=hidden.device), last]).squeeze(-1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class RewardModel:
    """One rank of the reward-model role."""

    def __init__(self, context: DeviceContext, config: RewardModelConfig) -> None:
        self.context = context
        self.engine = FSDPEngine(ScoreModel.load(config), context=context, config=config.fsdp_config, optim=None)

    @torch.no_grad()
    def compute_scores(self, micro_batches: list[list[Conversation]]) -> list[float]:
        """Scores of the conversations, micro-batch after micro-batch. An empty one joins the collectives with a blank."""
        with self.engine.loaded():
            return [score for piece in micro_batches for score in self._score(piece)]

    def _score(self, piece: list[Conversation]) -> list[float]:
        rows = piece or [[0]]
        lengths = torch.tensor([len(row) for row in rows])
        input_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for place, row in enumerate(rows):
            input_ids[place, : len(row)] = torch.tensor(row)
        device = self.context.device
        return self.engine.module(input_ids.to(device), lengths.to(device)).tolist()[: len(piece)]
