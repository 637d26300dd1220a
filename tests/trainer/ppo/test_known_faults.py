"""Every entry of the table of known faults of public trainers, run through this trainer's own functions.

One adapter per kind checks an entry's `expected` and returns the figure that the entry's `common_wrong` is about (a
dict by the wrong's name where they are about several), which must differ from all of them. Where the table leaves
open what is right, the adapter says what is decided here.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from config.load import ConfigFaults, load_config
from config.schema import ActorConfig, GovernorConfig, OptimConfig
from trainer.batch import PPOBatch, per_row
from trainer.data.dataset import batch_indexes, epoch_order, prompt_tokens, steps_per_epoch, tokenize, truncate
from trainer.data.rows import Row
from trainer.errors import RewardError
from trainer.metrics import extra_metrics, update_metrics
from trainer.ppo.advantages import (
    compute_gae,
    compute_grpo,
    compute_reinforce_plus_plus,
    compute_reinforce_plus_plus_baseline,
)
from trainer.ppo.core_algos import (
    K3_CAP_HIGH,
    K3_CAP_LOW,
    LossCounts,
    agg_loss,
    apply_kl_penalty,
    compute_entropy_loss,
    entropy_from_logits,
    get_kl_controller,
    kl_is_capped,
    kl_penalty,
    log_prob_from_logits,
    place_scores,
)
from trainer.ppo.minibatch import split_over_ranks
from trainer.ppo.rollout_correction import correct_rollout
from trainer.ppo.validation import ValSample, validation_metrics
from trainer.random_model import build_tokenizer
from workers.engine.fsdp import UpdateOutcome
from workers.engine.models import ValueModel
from workers.engine.pieces import Piece, make_piece
from workers.engine.schedule import lr_multiplier
from workers.losses import LossShare, ppo_loss
from workers.reward.function import as_reward
from workers.reward.scorers import GYM_PREFIX, SCORERS
from workers.rollout.hf import response_mask

Entry = dict[str, Any]
TABLE = Path(__file__).parents[2] / "data" / "known_faults.json"
ENTRIES: list[Entry] = json.loads(TABLE.read_text(encoding="utf-8"))["entries"]

# What comes later, by name, so that a new entry cannot slip past.
SKIPPED = {
    "remax": "the ReMax estimator comes later",
    "answer_14": "boxed answers come with the math scorer",
    "answer_16": "boxed answers come with the math scorer",
    "answer_17": "boxed answers come with the math scorer",
    "reward_count_broadcast": "batched reward functions come later",
    "reward_count_short": "batched reward functions come later",
    "reward_count_long": "batched reward functions come later",
}


# --- helpers ---------------------------------------------------------------------------------------------------------


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Nested lists in which "nan" stands for NaN."""
    return torch.from_numpy(np.array(values, dtype=np.float64)).to(dtype)


def inputs(entry: Entry, *names: str) -> list[Tensor]:
    dtype = torch.float32 if entry["inputs"].get("dtype") == "float32" else torch.float64
    return [tensor(entry["inputs"][name], dtype) for name in names]


def mask_of(entry: Entry, name: str = "response_mask") -> Tensor:
    return tensor(entry["inputs"][name]).bool()


def close(got: Any, wanted: Any, tol: float) -> bool:
    """Equal in number of elements and, absolute or relative, in value; never with a NaN."""
    a, b = (np.asarray(x, dtype=np.float64).ravel() for x in (got, wanted))
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=tol, atol=tol))


def check(entry: Entry, **results: Any) -> None:
    """Each result against the expectation of its name."""
    for name, got in results.items():
        got = got.detach() if isinstance(got, Tensor) else got
        wanted = entry["expected"][name]
        assert close(got, wanted, entry["tol"]), f"{name}: {got}, expected {wanted}"


@cache
def default_config() -> GovernorConfig:
    return load_config(["experiment=copy_ppo"])


def actor_config(**changes: Any) -> ActorConfig:
    neutral = {"loss_agg_mode": "token-mean", "entropy_coeff": 0.0, "use_kl_loss": False}
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    return replace(default_config().actor_rollout_ref.actor, **(neutral | clip | changes))


