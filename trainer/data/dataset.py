"""Prompts as tokens, and the order in which training visits them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import torch

from config.schema import DataConfig
from trainer.batch import PPOBatch, per_row
from trainer.data.generated import Split, generate_rows
from trainer.data.gym import gym_rows
from trainer.data.rows import Prompt, Row, check_row, load_rows
from trainer.data.tokenizer import PolicyTokenizer
from trainer.errors import DataError

DATA_ORDER_STREAM = 1  # keeps these random numbers apart from those of the mini-batches


@dataclass(frozen=True, slots=True)
class PromptDataset:
    """Rows and their prompts' tokens."""

    rows: list[Row]
    tokens: list[list[int]]
    num_filtered: int  # rows dropped as over-long
    num_truncated: int  # prompts cut

    def __len__(self) -> int:
        return len(self.rows)

    def fingerprint(self) -> str:
        """A hash of all prompts' tokens and of what their rewards see, in order: a resumed run must find the same."""
        digest = hashlib.sha256()
        for row, tokens in zip(self.rows, self.tokens, strict=True):
            digest.update(np.array([len(tokens), *tokens], dtype=np.int64).tobytes())
            seen = [row.data_source, row.ground_truth, row.extra_info]
            digest.update(json.dumps(seen, sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()

    def batch(self, indexes: Sequence[int], *, step: int, samples: int, pad_token_id: int) -> PPOBatch:
        """The prompts, each `samples` times in a row and left-padded to the longest, as a batch of stage 1."""
        chosen = [int(i) for i in indexes]
        width = max(len(self.tokens[i]) for i in chosen)
        prompts = torch.full((len(chosen), width), pad_token_id, dtype=torch.long)
        mask = torch.zeros(len(chosen), width, dtype=torch.bool)
        for place, i in enumerate(chosen):
            prompts[place, width - len(self.tokens[i]) :] = torch.tensor(self.tokens[i])
            mask[place, width - len(self.tokens[i]) :] = True
        extras = [
            {
                "prompt_index": i,
                "sample_index": sample,
                "data_source": self.rows[i].data_source,
                "ground_truth": self.rows[i].ground_truth,
                "extra_info": self.rows[i].extra_info,
                "prompt": self.rows[i].prompt,
            }
            for i in chosen
            for sample in range(samples)
        ]
        uid = [f"{step}-{i}" for i in chosen for _ in range(samples)]
        return PPOBatch(
            uid=per_row(uid),
            extras=per_row(extras),
            prompts=prompts.repeat_interleave(samples, 0),
            prompt_mask=mask.repeat_interleave(samples, 0),
            batch_size=[len(uid)],
        )


def load_dataset(config: DataConfig, split: Split, tokenizer: PolicyTokenizer) -> PromptDataset:
    """The rows of a split (`train` or `val`), from files or from the generator, as tokens.

    Raises:
        DataError: rows that cannot be used, or a prompt that is too long with `truncation=error`.
    """
    files, limit = (
        (config.train_files, config.train_max_samples)
        if split == "train"
        else (config.val_files, config.val_max_samples)
    )
    keys = {"prompt_key": config.prompt_key, "reward_fn_key": config.reward_fn_key}
    if config.generator.name and not files:
        task = config.generator
        if config.generator.name == "reasoning_gym":
            raw = gym_rows(task, split=split, seed=config.seed)
        else:
            raw = generate_rows(
                config.generator.name,
                split=split,
                num_rows=task.num_train if split == "train" else task.num_val,
                num_digits=task.num_digits,
                max_digit=task.max_digit,
                seed=config.seed,
            )
        rows = [
            check_row(row, f"generated {split} row {number}", prompt_key="prompt", reward_fn_key="data_source")
            for number, row in enumerate(raw, start=1)
        ]
        rows = rows if limit < 0 else rows[:limit]
    else:
        rows = load_rows(files, max_rows=limit, **keys)
    return tokenize(rows, config, tokenizer.tokenizer)


def tokenize(rows: list[Row], config: DataConfig, tokenizer: Any) -> PromptDataset:
    """Prompts as tokens, over-long ones dropped, cut or refused as `filter_overlong_prompts` and `truncation` say."""
    kept, tokens, num_filtered, num_truncated = [], [], 0, 0
    for row in rows:
        ids = prompt_tokens(row.prompt, row.where, tokenizer, config.apply_chat_template_kwargs)
        if len(ids) > config.max_prompt_length:
            if config.filter_overlong_prompts:
                num_filtered += 1
                continue
            ids = truncate(ids, config.max_prompt_length, config.truncation, row.where)
            num_truncated += 1
        kept.append(row)
        tokens.append(ids)
    if rows and not kept:
        raise DataError(
            f"all {len(rows)} prompts are longer than data.max_prompt_length={config.max_prompt_length} and were filtered out"
        )
    return PromptDataset(kept, tokens, num_filtered, num_truncated)


def prompt_tokens(prompt: Prompt, where: str, tokenizer: Any, template_kwargs: dict[str, Any]) -> list[int]:
    """A prompt's tokens: chat messages through the chat template, up to where the answer begins; a text as it is.

    Raises:
        DataError: messages without a chat template or that it refuses, or a prompt without a token.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise DataError(
            f"{where}: the prompt is chat messages, but the tokenizer has no chat template; set "
            "actor_rollout_ref.model.custom_chat_template, or give the prompt as a text, which is used as it is"
        )
    else:
        # return_dict=False: transformers 5 returns a mapping unless told otherwise, whose length is its number of keys.
        try:
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **template_kwargs
            )
        except jinja2.TemplateError as error:
            raise DataError(
                f"{where}: the chat template refuses the prompt: {error}; change the messages, or set "
                "actor_rollout_ref.model.custom_chat_template"
            ) from None
    if not ids:
        raise DataError(f"{where}: the prompt has no token")
    return list(ids)


def truncate(ids: list[int], limit: int, truncation: str, where: str) -> list[int]:
    """The prompt cut to the limit: `left` drops its start, `right` its end.

    Raises:
        DataError: `error`.
    """
    if truncation == "left":
        return ids[-limit:]
    if truncation == "right":
        return ids[:limit]
    raise DataError(
        f"{where}: the prompt has {len(ids)} tokens, data.max_prompt_length is {limit}; raise it, or set "
        "data.filter_overlong_prompts=true, or data.truncation=left or right"
    )


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order of rows in an epoch, a pure function of its arguments."""
    if not shuffle:
        return np.arange(num_rows)
    return np.random.Generator(np.random.PCG64([DATA_ORDER_STREAM, seed, epoch])).permutation(num_rows)


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Whole batches in an epoch; the last incomplete one is dropped."""
    return num_rows // batch_size


def batch_indexes(step: int, *, num_rows: int, batch_size: int, seed: int, shuffle: bool) -> np.ndarray:
    """The rows of training step `step`, counted from 1: epoch and position follow from the step alone."""
    epoch, position = divmod(step - 1, steps_per_epoch(num_rows, batch_size))
    order = epoch_order(num_rows, seed=seed, epoch=epoch, shuffle=shuffle)
    return order[position * batch_size : (position + 1) * batch_size]
