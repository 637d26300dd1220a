"""The run's tokenizer, and the tokens that end and pad a response."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from config.load import load_config
from config.schema import ModelConfig
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import DataError
from trainer.random_model import END, PAD, START, build_tokenizer

BASE = load_config(["experiment=null", "data.generator.name=copy", "trainer.n_gpus_per_node=1"])
MODEL = BASE.actor_rollout_ref.model


def folder(path: Path, *, eos: Any = "absent", **tokens: str | None) -> str:
    """A folder with a tokenizer whose special tokens are changed, and with a generation config."""
    tokenizer = build_tokenizer("0123")
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(path)
    if eos != "absent":
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return str(path)


def model_config(**changes: Any) -> ModelConfig:
    return dataclasses.replace(MODEL, **changes)


def ids(*names: str) -> Any:
    return build_tokenizer("0123").convert_tokens_to_ids(list(names))


def test_end_and_padding_are_the_tokenizers(tmp_path: Path) -> None:
    found = load_tokenizer(folder(tmp_path), MODEL)
    assert (found.eos_token_ids, [found.pad_token_id], found.notices) == (ids(END), ids(PAD), [])


@pytest.mark.parametrize("eos", [None, ids(END)[0]])
def test_one_end_token_or_none_in_the_generation_config_adds_nothing(tmp_path: Path, eos: Any) -> None:
    assert load_tokenizer(folder(tmp_path, eos=eos), MODEL).eos_token_ids == ids(END)


def test_all_end_tokens_of_the_generation_config_count_besides_the_tokenizers(tmp_path: Path) -> None:
    eos = [*ids(START), *ids("user"), *ids(START)]
    assert load_tokenizer(folder(tmp_path, eos=eos), MODEL).eos_token_ids == sorted(ids(START, "user", END))


def test_the_generation_config_is_the_models_though_the_tokenizer_lies_elsewhere(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", eos=ids("user")[0])
    other = folder(tmp_path / "tokenizer", eos=ids("system")[0])
    found = load_tokenizer(model, model_config(tokenizer_path=other))
    assert found.eos_token_ids == sorted(ids("user", END))


def test_the_tokenizer_path_goes_before_the_models_folder(tmp_path: Path) -> None:
    other = build_tokenizer("xyz")
    other.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "empty").mkdir()
    found = load_tokenizer(str(tmp_path / "empty"), model_config(tokenizer_path=str(tmp_path / "tokenizer")))
    assert found.tokenizer.decode(found.tokenizer("zyx")["input_ids"]) == "zyx"


def test_without_a_padding_token_an_end_token_pads_with_a_notice(tmp_path: Path) -> None:
    found = load_tokenizer(folder(tmp_path, pad_token=None), MODEL)
    assert [found.pad_token_id] == ids(END)
    (notice,) = found.notices
    assert notice.startswith(f"The tokenizer has no padding token; token {found.pad_token_id}, an end token, pads.")


def test_without_any_end_token_the_file_to_write_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path, eos_token=None)
    with pytest.raises(DataError) as caught:
        load_tokenizer(path, MODEL)
    assert str(caught.value).startswith(f"{path}: neither the tokenizer nor {path}/generation_config.json names an end")


def test_an_end_token_of_the_generation_config_is_enough(tmp_path: Path) -> None:
    path = folder(tmp_path, eos_token=None, eos=ids("user"))
    assert load_tokenizer(path, MODEL).eos_token_ids == ids("user")


def test_the_chat_template_of_the_configuration_replaces_the_tokenizers(tmp_path: Path) -> None:
    path = folder(tmp_path)
    assert "im_start" in load_tokenizer(path, MODEL).tokenizer.chat_template
    found = load_tokenizer(path, model_config(custom_chat_template="{{ messages[0]['content'] }}"))
    made = found.tokenizer.apply_chat_template([{"role": "user", "content": "123"}], tokenize=False)
    assert made == "123"


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_a_tokenizer_is_named_with_the_key_that_holds_it(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(tmp_path), MODEL)
    message = str(caught.value)
    assert message.startswith(f"actor_rollout_ref.model.path={tmp_path}: no tokenizer can be loaded: ")
    assert len(message.splitlines()) == 1
    with pytest.raises(DataError, match=r"^actor_rollout_ref\.model\.tokenizer_path="):
        load_tokenizer("/no/model", model_config(tokenizer_path=str(tmp_path)))


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json"):
        load_tokenizer(path, MODEL)
