"""A synthetic run directory: what a run of the copy task with all four limiters leaves behind, made from numbers."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from config.load import load_config
from trainer.run_dir import RunDir

LIMITERS = [
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=20000",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.01",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
]
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run directory below the test's folder."""

    def make(name: str = "run", **settings: Any) -> Path:
        return write_run(tmp_path / name, **settings)

    return make


def write_run(
    root: Path,
    *,
    num_steps: int = 100,
    overrides: Sequence[str] = (),
    hidden: Sequence[str] = (),
    sample_every: int = 20,
    text: str = "",
    num_tokens: int = 0,
    state: str = "done",
) -> Path:
    """A run's folder. `hidden` are prefixes of metrics that are left out; `text` goes into all parts of a sample."""
    run_dir = RunDir(root)
    root.mkdir(parents=True)
    run_dir.write_config(load_config([*LIMITERS, *overrides]))
    run_dir.write_state(state, exit_code=0 if state == "done" else None, reason=None, seed=1)
    source = random.Random(7)
    lines = [_visible(line, hidden) for line in metric_lines(num_steps, source)]
    run_dir.append("metrics.jsonl", lines)
    run_dir.append("updates.jsonl", update_lines(num_steps, source))
    for step in range(sample_every, num_steps + 1, sample_every):
        run_dir.append("samples.jsonl", samples_of(step, source, text=text, num_tokens=num_tokens))
    return root


def _visible(line: Mapping[str, Any], hidden: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(tuple(hidden))}