def batch_of(prompt: list[int], response: list[int], *, left: int = 0, right: int = 0, pad: int = 0) -> PPOBatch:
    """One row on the wire, with padding columns on both sides."""
    prompt_mask = torch.tensor([[False] * left + [True] * len(prompt)])
    mask = torch.tensor([[True] * len(response) + [False] * right])
    return PPOBatch(
        uid=per_row(["a"]),
        extras=per_row([{}]),
        prompts=torch.tensor([[pad] * left + prompt]),
        prompt_mask=prompt_mask,
        responses=torch.tensor([response + [pad] * right]),
        response_mask=mask,
        loss_mask=mask,
        attention_mask=torch.cat([prompt_mask, mask], 1),
        batch_size=[1],
    )


def piece_of(batch: PPOBatch) -> Piece:
    return make_piece(batch, np.arange(len(batch)), torch.device("cpu"))


# --- KL --------------------------------------------------------------------------------------------------------------


def kl_penalty_kind(entry: Entry) -> Any:
    name = entry["params"]["type"]
    if not entry["inputs"]:
        check(entry, ref_minus_logprob_upper=-K3_CAP_LOW, ref_minus_logprob_lower=-K3_CAP_HIGH)
        step = 1e-6  # far above rounding at 11 in float64
        edges = tensor([K3_CAP_LOW - step, K3_CAP_LOW + step, K3_CAP_HIGH - step, K3_CAP_HIGH + step])
        assert kl_is_capped(edges, torch.zeros(4), name).tolist() == [True, False, False, True]
        return None
    log_prob, reference = inputs(entry, "logprob", "ref_logprob")
    value = kl_penalty(log_prob.requires_grad_(), reference, name)
    value.sum().backward()
    check(entry, value=value, grad_logprob=log_prob.grad)
    return value.detach()


def kl_reward_kind(entry: Entry) -> Any:
    scores, old, reference = inputs(entry, "token_level_scores", "old_log_probs", "ref_log_prob")
    result = apply_kl_penalty(
        token_level_scores=scores,
        old_log_probs=old,
        ref_log_prob=reference,
        response_mask=mask_of(entry),
        beta=entry["params"]["beta"],
        penalty=entry["params"]["type"],
    )
    check(entry, token_level_rewards=result.token_level_rewards, kl_seq_mean_then_batch_mean=result.mean_kl)
    return result.token_level_rewards


def adaptive_kl_kind(entry: Entry) -> Any:
    params, updates, expected = entry["params"], entry["inputs"]["updates"], entry["expected"]
    settings = {
        "type": params.get("type", "adaptive"),
        "kl_coef": params["init_kl_coef"],
        "target_kl": params.get("target_kl", 1.0),
        "horizon": params.get("horizon", 1.0),
    }
    if expected.get("raises"):
        with pytest.raises(ValueError, match=r"target_kl > 0 and horizon > 0"):
            get_kl_controller(**settings)
        return None
    controller = get_kl_controller(**settings)
    if expected.get("must_stay_positive"):
        return refuse_more_than_five_horizons(entry, controller)
    used, after = [], []
    for kl, num_rows in updates:
        used.append(controller.value)
        controller.update(kl, num_rows)
        after.append(controller.value)
    check(entry, coef_after_each=after)
    if "coef_used_at_each_step" not in expected:
        return None
    check(entry, coef_used_at_each_step=used)
    return after_resume(entry, settings)


def refuse_more_than_five_horizons(entry: Entry, controller: Any) -> None:
    """Of the two ways that the entry allows, refusal is taken here, at start and at the update."""
    params, (kl, num_rows) = entry["params"], entry["inputs"]["updates"][0]
    with pytest.raises(ValueError, match="60000 rows"):
        controller.update(kl, num_rows)
    assert controller.value == params["init_kl_coef"]
    overrides = [
        f"data.train_batch_size={num_rows}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={num_rows}",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        f"algorithm.kl_ctrl.horizon={params['horizon']}",
    ]
    with pytest.raises(ConfigFaults, match=r"algorithm\.kl_ctrl\.horizon=10000.*60000 rows"):
        load_config(overrides)


def after_resume(entry: Entry, settings: dict[str, Any]) -> list[float]:
    """The coefficients of the last two updates by a controller that was rebuilt from a checkpoint after the second."""
    updates = entry["inputs"]["updates"]
    before, controller = get_kl_controller(**settings), get_kl_controller(**settings)
    for update in updates[:2]:
        before.update(*update)
    controller.load_state_dict(json.loads(json.dumps(before.state_dict())))
    resumed = []
    for update in updates[2:]:
        controller.update(*update)
        resumed.append(controller.value)
    assert close(resumed, entry["expected"]["coef_after_each"][2:], entry["tol"])
    return resumed


