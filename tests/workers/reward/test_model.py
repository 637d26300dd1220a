"""The reward-model role: plain transformers' scores whatever the batching, and conversations in the model's own form."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from config.load import load_config
from config.schema import RewardConfig
from trainer.batch import PPOBatch, per_row
from trainer.errors import ConfigError, RewardError
from trainer.random_model import build_tokenizer
from workers.engine.fsdp import DeviceContext
from workers.pool import ResourcePool
from workers.reward.conversation import ConversationTokenizer
from workers.reward.group import RewardGroup
from workers.reward.model import RewardModel
from workers.reward.model_group import RewardModelGroup

POLICY = build_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz")
PROMPTS = [[{"role": "user", "content": "12"}], [{"role": "system", "content": "be short"}, {"role": "user", "content": "a"}]] * 3  # fmt: skip
TEXTS = ["7", "", "xyzzy and more of it", "12", "0123456789", "q"]
NAMES = [f"row {index}" for index in range(len(TEXTS))]


def reward_config(path: str, *overrides: str) -> RewardConfig:
    return load_config(
        ["reward.reward_model.enable=true", f"reward.reward_model.model_path={path}", *(f"reward.{o}" for o in overrides)]
    ).reward  # fmt: skip


def plain_scores(path: str, prompts: list[Any], texts: list[str]) -> list[float]:
    """One row at a time, without padding, by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    scores = []
    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer.apply_chat_template(
            [*prompt, {"role": "assistant", "content": text}], return_dict=False, return_tensors="pt"
        )
        with torch.no_grad():
            scores.append(float(model(input_ids=ids).logits))
    return scores


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def pool(request: pytest.FixtureRequest, open_pool: Callable) -> Iterator[ResourcePool]:
    with open_pool(request.param) as opened:
        yield opened


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("bound", ["micro_batch_size_per_gpu=1", "micro_batch_size_per_gpu=4", "use_dynamic_bsz=true"])
def test_scores_are_those_of_plain_transformers_whatever_the_micro_batches_and_ranks(
    pool: ResourcePool, write_reward_model: Callable[..., str], kind: str, bound: str
) -> None:
    path = write_reward_model(kind)
    config = reward_config(path, f"reward_model.{bound}", "reward_model.forward_max_token_len_per_gpu=70")
    group = RewardModelGroup(pool, config.reward_model)
    scores = group.compute_scores(PROMPTS, TEXTS, NAMES)
    expected = plain_scores(path, PROMPTS, TEXTS)
    assert max(expected) - min(expected) > 0.1  # a constant would prove nothing
    assert scores == pytest.approx(expected, abs=1e-5)
    order = [3, 0, 5, 1]
    again = group.compute_scores([PROMPTS[i] for i in order], [TEXTS[i] for i in order], [NAMES[i] for i in order])
    assert again == pytest.approx([expected[i] for i in order], abs=1e-5)
    assert group.compute_scores(PROMPTS[:1], TEXTS[:1], NAMES[:1]) == pytest.approx(expected[:1], abs=1e-5)
    assert group.compute_scores([], [], []) == []


@pytest.mark.parametrize("pad", ["none", "last"])
def test_the_token_that_is_read_is_transformers_choice_for_a_single_row(
    device_context: DeviceContext, write_reward_model: Callable[..., str], pad: str
) -> None:
    """Without a padding token the last; with one that ends the conversation, as where padding is the end token, the one
    before it."""
    newline = AutoTokenizer.from_pretrained(write_reward_model()).convert_tokens_to_ids("\n")
    path = write_reward_model(pad_token_id=None if pad == "none" else newline)
    config = reward_config(path).reward_model
    tokenizer = ConversationTokenizer(config)
    rows = [tokenizer.encode(*row) for row in zip(PROMPTS, TEXTS, NAMES, strict=True)]
    assert {row[-1] for row in rows} == {newline}
    scores = RewardModel(device_context, config).compute_scores([rows[:2], [], rows[2:]])
    assert scores == pytest.approx(plain_scores(path, PROMPTS, TEXTS), abs=1e-5)