def metric_lines(num_steps: int, source: random.Random) -> Iterator[dict[str, Any]]:
    """Step 0 with validation, then one line a step: the score rises, entropy falls, the KL grows."""
    yield {
        "step": 0,
        "val-core/copy/acc/mean@2": 0.0,
        "val-core/copy/acc/pass@2": 0.01,
        "val-core/copy/acc/pass@1": 0.0,
    }
    for step in range(1, num_steps + 1):
        grown = 1 / (1 + math.exp(-10 * (step / max(num_steps, 2) - 0.4)))

        def noise(size: float) -> float:
            return size * source.gauss(0, 1)

        score = min(max(0.2 + 0.75 * grown + noise(0.02), 0.0), 1.0)
        entropy = 2.4 - 2.1 * grown + noise(0.03)
        high, low = 0.03 * grown + abs(noise(0.004)), 0.015 * grown + abs(noise(0.003))
        dual = 0.002 if source.random() < 0.1 else 0.0
        unclipped = 0.8 + 0.3 * abs(noise(1))
        push = {"entropy": 0.06, "kl": 0.02 + 0.03 * grown, "reward_kl": 0.2 + 0.1 * grown}
        zero = min(0.6 * grown + abs(noise(0.02)), 0.9)
        over = 3 * grown + abs(noise(0.05))
        yield {
            "step": step,
            "critic/score/mean": score,
            "critic/score/max": min(score + 0.3, 1.0),
            "critic/score/min": max(score - 0.4, 0.0),
            "critic/rewards/mean": score - 0.05 * grown,
            "critic/vf_explained_var": grown + noise(0.05),
            "critic/grad_norm": 0.4 + abs(noise(0.1)),
            "actor/ppo_kl": 0.01 + 0.02 * grown + noise(0.003),
            "actor/ppo_kl_last": 0.02 + 0.05 * grown + noise(0.006),
            "actor/kl_loss": 0.5 * grown + abs(noise(0.01)),
            "actor/kl_loss_capped_frac": 0.0,
            "actor/kl_coef": 0.01,
            "actor/reward_kl_penalty": 0.45 * grown + abs(noise(0.02)),
            "actor/reward_kl_penalty_coeff": 0.001 * (1 + 2 * step / num_steps),
            "actor/pg_clipfrac": high + low,
            "actor/pg_clipfrac_pos_adv": high,
            "actor/pg_clipfrac_neg_adv": low,
            "actor/pg_clipfrac_lower": dual,
            "actor/entropy": entropy,
            "actor/entropy_loss": entropy - 0.05,
            "actor/grad_norm": math.inf if step == num_steps // 2 else 1.5 + abs(noise(0.5)),
            "actor/loss": -0.08,
            "response_length/mean": 4.8 - 0.8 * grown + noise(0.05),
            "response_length/max": 5.0,
            "response_length/min": max(1.0, 4 * grown - 1),
            "response_length/clip_ratio": 1 - 0.95 * grown,
            "response/empty_ratio": 0.0,
            "limiter/loss/pg": noise(0.01),
            "limiter/loss/entropy": -0.04 * entropy,
            "limiter/loss/kl": 0.005 * grown,
            "limiter/push/pg": unclipped * (1 - 3 * (high + low)),
            "limiter/push/pg_unclipped": unclipped,
            "limiter/push/clip": unclipped * 5 * (high + low),
            **{f"limiter/push/{name}": unclipped * value * (1 + noise(0.05)) for name, value in push.items()},
            "limiter/push_share/pg": 0.88 - 0.1 * grown,
            "limiter/push_share/entropy": 0.08,
            "limiter/push_share/kl": 0.04 + 0.1 * grown,
            "limiter/push_cosine": -0.3 * grown + noise(0.1),
            "limiter/clip/removed": 2 * (high + low),
            "limiter/tokens/active": 1 - zero - high - low - dual,
            "limiter/tokens/high": high,
            "limiter/tokens/low": low,
            "limiter/tokens/dual": dual,
            "limiter/tokens/zero_advantage": zero,
            "limiter/tokens/ratio_bound": 0.0,
            "limiter/kl/sampling_policy": 0.47 * grown + abs(noise(0.01)),
            "limiter/reward_kl/share": 0.02 + 0.05 * grown,
            "limiter/reward_kl/advantage_correlation": 1 - 0.1 * grown,
            "limiter/reward_kl/over_target": over,
            "limiter/reward_kl/saturated": float(over > 1.2),
            "limiter/entropy/mean": entropy,
            "limiter/entropy/p10": 0.4 * entropy,
            "limiter/entropy/p90": entropy + 0.3,
            "timing_s/gen": 0.5 + abs(noise(0.1)),
            "timing_s/reward": 0.05,
            "timing_s/old_log_prob": 0.15,
            "timing_s/ref": 0.14,
            "timing_s/values": 0.12,
            "timing_s/adv": 0.001,
            "timing_s/update_critic": 0.3 + abs(noise(0.02)),
            "timing_s/update_actor": 0.45 + abs(noise(0.03)),
            "timing_s/update_weights": 0.01,
            "timing_s/step": 1.8,
            "perf/throughput": 2100 + noise(150),
            "training/epoch": 0,
            **(
                {
                    "limiter/probe/kl": 0.03 + abs(noise(0.005)),
                    "limiter/probe/entropy_before": entropy,
                    "limiter/probe/entropy_after": entropy - 0.04,
                    "limiter/probe/ref_kl_before": 0.45 * grown,
                    "limiter/probe/ref_kl_after": 0.45 * grown + 0.02,
                }
                if step % 5 == 0
                else {}
            ),
            **(
                {
                    "val-core/copy/acc/mean@2": score - 0.15,
                    "val-core/copy/acc/pass@2": score - 0.1,
                    "val-core/copy/acc/pass@1": score - 0.15,
                    "timing_s/testing": 1.0,
                    "timing_s/save_checkpoint": 0.4,
                }
                if step % max(num_steps // 10, 1) == 0
                else {}
            ),
        }


def update_lines(num_steps: int, source: random.Random) -> Iterator[dict[str, Any]]:
    """Four updates a step: the policy moves away from the one that sampled."""
    for step in range(1, num_steps + 1):
        for update in range(4):
            yield {
                "step": step,
                "role": "actor",
                "update": update,
                "actor/ppo_kl": 0.012 * update * (1 + source.random()),
                "actor/pg_clipfrac": 0.02 * update * (0.5 + source.random()),
            }


def samples_of(step: int, source: random.Random, *, text: str = "", num_tokens: int = 0) -> Iterator[dict[str, Any]]:
    """Eight responses of a step, best first, with tokens of every class."""
    classes = ("active", "active", "active", "active", "high", "low", "dual", "zero_advantage", "ratio_bound")
    for row in range(8):
        wanted = "".join(source.choice("01234") for _ in range(3))
        tokens = [
            *wanted[: 3 - row // 3],
            *source.choices("01234", k=row // 3),
            *(["<|im_end|>"] if row < 5 else ["\n", "4"]),
        ]
        if num_tokens:
            words = (" the", " answer", " is", " 4", "2", ".", "\n", " so", " step", " by", text)
            tokens = source.choices(words, k=num_tokens)
        acted = ["zero_advantage"] * len(tokens) if row == 7 else source.choices(classes, k=len(tokens))
        old = [-abs(source.gauss(0.4, 0.5)) for _ in tokens]
        moved = {"high": 0.3, "low": -0.3, "dual": 1.3, "ratio_bound": 25.0}
        yield {
            "step": step,
            "uid": f"{step}-{row}",
            "data_source": f"copy{text}",
            "prompt": f"<|im_start|>user\n{wanted}{text}<|im_end|>\n<|im_start|>assistant\n",
            "response": "".join(tokens) + text,
            "ground_truth": wanted + text,
            "ended": row < 5,
            "score": (1.0, 1.0, 1.0, 0.75, 0.75, 0.5, 0.5, 0.25)[row],
            "extra": {"acc": float(row < 3), "pred": wanted + text},
            "tokens": tokens,
            "old_log_probs": [float(f"{value:.6g}") for value in old],
            "new_log_probs": [
                value + moved.get(kind, source.gauss(0, 0.05)) for value, kind in zip(old, acted, strict=True)
            ],
            "ref_log_prob": [value - abs(source.gauss(0.2, 0.6)) for value in old],
            "entropys": [abs(source.gauss(0.8, 0.6)) for _ in tokens],
            "values": [source.gauss(0.6, 0.1) for _ in tokens],
            "token_level_rewards": [*[0.0] * (len(tokens) - 1), 1 - row / 8],
            "advantages": [0.0 if kind == "zero_advantage" else source.gauss(0, 1) for kind in acted],
            "acted": acted,
        }