def actor_kl_gradient_kind(entry: Entry) -> Any:
    policy, reference, advantages = inputs(entry, "policy_logits", "ref_logits", "advantages")
    action = torch.tensor(entry["inputs"]["action"])
    log_prob = log_prob_from_logits(policy.requires_grad_(), action, 1.0)
    share = ppo_loss(
        log_prob=log_prob,
        entropy=None,
        old_log_probs=log_prob.detach(),
        ref_log_prob=log_prob_from_logits(reference, action, 1.0),
        advantages=advantages,
        loss_mask=mask_of(entry),
        counts=LossCounts.of(mask_of(entry)),
        config=actor_config(
            use_kl_loss=True, kl_loss_coef=entry["params"]["kl_loss_coef"], kl_loss_type=entry["params"]["type"]
        ),
    )
    share.loss.backward()
    check(entry, kl_value=share.metrics["actor/kl_loss"], grad_logits=policy.grad)
    return policy.grad


# --- losses ----------------------------------------------------------------------------------------------------------


def agg_loss_kind(entry: Entry) -> Any:
    (losses,), mask = inputs(entry, "loss_mat"), mask_of(entry, "loss_mask")
    params, expected, counts = entry["params"], entry["expected"], LossCounts.of(mask)

    def share(rows: list[int], mode: str) -> float:
        factor = params.get("loss_scale_factor")
        return float(agg_loss(losses[rows], mask[rows], mode, counts=counts, loss_scale_factor=factor))

    everything = list(range(len(losses)))
    if "mode" not in params:
        modes = ("token-mean", "seq-mean-token-mean")
        check(entry, **{mode: share(everything, mode) for mode in modes})
        return None
    mode = params["mode"]
    value = share(everything, mode)
    if "dp_size" in params:
        by_rank = [share([row], mode) * params["dp_size"] for row in everything]
        check(entry, per_rank_contribution=by_rank)
        value = sum(by_rank) / params["dp_size"]
    check(entry, value=value)
    if "value_must_equal_for_any_micro_batch_split" in expected:
        for split in ([[0, 1], [2, 3]], [[0, 1, 2], [3]], [[3], [1], [0, 2]], [[0], [1], [2], [3]]):
            check(entry, value_must_equal_for_any_micro_batch_split=sum(share(rows, mode) for rows in split))
    return value


def agg_loss_weights_kind(entry: Entry) -> Any:
    mask = mask_of(entry, "loss_mask")
    losses = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    for rows in entry["params"]["micro_batches"]:
        agg_loss(losses[rows], mask[rows], entry["params"]["mode"], counts=LossCounts.of(mask)).backward()
    check(entry, weight_per_token=losses.grad)
    return losses.grad


def policy_loss_kind(entry: Entry) -> Any:
    log_prob, old, advantages = inputs(entry, "log_prob", "old_log_prob", "advantages")
    params, mask = entry["params"], mask_of(entry)
    clip = {
        "clip_ratio_low": params["clip_low"],
        "clip_ratio_high": params["clip_high"],
        "clip_ratio_c": params["clip_c"],
    }

    def run() -> LossShare:
        return ppo_loss(
            log_prob=log_prob.requires_grad_(),
            entropy=None,
            old_log_probs=old,
            ref_log_prob=None,
            advantages=advantages,
            loss_mask=mask,
            counts=LossCounts.of(mask),
            config=actor_config(loss_agg_mode=params.get("agg", "token-mean"), **clip),
        )

    if entry["expected"].get("raises"):
        with pytest.raises(ValueError, match=r"clip_ratio_c must be > 1"):
            run()
        with pytest.raises(ConfigFaults, match=r"actor\.clip_ratio_c=0\.9"):
            load_config([f"actor_rollout_ref.actor.clip_ratio_c={params['clip_c']}"])
        return None
    share = run()
    share.loss.backward()
    metrics = {
        "clipfrac": share.metrics["actor/pg_clipfrac"],
        "clipfrac_lower": share.metrics["actor/pg_clipfrac_lower"],
        "ppo_kl": share.metrics["actor/ppo_kl"],
    }
    results = {"loss": share.loss, "grad_log_prob": log_prob.grad, **metrics}
    check(entry, **{name: value for name, value in results.items() if name in entry["expected"]})
    wrong = dict.fromkeys(entry.get("common_wrong", {}), share.loss.detach())
    return wrong | {"ratio_outside_band_counted": metrics["clipfrac"]}


