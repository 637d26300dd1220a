"""Trains a small reward model on pairs of answers, of which the one with more even digits is preferred.

It has a tokenizer and a chat template of its own, unlike the policy's. Takes a few seconds of one CPU core.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

from trainer.random_model import build_tokenizer

TEMPLATE = "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}\n{% endfor %}"
EVEN = "02468"
STEPS, PAIRS = 60, 64


def main(folder: Path) -> None:
    """Write the trained model and its tokenizer to the folder."""
    torch.manual_seed(1)
    draw = random.Random(1)  # noqa: S311
    tokenizer = build_tokenizer(":0123456789abcdefghijklmnopqrstuvwxyz")
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, STEPS + 1):
        pairs = [sorted((answer(draw), answer(draw)), key=evens) for _ in range(PAIRS)]
        scores = score(model, tokenizer, [text for pair in pairs for text in pair], draw)
        worse, better = scores[0::2], scores[1::2]
        # Bradley-Terry: the probability that the better one is preferred. Equal pairs teach nothing.
        unequal = torch.tensor([evens(one) < evens(other) for one, other in pairs])
        loss = -torch.nn.functional.logsigmoid(better - worse)[unequal].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            right = ((better > worse)[unequal]).float().mean()
            print(f"step {step}: loss {loss:.3f}, right in {right:.0%} of the pairs")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answer(draw: random.Random) -> str:
    """One to five characters, half of them digits."""
    return "".join(
        draw.choice("0123456789" if draw.random() < 0.5 else "abcdefghijklmnopqrstuvwxyz")
        for _ in range(draw.randint(1, 5))
    )


def evens(text: str) -> int:
    """What is preferred."""
    return sum(character in EVEN for character in text)


def score(model: Any, tokenizer: Any, texts: list[str], draw: random.Random) -> torch.Tensor:
    """The model's scores of answers to prompts like those of the task."""
    conversations = [
        [{"role": "user", "content": f"{draw.randrange(1000):03}"}, {"role": "assistant", "content": text}]
        for text in texts
    ]
    batch = tokenizer.apply_chat_template(
        conversations, padding=True, tokenizer_kwargs={"padding_side": "right"}, return_dict=True, return_tensors="pt"
    )
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