def answered_batch(texts: list[str], *, width: int = 24) -> PPOBatch:
    """The policy's answers to PROMPTS in the policy's tokens; each but the last ends with its end token."""
    ids = [
        POLICY(text)["input_ids"] + [POLICY.eos_token_id] * (index < len(texts) - 1) for index, text in enumerate(texts)
    ]
    ids[1] = []  # an empty response
    prompts = [POLICY.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in PROMPTS]
    longest = max(map(len, prompts))
    return PPOBatch(
        uid=per_row([f"1-{i}" for i in range(len(texts))]),
        extras=per_row(
            [
                {"prompt": PROMPTS[i], "sample_index": 0, "data_source": "none", "ground_truth": None, "extra_info": {}}
                for i in range(len(texts))
            ]
        ),
        prompts=torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
        prompt_mask=torch.tensor([[False] * (longest - len(p)) + [True] * len(p) for p in prompts]),
        responses=torch.tensor([row + [0] * (width - len(row)) for row in ids]),
        response_mask=torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in ids]),
        batch_size=[len(texts)],
    )


def test_a_conversation_is_rendered_anew_in_the_models_tokens_and_template(
    pool: ResourcePool, write_reward_model: Callable[..., str], rm_tokenizer: Any
) -> None:
    """The policy's ids of the same texts are others, and its end token is no part of what the model reads."""
    path = write_reward_model()
    config = reward_config(path, "reward_model.coef=0.5")
    tokenizer = ConversationTokenizer(config.reward_model)
    ids = tokenizer.encode(PROMPTS[1], "xyz", "row 1")
    assert rm_tokenizer.decode(ids) == "system:be short\nuser:a\nassistant:xyz\n"
    policy_ids = POLICY.apply_chat_template(PROMPTS[1], add_generation_prompt=True, return_dict=False)
    assert policy_ids != ids[: len(policy_ids)]
    group = RewardGroup(
        config,
        POLICY,
        [POLICY.eos_token_id],
        max_response_length=24,
        functions=None,
        model=RewardModelGroup(pool, config.reward_model),
    )
    texts = [text.replace(" ", "") for text in TEXTS]
    batch = answered_batch(texts)
    scored = group.compute_scores(batch)
    expected = plain_scores(path, PROMPTS, texts)
    assert [item.text for item in scored] == texts
    assert [item.ended for item in scored] == [True, False, True, True, True, False]
    for index, item in enumerate(scored):
        if index == 1:  # no token, no score
            assert (item.reward.score, item.parts) == (0.0, {})
        else:
            assert item.parts == {"model_score": pytest.approx(expected[index], abs=1e-5)}
            assert item.reward.score == 0.5 * item.parts["model_score"]
    sums = torch.where(batch.response_mask, batch.token_level_scores, 0.0).sum(-1)
    assert sums.tolist() == pytest.approx([item.reward.score for item in scored])


def test_a_text_prompt_goes_before_the_response_as_it_is(
    write_reward_model: Callable[..., str], rm_tokenizer: Any
) -> None:
    tokenizer = ConversationTokenizer(reward_config(write_reward_model()).reward_model)
    assert rm_tokenizer.decode(tokenizer.encode("12 ", "34", "row 0")) == "12 34"


def test_a_template_and_its_arguments_can_be_given(write_reward_model: Callable[..., str], rm_tokenizer: Any) -> None:
    template = "{{ start }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = reward_config(write_reward_model(), "reward_model.apply_chat_template_kwargs.start=abc").reward_model
    config.custom_chat_template = template
    assert rm_tokenizer.decode(ConversationTokenizer(config).encode(PROMPTS[0], "x", "row 0")) == "abc12x"


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_a_long_conversation_is_cut_where_told(write_reward_model: Callable[..., str], truncation: str) -> None:
    path = write_reward_model()
    config = reward_config(path, "reward_model.max_length=6", f"reward_model.truncation={truncation}").reward_model
    whole = ConversationTokenizer(reward_config(path).reward_model).encode(PROMPTS[0], "xyz", "row 0")
    cut = ConversationTokenizer(config).encode(PROMPTS[0], "xyz", "row 0")
    assert cut == (whole[-6:] if truncation == "left" else whole[:6])