def rollout_is_kind(entry: Entry) -> None:
    old, sampler = inputs(entry, "old_log_prob", "rollout_log_prob")
    params = entry["params"]
    weighted = {"rollout_is": params["level"], "rollout_is_threshold": params["threshold"]}
    correction = correct_rollout(
        old_log_probs=old,
        rollout_log_probs=sampler,
        response_mask=mask_of(entry),
        config=replace(default_config().algorithm.rollout_correction, **weighted),
    )
    check(entry, weights=correction.weights)


def actor_loss_kind(entry: Entry) -> Any:
    """One token with ratio 1, so that its loss is -A, and k1, so that its KL is the difference given."""
    given, zero, mask = entry["inputs"], torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    share = ppo_loss(
        log_prob=zero,
        entropy=zero + given["entropy"],
        old_log_probs=zero,
        ref_log_prob=zero - given["kl_loss"],
        advantages=zero - given["pg_loss"],
        loss_mask=mask,
        counts=LossCounts.of(mask),
        config=actor_config(use_kl_loss=True, kl_loss_type="k1", **entry["params"]),
    )
    check(entry, total=share.loss)
    return share.loss


def metric_kind(entry: Entry) -> Any:
    """Every micro-batch holds one token; its mini-batch has as many tokens as micro-batches."""
    updates = []
    for micro_batches in entry["inputs"]["micro_batch_losses"]:
        counts = LossCounts(num_tokens=len(micro_batches), num_rows=len(micro_batches))
        shares = [agg_loss(tensor([[x]]), torch.ones(1, 1), "token-mean", counts=counts) for x in micro_batches]
        updates.append({"actor/pg_loss": float(sum(shares))})
    logged = update_metrics(updates)["actor/pg_loss"]
    check(entry, logged_pg_loss=logged)
    return logged


# --- advantages ------------------------------------------------------------------------------------------------------


def gae_kind(entry: Entry) -> Any:
    rewards, values = inputs(entry, "token_level_rewards", "values")
    mask, params, expected = mask_of(entry), entry["params"], entry["expected"]
    result = compute_gae(token_level_rewards=rewards, values=values, response_mask=mask, **params)
    raw = torch.where(mask, result.returns - values, 0.0)
    if "verl_terminal_zero" in expected:  # a response cut at its length limit is terminal
        check(entry, verl_terminal_zero=raw)
        return None
    check(entry, advantages_raw=raw, returns=result.returns)
    if "advantages_whitened" in expected:
        check(entry, advantages_whitened=result.advantages)
    if "compact_row_advantages_raw" in expected:
        kept = {"token_level_rewards": rewards[mask][None], "values": values[mask][None]}
        compact = compute_gae(**kept, response_mask=torch.ones(1, int(mask.sum())), **params)
        check(entry, compact_row_advantages_raw=compact.returns - kept["values"])
    assert bool(torch.isfinite(result.advantages).all())
    return None


