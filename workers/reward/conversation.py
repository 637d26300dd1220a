"""Conversations as a reward model reads them: the prompt's messages and the response's text in its own template."""

from typing import Any

import jinja2
from transformers import AutoConfig, AutoTokenizer

from config.schema import RewardModelConfig
from trainer.data.rows import Prompt
from trainer.errors import ConfigError, RewardError, first_line


def read_settings(config: RewardModelConfig) -> Any:
    """The model's own configuration.

    Raises:
        ConfigError: it cannot be read.
    """
    assert config.model_path is not None, "config.reward_rules asks for it"
    try:
        return AutoConfig.from_pretrained(
            config.model_path, trust_remote_code=config.trust_remote_code, **config.override_config
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward.reward_model.model_path={config.model_path}: its config.json cannot be used: {first_line(error)}"
        ) from None


class ConversationTokenizer:
    """Renders and tokenizes anew for the reward model, whatever tokenizer and template the policy has.

    The policy's own tokens would do only where both agree on every boundary between text and template, and a response
    cut by the length limit has no end token, while the model knows whole messages alone. So there is one way for all.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: there is none.
        """
        assert config.model_path is not None, "config.reward_rules asks for it"
        self.config = config
        folder, key = (
            (config.tokenizer_path, "tokenizer_path") if config.tokenizer_path else (config.model_path, "model_path")
        )
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"reward.reward_model.{key}={folder}: no tokenizer can be loaded: {first_line(error)}"
            ) from None
        if config.custom_chat_template is not None:
            self.tokenizer.chat_template = config.custom_chat_template
        model = read_settings(config).get_text_config()
        self.vocab_size: int = model.vocab_size
        positions = getattr(model, "max_position_embeddings", None)
        self.max_length: int | None = config.max_length or positions
        if config.max_length and positions and config.max_length > positions:
            raise ConfigError(
                f"reward.reward_model.max_length={config.max_length}: {config.model_path} has {positions} positions; set at most that"
            )

    def encode(self, prompt: Prompt, response: str, where: str) -> list[int]:
        """Tokens of a conversation: messages and the response as the assistant's, in the template; a text prompt with
        the response behind it, without a template.

        Raises:
            RewardError: the template refuses it, it is too long with `truncation=error`, or the model lacks a token.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt + response)["input_ids"]
        else:
            ids = self._render([*prompt, {"role": "assistant", "content": response}], where)
        if ids and max(ids) >= self.vocab_size:
            raise RewardError(
                f"reward.reward_model: the tokenizer gives {max(ids)} for {where}, and the model knows {self.vocab_size} "
                "tokens; set reward.reward_model.tokenizer_path to the tokenizer that it was trained with"
            )
        if not ids:
            raise RewardError(f"reward.reward_model: {where} is a conversation without a token")
        return self._cut(list(ids), where)

    def _render(self, messages: list[dict[str, str]], where: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise RewardError(
                f"{where}: the prompt is chat messages, but the reward model's tokenizer has no chat template; set "
                "reward.reward_model.custom_chat_template"
            )
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=False, **self.config.apply_chat_template_kwargs
            )
        except jinja2.TemplateError as error:
            raise RewardError(
                f"{where}: the reward model's chat template refuses the conversation: {error}; change the messages, or set "
                "reward.reward_model.custom_chat_template"
            ) from None

    def _cut(self, ids: list[int], where: str) -> list[int]:
        limit = self.max_length
        if limit is None or len(ids) <= limit:
            return ids
        if self.config.truncation == "left":
            return ids[-limit:]
        if self.config.truncation == "right":
            return ids[:limit]
        raise RewardError(
            f"{where}: the conversation has {len(ids)} tokens of the reward model's, reward.reward_model.max_length is "
            f"{limit}; shorten data.max_prompt_length or data.max_response_length, or set reward.reward_model.truncation=left or right"
        )
