"""Prompts as tokens, batches of them, and the order in which training visits them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from config.load import load_config
from config.schema import DataConfig
from trainer.data.dataset import (
    PromptDataset,
    batch_indexes,
    epoch_order,
    load_dataset,
    prompt_tokens,
    steps_per_epoch,
    tokenize,
)
from trainer.data.rows import Row
from trainer.data.tokenizer import PolicyTokenizer
from trainer.errors import DataError
from trainer.random_model import END, build_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;?!-_+*/=()[]{}<>|$%#@'\"\\&^~`"
BASE = load_config(["experiment=null", "data.generator.name=copy", "trainer.n_gpus_per_node=1"]).data


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(LETTERS)


def policy_tokenizer(tokenizer: Any) -> PolicyTokenizer:
    return PolicyTokenizer(tokenizer, [tokenizer.eos_token_id], tokenizer.pad_token_id, [])


def data_config(**changes: Any) -> DataConfig:
    files = {"generator": dataclasses.replace(BASE.generator, name=None)}
    return dataclasses.replace(BASE, **{**files, "max_prompt_length": 50, **changes})


def row(prompt: Any, number: int = 1) -> Row:
    return Row(where=f"f row {number}", prompt=prompt, data_source="copy", ground_truth="1", extra_info={})


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_the_chat_template_is_applied_once(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *user("1 + 1?")]
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    ids = prompt_tokens(messages, "w", tokenizer, {})
    assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == rendered


def test_a_template_that_writes_the_start_token_gets_no_second_one(tokenizer: Any) -> None:
    adds_start = build_tokenizer(LETTERS)
    start = adds_start.convert_tokens_to_ids("<|im_start|>")
    adds_start.backend_tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    assert adds_start("a")["input_ids"][0] == start
    assert prompt_tokens(user("a"), "w", adds_start, {}) == prompt_tokens(user("a"), "w", tokenizer, {})


def test_the_prompt_ends_where_the_answer_begins(tokenizer: Any) -> None:
    assert tokenizer.decode(prompt_tokens(user("a"), "w", tokenizer, {})).endswith("<|im_start|>assistant\n")


def test_template_arguments_reach_the_template() -> None:
    tokenizer = build_tokenizer(LETTERS)
    tokenizer.chat_template = "{% if enable_thinking %}think{% else %}answer{% endif %}"
    assert tokenizer.decode(prompt_tokens(user("a"), "w", tokenizer, {"enable_thinking": True})) == "think"
    assert tokenizer.decode(prompt_tokens(user("a"), "w", tokenizer, {"enable_thinking": False})) == "answer"


@pytest.mark.parametrize(
    "text", ["${oc.env:HOME} ${5}", "{{ jinja }} {% for %}", "user assistant", " a  b ", END, "\\n"]
)
def test_text_in_a_message_is_not_interpreted(tokenizer: Any, text: str) -> None:
    decoded = tokenizer.decode(prompt_tokens(user(text), "w", tokenizer, {}))
    assert decoded == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("text", ["1 + 1 =", "{{ jinja }}", "<|im_start|>user\na<|im_end|>\n"])
def test_a_text_prompt_is_used_as_it_is(tokenizer: Any, text: str) -> None:
    ids = prompt_tokens(text, "w", tokenizer, {"enable_thinking": True})
    assert ids == tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_right_to_left_text_keeps_its_order() -> None:
    text = "שלום \u202eabc\u202c"
    tokenizer = build_tokenizer(text)
    assert tokenizer.decode(prompt_tokens(text, "w", tokenizer, {})) == text


def test_messages_without_a_chat_template_are_refused_with_two_ways_out() -> None:
    tokenizer = build_tokenizer(LETTERS)
    tokenizer.chat_template = None
    with pytest.raises(
        DataError, match=r"^f row 3: .*no chat template; set actor_rollout_ref\.model\.custom_chat_template"
    ):
        tokenize([row(user("a"), 3)], data_config(), tokenizer)
    assert len(tokenize([row("a text needs none")], data_config(), tokenizer)) == 1


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('System role not supported') }}", "{{ messages", "{{ nope.x }}"]
)
def test_a_chat_template_that_fails_names_the_row_and_the_key(template: str) -> None:
    tokenizer = build_tokenizer(LETTERS)
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"^f row 3: .*chat template"):
        tokenize([row(user("a"), 3)], data_config(), tokenizer)


def test_a_prompt_without_a_token_is_refused() -> None:
    tokenizer = build_tokenizer(LETTERS)
    tokenizer.chat_template = "{% for message in messages %}{% endfor %}"
    with pytest.raises(DataError, match=r"^f row 3: the prompt has no token$"):
        tokenize([row(user("a"), 3)], data_config(), tokenizer)


# --- length ----------------------------------------------------------------------------------------------------------

PROMPTS = ["abc", "abcdef", "ab", "abcdefgh"]


def lengths_and_texts(tokenizer: Any, **changes: Any) -> tuple[list[str], int, int]:
    rows = [row(text, number) for number, text in enumerate(PROMPTS, start=1)]
    dataset = tokenize(rows, data_config(max_prompt_length=3, **changes), tokenizer)
    return [tokenizer.decode(ids) for ids in dataset.tokens], dataset.num_filtered, dataset.num_truncated


def test_a_prompt_at_the_limit_is_kept_and_one_beyond_is_refused_with_three_ways_out(tokenizer: Any) -> None:
    message = (
        "f row 2: the prompt has 6 tokens, data.max_prompt_length is 3; raise it, or set "
        "data.filter_overlong_prompts=true, or data.truncation=left or right"
    )
    with pytest.raises(DataError) as caught:
        lengths_and_texts(tokenizer, truncation="error")
    assert str(caught.value) == message


def test_left_truncation_cuts_the_start(tokenizer: Any) -> None:
    assert lengths_and_texts(tokenizer, truncation="left") == (["abc", "def", "ab", "fgh"], 0, 2)


def test_right_truncation_cuts_the_end(tokenizer: Any) -> None:
    assert lengths_and_texts(tokenizer, truncation="right") == (["abc", "abc", "ab", "abc"], 0, 2)


@pytest.mark.parametrize("truncation", ["error", "left", "right"])
def test_filtering_drops_rows_whatever_the_truncation(tokenizer: Any, truncation: str) -> None:
    found = lengths_and_texts(tokenizer, truncation=truncation, filter_overlong_prompts=True)
    assert found == (["abc", "ab"], 2, 0)


def test_rows_stay_beside_their_tokens_when_some_are_filtered(tokenizer: Any) -> None:
    rows = [row(text, number) for number, text in enumerate(PROMPTS, start=1)]
    dataset = tokenize(rows, data_config(max_prompt_length=3, filter_overlong_prompts=True), tokenizer)
    assert [kept.where for kept in dataset.rows] == ["f row 1", "f row 3"]


def test_filtering_all_rows_is_refused(tokenizer: Any) -> None:
    with pytest.raises(
        DataError, match=r"^all 2 prompts are longer than data\.max_prompt_length=1 and were filtered out$"
    ):
        tokenize([row("ab"), row("cd")], data_config(max_prompt_length=1, filter_overlong_prompts=True), tokenizer)


# --- loading ---------------------------------------------------------------------------------------------------------


def test_each_split_has_its_files_and_its_limit(tmp_path: Path, tokenizer: Any) -> None:
    for name, count in (("train", 4), ("val", 3)):
        lines = [json.dumps({"prompt": f"{name} {i}", "data_source": "copy"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    config = data_config(
        train_files=[str(tmp_path / "train.jsonl")],
        val_files=[str(tmp_path / "val.jsonl")],
        train_max_samples=2,
        val_max_samples=-1,
    )
    policy = policy_tokenizer(tokenizer)
    assert [kept.prompt for kept in load_dataset(config, "train", policy).rows] == ["train 0", "train 1"]
    assert [kept.prompt for kept in load_dataset(config, "val", policy).rows] == ["val 0", "val 1", "val 2"]


def test_a_generator_gives_what_has_no_file(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": "mine", "data_source": "copy"}))
    generator = dataclasses.replace(BASE.generator, name="copy", num_train=20, num_val=10)
    config = data_config(generator=generator, val_files=[str(tmp_path / "val.jsonl")], train_max_samples=5)
    policy = policy_tokenizer(tokenizer)
    train = load_dataset(config, "train", policy)
    assert [kept.where for kept in train.rows] == [f"generated train row {number}" for number in range(1, 6)]
    assert [kept.prompt for kept in load_dataset(config, "val", policy).rows] == ["mine"]
    assert len(load_dataset(dataclasses.replace(config, val_files=[]), "val", policy)) == 10


def test_a_generator_does_not_read_the_columns_of_files(tokenizer: Any) -> None:
    generator = dataclasses.replace(BASE.generator, name="copy", num_train=2)
    config = data_config(generator=generator, prompt_key="question", reward_fn_key="source")
    assert len(load_dataset(config, "train", policy_tokenizer(tokenizer))) == 2


# --- fingerprint -----------------------------------------------------------------------------------------------------


def test_the_fingerprint_changes_with_prompts_their_order_their_cuts_and_their_number() -> None:
    def fingerprint(*tokens: list[int]) -> str:
        return PromptDataset([row("x")] * len(tokens), list(tokens), 0, 0).fingerprint()

    same = fingerprint([1, 2], [3])
    assert fingerprint([1, 2], [3]) == same
    others = [fingerprint(*tokens) for tokens in ([[3], [1, 2]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2]], [[1, 2], [4]])]
    assert len({same, *others}) == 6


def test_the_fingerprint_changes_with_what_the_reward_sees(tokenizer: Any) -> None:
    def fingerprint(**changes: Any) -> str:
        return tokenize([dataclasses.replace(row("x"), **changes)], data_config(), tokenizer).fingerprint()

    others = [fingerprint(ground_truth="2"), fingerprint(data_source="other"), fingerprint(extra_info={"a": 1})]
    assert len({fingerprint(), *others}) == 4


def test_the_fingerprint_does_not_depend_on_where_the_files_lie(tokenizer: Any) -> None:
    found = [
        tokenize([dataclasses.replace(row("x"), where=w)], data_config(), tokenizer) for w in ("/a row 1", "/b row 1")
    ]
    assert found[0].fingerprint() == found[1].fingerprint()


# --- batches ---------------------------------------------------------------------------------------------------------


def small_dataset() -> PromptDataset:
    rows = [
        Row(where=f"f row {i}", prompt="x", data_source=f"s{i}", ground_truth=i, extra_info={"index": i})
        for i in range(4)
    ]
    return PromptDataset(rows, [[10], [20, 21], [30, 31, 32], [40, 41, 42, 43]], 0, 0)


def test_a_batch_pads_left_to_its_longest_and_repeats_each_prompt_in_place() -> None:
    batch = small_dataset().batch([2, 0], step=7, samples=2, pad_token_id=99)
    assert batch.prompts.tolist() == [[30, 31, 32], [30, 31, 32], [99, 99, 10], [99, 99, 10]]
    assert batch.prompt_mask.tolist() == [[True] * 3] * 2 + [[False, False, True]] * 2
    assert batch.prompts.dtype == torch.long
    assert batch.prompt_mask.dtype == torch.bool
    assert list(batch.uid) == ["7-2", "7-2", "7-0", "7-0"]
    assert len(batch) == 4


def test_a_batch_carries_each_rows_extras() -> None:
    batch = small_dataset().batch([3, 1], step=1, samples=3, pad_token_id=0)
    assert [extras["sample_index"] for extras in batch.extras] == [0, 1, 2, 0, 1, 2]
    assert batch.extras[4] == {
        "prompt_index": 1,
        "sample_index": 1,
        "data_source": "s1",
        "ground_truth": 1,
        "extra_info": {"index": 1},
        "prompt": "x",
    }


def test_a_token_equal_to_the_padding_is_no_padding() -> None:
    batch = small_dataset().batch([1, 0], step=1, samples=1, pad_token_id=10)
    assert batch.prompts.tolist() == [[20, 21], [10, 10]]
    assert batch.prompt_mask.tolist() == [[True, True], [False, True]]


def test_a_batch_is_wide_as_its_own_longest_prompt() -> None:
    assert small_dataset().batch([0, 1], step=1, samples=1, pad_token_id=0).prompts.shape == (2, 2)


# --- order -----------------------------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int, int, int, bool]:
    batch_size = draw(st.integers(1, 12))
    num_rows = draw(st.one_of(st.integers(batch_size, 60), st.integers(1, 5).map(lambda times: times * batch_size)))
    epochs = draw(st.integers(1, 4))
    total = epochs * steps_per_epoch(num_rows, batch_size)
    per_epoch = steps_per_epoch(num_rows, batch_size)
    edges = st.sampled_from([0, total, per_epoch, max(per_epoch - 1, 0), min(per_epoch + 1, total)])
    cut = draw(st.one_of(edges, st.integers(0, total)))
    return num_rows, batch_size, epochs, cut, draw(st.integers(0, 2**32)), draw(st.booleans())


def stream(first: int, last: int, num_rows: int, batch_size: int, seed: int, shuffle: bool) -> list[list[int]]:
    return [
        batch_indexes(step, num_rows=num_rows, batch_size=batch_size, seed=seed, shuffle=shuffle).tolist()
        for step in range(first, last + 1)
    ]


@settings(max_examples=300, deadline=None)
@given(runs())
def test_a_resumed_stream_goes_on_where_it_was_cut_and_no_epoch_skips_or_repeats(
    run: tuple[int, int, int, int, int, bool],
) -> None:
    num_rows, batch_size, epochs, cut, seed, shuffle = run
    per_epoch = steps_per_epoch(num_rows, batch_size)
    total = epochs * per_epoch
    whole = stream(1, total, num_rows, batch_size, seed, shuffle)
    before = stream(1, cut, num_rows, batch_size, seed, shuffle)
    assert before + stream(cut + 1, total, num_rows, batch_size, seed, shuffle) == whole
    for epoch in range(epochs):
        seen = [i for batch in whole[epoch * per_epoch : (epoch + 1) * per_epoch] for i in batch]
        assert len(seen) == len(set(seen)) == per_epoch * batch_size
        assert len(seen) > num_rows - batch_size  # only the last incomplete batch is dropped
        assert set(seen) <= set(range(num_rows))
        if not shuffle:
            assert seen == list(range(per_epoch * batch_size))


def test_a_longer_run_begins_with_the_shorter_one() -> None:
    assert stream(1, 30, 17, 5, 3, True)[:9] == stream(1, 9, 17, 5, 3, True)


def test_epochs_and_seeds_differ_in_order_but_not_in_rows() -> None:
    orders = [epoch_order(100, seed=seed, epoch=epoch, shuffle=True).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(100)) for order in orders)


def test_every_row_comes_first_equally_often() -> None:
    firsts = [int(epoch_order(4, seed=5, epoch=epoch, shuffle=True)[0]) for epoch in range(4000)]
    # 1000 each; the standard deviation is sqrt(4000 * 1/4 * 3/4) = 27, and five of them are 137.
    assert np.abs(np.bincount(firsts, minlength=4) - 1000).max() < 137


def test_file_order_ignores_seed_and_epoch() -> None:
    for seed, epoch in ((0, 0), (7, 3)):
        assert epoch_order(5, seed=seed, epoch=epoch, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_order_leaves_the_global_generator_alone() -> None:
    np.random.seed(1)
    epoch_order(10, seed=3, epoch=0, shuffle=True)
    assert np.random.random() == 0.417022004702574  # what follows seed 1 when nothing was drawn in between


@pytest.mark.parametrize(("num_rows", "batch_size", "steps"), [(10, 10, 1), (19, 10, 1), (20, 10, 2), (9, 10, 0)])
def test_the_last_incomplete_batch_is_dropped(num_rows: int, batch_size: int, steps: int) -> None:
    assert steps_per_epoch(num_rows, batch_size) == steps