def grpo_kind(entry: Entry) -> Any:
    if entry["expected"].get("raises_or_finite"):  # refused where the reward function returns
        for score in tensor(entry["inputs"]["scores"]).tolist():
            if not np.isfinite(score):
                with pytest.raises(RewardError, match="the third row"):
                    as_reward(score, "f.py:f", "the third row")
        return None
    (rewards,), mask, expected = inputs(entry, "token_level_rewards"), mask_of(entry), entry["expected"]
    result = compute_grpo(
        token_level_rewards=rewards,
        response_mask=mask,
        uid=entry["inputs"]["index"],
        norm_by_std=entry["params"]["norm_by_std"],
    )
    scalar = torch.where(mask, result.advantages, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    # A group of one has advantage 0.
    name = "scalar_advantages_mean_baseline" if "scalar_advantages_mean_baseline" in expected else "scalar_advantages"
    check(entry, **{name: scalar})
    if "advantages" in expected:
        check(entry, advantages=result.advantages)
    return scalar


def reinforce_pp_kind(entry: Entry) -> Any:
    (rewards,), mask, expected = inputs(entry, "token_level_rewards"), mask_of(entry), entry["expected"]
    gamma = entry["params"]["gamma"]
    moved = "returns_if_reward_is_first_moved_to_last_trainable"
    if moved in expected:  # a score is never put on a masked token in the first place
        placed = place_scores(rewards.sum(-1).tolist(), mask)
        result = compute_reinforce_plus_plus(token_level_rewards=placed, response_mask=mask, gamma=gamma)
        check(entry, **{moved: result.returns})
        return None
    result = compute_reinforce_plus_plus(token_level_rewards=rewards, response_mask=mask, gamma=gamma)
    check(entry, returns=result.returns, advantages=result.advantages)
    return result.returns


def reinforce_pp_baseline_kind(entry: Entry) -> Any:
    mask, uid = mask_of(entry), entry["inputs"]["index"]
    rewards = place_scores(entry["inputs"]["scores"], mask).double()
    result = compute_reinforce_plus_plus_baseline(token_level_rewards=rewards, response_mask=mask, uid=uid)
    check(entry, scalar_after_group_mean=result.returns[:, 0], advantages=result.advantages)
    return None


# --- logits and positions --------------------------------------------------------------------------------------------


def entropy_kind(entry: Entry) -> Any:
    (logits,), mask = inputs(entry, "logits"), mask_of(entry)
    per_token = entropy_from_logits(logits, entry["params"]["temperature"])
    loss = compute_entropy_loss(per_token, mask, entry["params"]["agg"], counts=LossCounts.of(mask))
    check(entry, per_token=per_token, loss=loss)
    return loss


def logprob_kind(entry: Entry) -> Any:
    (logits,), labels = inputs(entry, "logits"), torch.tensor(entry["inputs"]["labels"])
    log_prob = log_prob_from_logits(logits, labels, entry["params"]["temperature"])
    other = log_prob_from_logits(logits, labels, 1.0)
    check(entry, logprob=log_prob, ratio_if_other_side_uses_T1=(log_prob - other).exp())
    return None


def logprob_alignment_kind(entry: Entry) -> Any:
    (ids,), length = entry["inputs"]["input_ids"], entry["inputs"]["prompt_length"]
    piece = piece_of(batch_of(ids[:length], ids[length:], left=3, right=2, pad=9))
    positions = piece.positions[:, : len(ids) - length]
    check(entry, logit_positions=positions, label_positions=positions + 1)
    assert piece.input_ids.gather(1, positions + 1).equal(piece.labels[:, : positions.shape[1]])
    return None


def value_slice_kind(entry: Entry) -> Any:
    given = entry["inputs"]
    prompt, response = [1] * given["prompt_length"], [2] * given["response_length"]
    piece = piece_of(batch_of(prompt, response, left=1))
    outputs = tensor(given["critic_outputs"]).unsqueeze(-1)
    model = ValueModel(lambda input_ids, use_cache: SimpleNamespace(logits=outputs))
    values = model(piece.input_ids, piece.positions)
    check(entry, values=values)
    return values


def position_ids_kind(entry: Entry) -> Any:
    """A model counts positions from column 0; so the columns of a row's real tokens are their positions."""
    (attention,) = entry["inputs"]["attention_mask"]
    first, num_real = attention.index(1), sum(attention)
    ids = list(range(101, 101 + num_real))
    right = len(attention) - first - num_real
    piece = piece_of(batch_of(ids[:2], ids[2:], left=first, right=right))
    positions = [[piece.input_ids[0].tolist().index(token) for token in ids]]
    check(entry, position_ids_at_valid=positions)
    return positions


def response_mask_kind(entry: Entry) -> Any:
    given = entry["inputs"]
    mask = response_mask(torch.tensor(given["responses"]), given["eos_token_ids"])
    check(entry, response_mask=mask, length=mask.sum(), reward_index=place_scores([1.0], mask).argmax())
    return mask


def reward_placement_kind(entry: Entry) -> Any:
    scores = place_scores(entry["inputs"]["score"], mask_of(entry))
    check(entry, token_level_scores=scores)
    index = entry["expected"]["index"]
    assert scores.nonzero().tolist() == ([] if index is None else [[0, index]])
    return None


# --- rows, batches, steps --------------------------------------------------------------------------------------------


def batch_padding_kind(entry: Entry) -> Any:
    """Nothing is padded here: validation shares rows unevenly, training refuses what cannot be shared equally."""
    num_rows, num_ranks = entry["inputs"]["rows"], entry["inputs"]["dp_size"]
    shares = split_over_ranks(np.arange(num_rows), np.arange(num_rows) % 3 + 1, num_ranks)
    assert sorted(np.concatenate(shares).tolist()) == list(range(entry["expected"]["rows_after_unpad"]))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    overrides = [
        f"data.train_batch_size={num_rows}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={num_rows}",
        "actor_rollout_ref.rollout.n=1",
        f"trainer.n_gpus_per_node={num_ranks}",
    ]
    if entry["expected"]["pad_rows"] == 0:
        assert load_config(overrides).data.train_batch_size == num_rows
    else:
        with pytest.raises(ConfigFaults, match=f"{num_rows} rows, which {num_ranks} devices cannot share"):
            load_config(overrides)
    return None


def batch_config_kind(entry: Entry) -> Any:
    given = entry["inputs"]
    assert entry["expected"]["valid"] is False
    overrides = [
        f"data.train_batch_size={given['train_batch_size']}",
        f"actor_rollout_ref.rollout.n={given['rollout_n']}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={given['ppo_mini_batch_size']}",
        f"trainer.n_gpus_per_node={given['dp_size']}",
    ]
    with pytest.raises(ConfigFaults, match=r"actor\.ppo_mini_batch_size=4.*are 4 rows, which 8 devices cannot share"):
        load_config(overrides)
    return None


def prompt_filter_kind(entry: Entry) -> Any:
    """Chat messages under a template that adds nothing, so that a prompt has as many tokens as its content letters."""
    tokenizer = build_tokenizer("0123456789")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    lengths = entry["inputs"]["prompt_token_lengths"]
    rows = [
        Row(
            where=f"row {number}",
            prompt=[{"role": "user", "content": "7" * length}],
            data_source="copy",
            ground_truth="7",
            extra_info={},
        )
        for number, length in enumerate(lengths)
    ]
    data = tokenize(rows, replace(default_config().data, **entry["params"]), tokenizer)
    kept = [len(tokens) for tokens in data.tokens]
    check(entry, kept=kept, dropped=data.num_filtered)
    assert [len(row.prompt[0]["content"]) for row in data.rows] == kept
    return kept


def truncation_kind(entry: Entry) -> Any:
    params = entry["params"]
    cut = truncate(entry["inputs"]["input_ids"], params["max_prompt_length"], params["truncation"], "row 1")
    check(entry, input_ids=cut)
    return None


def unicode_kind(entry: Entry) -> Any:
    """A byte-level tokenizer, whose response was cut inside a character; what it decodes to is scored all the same."""
    core = Tokenizer(models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = prompt_tokens(entry["inputs"]["text"], "row 1", tokenizer, {})
    assert len(ids) == entry["inputs"]["byte_ids_total"]
    cut = ids[: entry["inputs"]["cut_after"]]
    (text,) = tokenizer.batch_decode([cut], skip_special_tokens=True)
    assert text == entry["expected"]["decoded"]
    assert (prompt_tokens(text, "row 1", tokenizer, {}) == cut) is entry["expected"]["reencoded_ids_equal"]
    scorers = [
        scorer for name, scorer in SCORERS.items() if not name.startswith(GYM_PREFIX)
    ]  # whose rows hold a problem
    assert all(scorer("", text, "42", {})["acc"] == 0.0 for scorer in scorers)
    return None


def lr_schedule_kind(entry: Entry) -> Any:
    if entry["inputs"]:
        return lr_moves_once_per_training_step(entry)
    params = entry["params"]
    optim = schedule(
        params["type"], lr_warmup_steps=params["warmup_steps"], min_lr_ratio=params["min_lr_ratio"], num_cycles=0.5
    )
    total = params["total_steps"]
    check(entry, multiplier_used_at_update=[lr_multiplier(s, total_steps=total, optim=optim) for s in range(total)])
    return None


def schedule(kind: str, **changes: Any) -> OptimConfig:
    return replace(default_config().actor_rollout_ref.actor.optim, lr_scheduler_type=kind, **changes)


class PoolOfOne:
    """A resource pool that runs nothing and keeps what a role is asked to do."""

    size = 1

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], float]] = []

    def build(self, *arguments: Any) -> None:
        pass

    def call_all(self, *arguments: Any) -> None:
        pass

    def call(self, role: str, method: str, calls: list[Any]) -> list[Any]:
        ((_, plan, lr),) = calls
        self.calls.append((plan, lr))
        return [[UpdateOutcome({"actor/loss": 0.0}, 0.0) for _ in plan]]


