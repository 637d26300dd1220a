"""Rows of reasoning-gym's procedural tasks (extra `gym`), in the form that `trainer.data.generated` gives."""

import json
import zlib
from typing import Any, get_args

import numpy as np

from config.gym_tasks import GYM_PREFIX
from config.schema import GeneratorConfig
from trainer.data.generated import Split
from trainer.errors import ConfigError, DataError


def gym_rows(config: GeneratorConfig, *, split: Split, seed: int) -> list[dict[str, Any]]:
    """The rows of one split of `config.task`; equal arguments give equal rows.

    Training and validation have random streams of their own. Problems may repeat, within a split and over both. The
    whole problem stands in `extra_info["entry"]`, since that is what the task's own scorer reads.

    Raises:
        ConfigError: the package is missing.
        DataError: the task refuses its settings.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError(
            "data.generator.name=reasoning_gym: needs the package reasoning-gym; install it with pip install 'governor-rl[gym]'"
        ) from None
    assert config.task is not None
    size = config.num_train if split == "train" else config.num_val
    stream = np.random.SeedSequence([seed, zlib.crc32(config.task.encode()), get_args(Split).index(split)])
    # Problem i is drawn with seed + i, so a few bits are left free at the top.
    start = int(stream.generate_state(1)[0]) >> 2
    try:
        dataset = reasoning_gym.create_dataset(config.task, seed=start, size=size, **config.task_kwargs)
        entries = [json.loads(json.dumps(dataset[index])) for index in range(size)]
    except (TypeError, ValueError, AssertionError, KeyError, IndexError) as error:
        raise DataError(
            f"data.generator.task_kwargs={config.task_kwargs}: reasoning-gym's task {config.task!r} refuses its settings: "
            f"{type(error).__name__}: {error}"
        ) from None
    return [
        {
            "data_source": f"{GYM_PREFIX}{config.task}",
            "prompt": [{"role": "user", "content": entry["question"]}],
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {"index": index, "split": split, "entry": entry},
        }
        for index, entry in enumerate(entries)
    ]
