"""The tokenizer of a run, and the special tokens that the rollout needs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from config.schema import ModelConfig
from trainer.errors import DataError, first_line


@dataclass(frozen=True, slots=True)
class PolicyTokenizer:
    """A Hugging Face tokenizer with the tokens that end and pad a response."""

    tokenizer: Any
    eos_token_ids: list[int]
    pad_token_id: int
    notices: list[str]


def load_tokenizer(path: str, config: ModelConfig) -> PolicyTokenizer:
    """The tokenizer of `model.tokenizer_path`, else of the model's folder.

    A response ends at any end token of the generation config, or at the tokenizer's. Without a padding token the end
    token pads: masks are made from lengths, never from ids, so a response still learns its end.

    Raises:
        DataError: there is no tokenizer, or nothing says which token ends a response.
    """
    folder, key = (config.tokenizer_path, "tokenizer_path") if config.tokenizer_path else (path, "path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise DataError(
            f"actor_rollout_ref.model.{key}={folder}: no tokenizer can be loaded: {first_line(error)}"
        ) from None
    if config.custom_chat_template is not None:
        tokenizer.chat_template = config.custom_chat_template
    eos_token_ids = sorted({*_generation_eos(path), *_ids(tokenizer.eos_token_id)})
    if not eos_token_ids:
        raise DataError(
            f"{folder}: neither the tokenizer nor {path}/generation_config.json names an end token; set eos_token_id in "
            "generation_config.json"
        )
    notices = []
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = eos_token_ids[0]
        notices.append(
            f"The tokenizer has no padding token; token {pad}, an end token, pads. Masks do not depend on it."
        )
    return PolicyTokenizer(tokenizer, eos_token_ids, int(pad), notices)


def _generation_eos(path: str) -> list[int]:
    if not (Path(path) / "generation_config.json").is_file():
        return []
    try:
        return _ids(GenerationConfig.from_pretrained(path).eos_token_id)
    except OSError as error:
        raise DataError(f"{path}/generation_config.json: cannot be read: {error}") from None


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