def lr_moves_once_per_training_step(entry: Entry) -> None:
    """The rates that the actor is handed, over training steps, mini-batches and micro-batches."""
    from workers.groups import ActorRolloutGroup, UpdateContext  # loads Ray, which no other kind needs

    given = entry["inputs"]
    num_steps, num_mini, num_micro = (
        given[name] for name in ("train_steps", "mini_batches_per_step", "micro_batches_per_mini")
    )
    num_rows = num_mini * num_micro
    config = default_config().actor_rollout_ref
    actor = replace(
        config.actor, ppo_mini_batch_size=num_micro, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False, ppo_epochs=1
    )
    pool = PoolOfOne()
    group = ActorRolloutGroup(pool, replace(config, actor=actor), spec=None)
    row = batch_of([1, 2], [3, 4])
    batch = torch.cat([row] * num_rows)
    batch.uid = per_row([str(number) for number in range(num_rows)])
    batch.old_log_probs = batch.advantages = torch.zeros(num_rows, 2)
    optim = schedule("cosine", lr_warmup_steps=0, min_lr_ratio=0.0, num_cycles=0.5)
    for step in range(num_steps):
        lr = lr_multiplier(step, total_steps=num_steps, optim=optim)
        group.update_actor(batch, UpdateContext(seed=1, step=step, lr=lr))
    assert [[len(update.micro_batches) for update in plan] for plan, _ in pool.calls] == [
        [num_micro] * num_mini
    ] * num_steps
    rates = [lr for _, lr in pool.calls]
    assert len(rates) == entry["params"]["step_unit_choices"]["per_train_step"]
    assert len(rates) in entry["expected"]["scheduler_steps_allowed"]
    # Half a cosine over two training steps is at 1 and then half way: its unit and the total's are the same.
    assert close(rates, [1.0, 0.5], 1e-12)