def test_a_long_conversation_is_refused_by_default_with_the_row(write_reward_model: Callable[..., str]) -> None:
    """Without max_length the model's 64 positions count."""
    tokenizer = ConversationTokenizer(reward_config(write_reward_model()).reward_model)
    with pytest.raises(
        RewardError, match=r"response 3: the conversation has 7\d tokens .*max_length is 64; .*truncation=left"
    ):
        tokenizer.encode(PROMPTS[0], "x" * 70, "response 3")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"response 3: .* has no chat template; set reward\.reward_model\.custom_chat_template"),
        ("{{ raise_exception('no system role') }}", r"response 3: .*refuses the conversation: no system role"),
    ],
)
def test_a_conversation_that_the_template_cannot_render_names_the_row(
    write_reward_model: Callable[..., str], template: str | None, message: str
) -> None:
    tokenizer = ConversationTokenizer(reward_config(write_reward_model()).reward_model)
    tokenizer.tokenizer.chat_template = template
    with pytest.raises(RewardError, match=message):
        tokenizer.encode(PROMPTS[1], "x", "response 3")


def test_a_tokenizer_that_is_not_the_models_is_found_out(write_reward_model: Callable[..., str]) -> None:
    tokenizer = ConversationTokenizer(reward_config(write_reward_model(vocab_size=20)).reward_model)
    with pytest.raises(RewardError, match=r"for response 3, and the model knows 20 tokens; set .*tokenizer_path"):
        tokenizer.encode(PROMPTS[0], "xyz", "response 3")


def test_a_score_that_is_not_finite_ends_the_run_and_names_the_row(
    pool: ResourcePool, write_reward_model: Callable[..., str], rm_tokenizer: Any, tmp_path: Any
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(write_reward_model())
    with torch.no_grad():
        model.model.embed_tokens.weight[rm_tokenizer.convert_tokens_to_ids("q")] = math.inf
    model.save_pretrained(tmp_path)
    rm_tokenizer.save_pretrained(tmp_path)
    group = RewardModelGroup(pool, reward_config(str(tmp_path)).reward_model)
    with pytest.raises(RewardError, match=r"reward\.reward_model gave nan for row 5") as raised:
        group.compute_scores(PROMPTS, TEXTS, NAMES)
    assert raised.value.exit_code == 8


def test_a_model_without_a_one_label_head_is_refused(
    device_context: DeviceContext,
    write_reward_model: Callable[..., str],
    write_model: Callable[..., str],
    tmp_path: Any,
) -> None:
    def load(path: str, *overrides: str) -> None:
        RewardModel(device_context, reward_config(path, *overrides).reward_model)

    with pytest.raises(ConfigError, match=r"model_path=.*with one label is wanted, this one has 3"):
        load(write_reward_model(num_labels=3))
    with pytest.raises(ConfigError, match="with one label is wanted, this one has 2"):
        load(write_model("llama"))  # a causal model: transformers' default number of labels
    with pytest.raises(ConfigError, match=r"LlamaForSequenceClassification without score\.weight"):
        load(write_model("llama"), "reward_model.override_config.num_labels=1")


def test_a_model_folder_that_cannot_be_loaded_is_named(
    device_context: DeviceContext, write_reward_model: Callable[..., str]
) -> None:
    def load(path: str, *overrides: str) -> None:
        RewardModel(device_context, reward_config(path, *overrides).reward_model)

    with pytest.raises(ConfigError, match=r"model_path=.*is wanted: .*mismatched_sizes"):
        load(write_reward_model(num_labels=3), "reward_model.override_config.num_labels=1")
    path = Path(write_reward_model())
    (path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ConfigError, match=r"model_path=.*is wanted: "):
        load(str(path))
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model_path=.*is wanted: .*no file named model\.safetensors"):
        load(str(path))
    tokenizer = f"reward_model.tokenizer_path={write_reward_model()}"
    for text in ("{", '{"model_type": "nope"}'):
        (path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"model_path=.*: its config\.json cannot be used: "):
            ConversationTokenizer(reward_config(str(path), tokenizer).reward_model)
