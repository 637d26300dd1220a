"""`governor export`: both kinds open with public libraries and give the policy's logits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from config.load import load_config
from trainer.cli import main
from trainer.errors import CheckpointError, ConfigError
from trainer.export import export
from trainer.main_ppo import run
from workers.engine.lora import ADAPTER_FILES, WEIGHTS_FILE

pytestmark = pytest.mark.usefixtures("ray_session")
SHORT = [
    "experiment=copy_grpo",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
]


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    changes = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=1.0e-2"]
    assert run(load_config([*SHORT, *changes, f"trainer.default_local_dir={root}"])) == 0
    return root


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model.eval()(input_ids=torch.arange(18).view(2, 9) + 2).logits


def with_peft(base: Path, adapter: Path) -> torch.nn.Module:
    import peft

    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)


def test_an_adapter_opens_with_peft_on_its_base(lora_run: Path, tmp_path: Path) -> None:
    """That of the newest checkpoint of a run; it names its base itself."""
    import peft

    assert main(["export", str(lora_run), "--out", str(tmp_path / "adapter")]) == 0
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    newest = lora_run / "checkpoints/global_step_2/actor"
    assert torch.equal(logits(opened), logits(with_peft(lora_run / "model", newest)))
    base = AutoModelForCausalLM.from_pretrained(lora_run / "model")
    assert float((logits(opened) - logits(base)).abs().max()) > 1e-3
    AutoTokenizer.from_pretrained(tmp_path / "adapter")


def test_a_merged_model_opens_with_from_pretrained_and_gives_the_policys_logits(lora_run: Path, tmp_path: Path) -> None:
    checkpoint = lora_run / "checkpoints/global_step_1"
    assert main(["export", str(checkpoint), "--out", str(tmp_path / "merged"), "--merged"]) == 0
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    policy = with_peft(lora_run / "model", checkpoint / "actor")
    assert torch.allclose(logits(opened), logits(policy), rtol=0, atol=1e-6)
    assert torch.equal(logits(opened), logits(policy.merge_and_unload()))
    assert not [name for name in ADAPTER_FILES if (tmp_path / "merged" / name).exists()]
    ours, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", lora_run / "model"))
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in base.items()}
    assert opened.generation_config.eos_token_id == 2
    AutoTokenizer.from_pretrained(tmp_path / "merged")


def test_a_checkpoint_is_found_from_the_folder_that_it_lies_in(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name in (("checkpoints", "global_step_2"), ("checkpoints/global_step_2", ".")):
        monkeypatch.chdir(lora_run / folder)
        export(Path(name), tmp_path / folder, merged=True, base=None)
        assert (tmp_path / folder / "model.safetensors").exists()


def test_a_run_that_was_moved_with_its_base_is_exported_all_the_same(lora_run: Path, tmp_path: Path) -> None:
    lora_run.rename(tmp_path / "moved")
    try:
        export(tmp_path / "moved", tmp_path / "merged", merged=True, base=None)
        export(tmp_path / "moved", tmp_path / "adapter", merged=False, base=None)
        settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(tmp_path / "moved/model")
        (tmp_path / "moved/model").rename(tmp_path / "model")
        with pytest.raises(ConfigError, match="is not there; say where it is with --base"):
            export(tmp_path / "moved", tmp_path / "again", merged=True, base=None)
        (tmp_path / "model").rename(tmp_path / "moved/model")
    finally:
        (tmp_path / "moved").rename(lora_run)
    assert (tmp_path / "merged/model.safetensors").exists()


def test_a_checkpoint_that_does_not_hold_is_not_exported(lora_run: Path, tmp_path: Path) -> None:
    shutil.copytree(lora_run / "checkpoints/global_step_2", tmp_path / "global_step_2")
    (tmp_path / "global_step_2/actor" / WEIGHTS_FILE).write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes, the manifest says"):
        export(tmp_path / "global_step_2", tmp_path / "out", merged=False, base=None)
    assert not (tmp_path / "out").exists()


def test_a_base_that_is_elsewhere_is_named_with_base_and_must_be_the_same(lora_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(lora_run, run_dir)
    shutil.copytree(lora_run / "model", tmp_path / "base")
    export(run_dir, tmp_path / "merged", merged=True, base=tmp_path / "base")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        other.model.norm.weight.add_(0.5)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="made for a base with other weights"):
        export(run_dir, tmp_path / "again", merged=True, base=tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir() if "again" in path.name] == []


def test_what_cannot_be_exported_is_told(lora_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out=.*: is there already"):
        export(lora_run, tmp_path, merged=False, base=None)
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        export(tmp_path, tmp_path / "out", merged=False, base=None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out=.*: cannot be written"):
        export(lora_run, tmp_path / "file" / "out", merged=True, base=None)
    with pytest.raises(ConfigError, match=r"--base=.*: only --merged reads the base"):
        export(lora_run, tmp_path / "out", merged=False, base=lora_run / "model")
    with pytest.raises(ConfigError, match=r"--base=.*: no Hugging Face model there"):
        export(lora_run, tmp_path / "out", merged=True, base=tmp_path / "nowhere")


def test_a_policy_that_was_trained_whole_is_copied(tmp_path: Path) -> None:
    assert run(load_config([*SHORT, f"trainer.default_local_dir={tmp_path / 'run'}"])) == 0
    for name, merged in (("a", False), ("b", True)):
        export(tmp_path / "run", tmp_path / name, merged=merged, base=None)
        actor = load_file(tmp_path / "run/checkpoints/global_step_2/actor/model.safetensors")
        copied = load_file(tmp_path / name / "model.safetensors")
        assert all(actor[key].equal(copied[key]) for key in actor)
    assert not (tmp_path / "a" / WEIGHTS_FILE).exists()