def resume_kind(entry: Entry) -> Any:
    given, expected = entry["inputs"], entry["expected"]
    num_rows, size, step = given["dataset_size"], given["train_batch_size"], given["checkpoint_step"]
    data = {"num_rows": num_rows, "batch_size": size, "seed": 1, "shuffle": True}
    per_epoch = steps_per_epoch(num_rows, size)
    assert per_epoch * given["total_epochs"] - step == expected["steps_still_to_run"]
    position = expected["next_batch_in_epoch"]
    order = epoch_order(num_rows, seed=1, epoch=expected["next_epoch"], shuffle=True)
    assert batch_indexes(step + 1, **data).tolist() == order[position * size : (position + 1) * size].tolist()
    for epoch in range(given["total_epochs"]):
        steps = range(1 + epoch * per_epoch, 1 + (epoch + 1) * per_epoch)
        visited = np.concatenate([batch_indexes(number, **data) for number in steps])
        assert sorted(visited.tolist()) == list(range(num_rows))
    return None


def val_metric_kind(entry: Entry) -> Any:
    given = entry["inputs"]
    if "scores" in given:  # rows go through the ranks and back unpadded
        num_rows, num_ranks = len(given["scores"]), entry["params"]["dp"]
        shares = split_over_ranks(np.arange(num_rows), np.ones(num_rows, dtype=np.int64), num_ranks)
        samples = [sample("a", row, given["scores"][row]) for share in shares for row in share.tolist()]
        mean = validation_metrics(samples)["val-core/a/reward/mean@1"]
        check(entry, mean=mean)
        return mean
    samples = [
        sample(source, i, score) for i, (source, score) in enumerate(zip(given["source"], given["score"], strict=True))
    ]
    metrics = validation_metrics(samples)
    for source, mean in entry["expected"]["per_source"].items():
        assert metrics[f"val-core/{source}/reward/mean@1"] == mean
    assert entry["expected"]["micro_mean"] not in metrics.values()
    return None


