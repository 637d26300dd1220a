"""The learning rate as a pure function of the training step, so that a checkpoint needs no scheduler's state."""

import math

from config.schema import OptimConfig


def lr_multiplier(step: int, *, total_steps: int, optim: OptimConfig) -> float:
    """What `optim.lr` is multiplied by in training step `step`, counted from 0.

    Linear from 0 over the warm-up, then constant, or a cosine from 1 to `min_lr_ratio` at `total_steps`.
    """
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return step / warmup
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    wave = 0.5 * (1 + math.cos(2 * math.pi * optim.num_cycles * progress))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * wave
