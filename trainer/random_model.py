"""A small language model with random weights and a character tokenizer, built without a download."""

import os
import shutil
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils import logging as transformers_logging

from config.schema import RandomInitConfig

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
ROLES = ["system", "user", "assistant"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_random_model(config: RandomInitConfig, folder: Path, *, seed: int) -> None:
    """Write model, tokenizer and generation config to `folder`, in float32; a finished folder is left as it is."""
    if folder.exists():
        return
    aside = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    tokenizer = build_tokenizer(config.alphabet)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_model_config(config, tokenizer), dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    transformers_logging.disable_progress_bar()
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    os.rename(aside, folder)


def build_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of the alphabet, the newline, the special tokens and the roles of a chat; ChatML.

    Only padding, start and end are special, that is, dropped from a decoded response: a role or an unknown character that
    the policy writes is text like any other, and its reward function sees it.
    """
    vocabulary = [PAD, START, END, UNKNOWN, *ROLES, *sorted({*alphabet, "\n"})]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore
    core.decoder = decoders.Fuse()  # pyright: ignore
    # Roles are single tokens too, which keeps a prompt about three times shorter than spelling them.
    core.add_tokens([UNKNOWN, *ROLES])
    core.add_special_tokens([PAD, START, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def _model_config(config: RandomInitConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config | LlamaConfig:
    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig}[config.architecture]
    return kind(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