def sample(source: str, row: int, score: float) -> ValSample:
    return ValSample(data_source=source, uid=str(row), score=score, extra={})


# --- rewards ---------------------------------------------------------------------------------------------------------


def answer_extraction_kind(entry: Entry) -> Any:
    scorer = SCORERS[entry["params"]["style"]]
    result = scorer("openai/gsm8k", entry["inputs"]["response"], entry["inputs"]["ground_truth"], {})
    check(entry, score=result["score"])
    return None


def returned_value(value: Any) -> Any:
    """What the table writes as JSON: 'nan' and 'inf' are floats, 'str:1.0' is the string."""
    if isinstance(value, str):
        return value.removeprefix("str:") if value.startswith("str:") else float(value)
    return value


def reward_value_kind(entry: Entry) -> Any:
    value, expected = returned_value(entry["inputs"]["returned"]), entry["expected"]
    if expected["accepted"]:
        check(entry, score=as_reward(value, "f.py:f", "the third row").score)
    else:
        with pytest.raises(RewardError, match=r"f\.py:f returned .* for the third row"):
            as_reward(value, "f.py:f", "the third row")
    return None


def reward_extra_kind(entry: Entry) -> Any:
    rewards = [as_reward(value, "f.py:f", "a row") for value in entry["inputs"]["returned"]]
    check(entry, scores=[reward.score for reward in rewards])
    for name, column in entry["expected"]["columns"].items():
        assert [reward.extra.get(name) for reward in rewards] == column
    for order in itertools.permutations(rewards):
        metrics = extra_metrics([reward.extra for reward in order])
        assert metrics == {"reward_extra/acc/mean": entry["expected"]["mean_acc_over_present"]}
    return None


KINDS: dict[str, Callable[[Entry], Any]] = {
    "kl_penalty": kl_penalty_kind,
    "kl_reward": kl_reward_kind,
    "adaptive_kl": adaptive_kl_kind,
    "actor_kl_gradient": actor_kl_gradient_kind,
    "agg_loss": agg_loss_kind,
    "agg_loss_weights": agg_loss_weights_kind,
    "policy_loss": policy_loss_kind,
    "rollout_is": rollout_is_kind,
    "actor_loss": actor_loss_kind,
    "metric": metric_kind,
    "gae": gae_kind,
    "grpo": grpo_kind,
    "reinforce_pp": reinforce_pp_kind,
    "reinforce_pp_baseline": reinforce_pp_baseline_kind,
    "entropy": entropy_kind,
    "logprob": logprob_kind,
    "logprob_alignment": logprob_alignment_kind,
    "value_slice": value_slice_kind,
    "position_ids": position_ids_kind,
    "response_mask": response_mask_kind,
    "reward_placement": reward_placement_kind,
    "batch_padding": batch_padding_kind,
    "batch_config": batch_config_kind,
    "prompt_filter": prompt_filter_kind,
    "truncation": truncation_kind,
    "unicode": unicode_kind,
    "lr_schedule": lr_schedule_kind,
    "resume": resume_kind,
    "val_metric": val_metric_kind,
    "answer_extraction": answer_extraction_kind,
    "reward_value": reward_value_kind,
    "reward_extra": reward_extra_kind,
}


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["id"])
def test_known_fault_is_not_made_here(entry: Entry) -> None:
    if entry["id"] in SKIPPED:
        pytest.skip(SKIPPED[entry["id"]])
    ours = KINDS[entry["kind"]](entry)
    for name, wrong in entry.get("common_wrong", {}).items():
        figure = ours[name] if isinstance(ours, dict) else ours
        assert figure is not None, f"nothing to hold against the common wrong {name}"
        assert not close(figure, tensor(wrong), entry["tol"]), f"{name}: {figure} is the common wrong answer"


def test_every_entry_and_kind_of_the_table_is_run_or_skipped_by_name() -> None:
    assert len(ENTRIES) == len({entry["id"] for entry in ENTRIES}) == 110
    assert SKIPPED.keys() <= {entry["id"] for entry in ENTRIES}
    run = {entry["kind"] for entry in ENTRIES if entry["id"] not in SKIPPED}
    assert run == KINDS.keys()
    assert len({entry["kind"] for entry in ENTRIES}) == 34
