"""What a run consists of before Ray starts: the old run in its folder, its models, its data."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from config.load import flatten, to_plain
from config.notices import notices
from config.schema import GovernorConfig
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.data.dataset import PromptDataset, load_dataset, steps_per_epoch
from trainer.data.tokenizer import PolicyTokenizer, load_tokenizer
from trainer.display import Display
from trainer.errors import ConfigError, DataError
from trainer.random_model import build_random_model
from trainer.run_dir import ANOTHER_RUN, RunDir, last_step
from workers.engine.lora import ADAPTER_FILES, StartAdapter, prepare_adapter
from workers.engine.models import weights_fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """What a run consists of before Ray starts."""

    config: GovernorConfig
    run_dir: RunDir
    display: Display
    checkpoint: Checkpoint | None  # where it goes on from
    model_path: str  # of the run's first weights
    adapter: StartAdapter | None  # with LoRA, the first one on them
    tokenizer: PolicyTokenizer
    train_set: PromptDataset
    val_set: PromptDataset | None
    num_steps: int
    fingerprints: dict[str, str]  # of the weights that every start reads anew, by the key of their folder

    @property
    def only_looks(self) -> bool:
        """Whether a run that is there is only validated, and left as it is."""
        return self.config.trainer.val_only and self.checkpoint is not None

    def data_sources(self) -> set[str]:
        """Those of all rows."""
        sets = [self.train_set] if self.val_set is None else [self.train_set, self.val_set]
        return {row.data_source for dataset in sets for row in dataset.rows}


def prepare(config: GovernorConfig, run_dir: RunDir, display: Display) -> RunParts | None:
    """All parts of a run, its series cut back to where it goes on; None where it has its steps already."""
    checkpoint = _prepare_folder(config, run_dir, display)
    for notice in notices(config):
        display.notice(notice)
    path = _model_path(config, run_dir)
    adapter = _start_adapter(config, run_dir, path, checkpoint)
    tokenizer = load_tokenizer(path, config.actor_rollout_ref.model)
    for notice in tokenizer.notices:
        display.notice(notice)
    train_set, val_set = _load_data(config, tokenizer, display)
    num_steps = _num_steps(config, train_set)
    display.num_steps, display.config = num_steps, flatten(to_plain(config))
    done = checkpoint.step if checkpoint else 0
    finished = done >= num_steps and last_step(run_dir.read("metrics.jsonl")) >= num_steps
    if finished and not config.trainer.val_only:
        display.say(
            f"{run_dir.root} has its {num_steps} steps already. For more, raise trainer.total_training_steps or "
            f"trainer.total_epochs; for a new run, give it {ANOTHER_RUN}."
        )
        return None
    if checkpoint is not None:
        _check_data(checkpoint, train_set)
    parts = RunParts(
        config=config,
        run_dir=run_dir,
        display=display,
        checkpoint=checkpoint,
        model_path=path,
        adapter=adapter,
        tokenizer=tokenizer,
        train_set=train_set,
        val_set=val_set,
        num_steps=num_steps,
        fingerprints=_fingerprints(config, run_dir, checkpoint),
    )
    if not parts.only_looks:
        run_dir.cut_back(done)
    return parts


def _prepare_folder(config: GovernorConfig, run_dir: RunDir, display: Display) -> Checkpoint | None:
    """Settle what an old run in the folder means: none, moved aside, or gone on with from its newest valid checkpoint."""
    if run_dir.has_run():
        if config.trainer.resume_mode == "disable":
            display.say(f"The old run was moved to {run_dir.move_aside()}")
        else:
            run_dir.check_changes(config)
    store = CheckpointStore(run_dir.root / "checkpoints", max_to_keep=config.trainer.max_ckpt_to_keep)
    checkpoint, reasons = store.newest_valid()
    for reason in reasons:
        display.notice(f"This checkpoint is passed over: {reason}")
    if checkpoint is not None:
        display.say(f"Going on from step {checkpoint.step}: {checkpoint.folder}")
    return checkpoint


def _model_path(config: GovernorConfig, run_dir: RunDir) -> str:
    """The folder of the policy's first weights; built in the run directory where the configuration names none.

    Raises:
        ConfigError: the folder is not one of a model.
    """
    model = config.actor_rollout_ref.model
    if model.path is None:
        folder = run_dir.root / "model"
        build_random_model(model.random_init, folder, seed=config.data.seed)
        return str(folder)
    for key, path in (
        ("actor_rollout_ref.model.path", model.path),
        ("critic.model.path", config.critic.model.path or model.path),
    ):
        if not (Path(path) / "config.json").is_file():
            raise ConfigError(
                f"{key}={path}: no Hugging Face model there (config.json is missing). Nothing is downloaded at run time: name a "
                "local folder, for example one made by scripts/prepare_smollm2.py."
            )
    return absolute(model.path)


def absolute(path: str) -> str:
    """A folder for the devices' processes, which need not have this one's working directory."""
    return str(Path(path).resolve())


def _start_adapter(
    config: GovernorConfig, run_dir: RunDir, base: str, checkpoint: Checkpoint | None
) -> StartAdapter | None:
    """With LoRA, the run's first adapter, built in the run directory where the configuration names none.

    Raises:
        ConfigError: peft is missing, layers that cannot have an adapter, or an adapter that does not fit; the
            checkpoint's too.
    """
    model = config.actor_rollout_ref.model
    actor = None if checkpoint is None else checkpoint.folder / "actor"
    if model.lora_rank == 0:
        if actor is not None and (actor / ADAPTER_FILES[0]).exists():
            raise ConfigError(
                f"actor_rollout_ref.model.lora_rank=0: {actor} holds a LoRA adapter; a run cannot change over. Merge it with "
                "governor export --merged, and start a new run from that model."
            )
        return None
    return prepare_adapter(model, base, run_dir.root / "adapter", seed=config.data.seed, checkpoint=actor)


def _load_data(
    config: GovernorConfig, tokenizer: PolicyTokenizer, display: Display
) -> tuple[PromptDataset, PromptDataset | None]:
    """Training and validation prompts.

    Raises:
        DataError: rows that cannot be used, too few of them, or a data source that nothing can score.
    """
    from workers.reward.manager import uses_functions

    data = config.data
    train_set = load_dataset(data, "train", tokenizer)
    has_val = bool(data.val_files or data.generator.name)
    val_set = load_dataset(data, "val", tokenizer) if has_val else None
    for name, dataset in (("training", train_set), ("validation", val_set)):
        if dataset is None:
            continue
        if dataset.num_filtered or dataset.num_truncated:
            display.notice(
                f"Of the {name} prompts {dataset.num_filtered} were longer than data.max_prompt_length={data.max_prompt_length} "
                f"and left out, {dataset.num_truncated} cut ({data.truncation})."
            )
        if uses_functions(config.reward) and config.reward.custom_reward_function.path is None:
            _check_scorers({row.data_source: row.where for row in dataset.rows})
    if len(train_set) < data.train_batch_size:
        raise DataError(
            f"{len(train_set)} training prompts do not fill one step of data.train_batch_size={data.train_batch_size}; "
            "lower it, or add rows"
        )
    return train_set, val_set


def _check_scorers(sources: Mapping[str, str]) -> None:
    """Check that there is a built-in scorer for each data source; `sources` says where one is met.

    Raises:
        ConfigError: its package is not installed.
        DataError: there is none.
    """
    from config.gym_tasks import GYM_PREFIX
    from workers.reward.scorers import SCORERS
    from workers.reward.verifiers import missing_extra

    for source, where in sources.items():
        if source not in SCORERS:
            known = ", ".join(sorted(name for name in SCORERS if not name.startswith(GYM_PREFIX)))
            raise DataError(
                f"{where}: no built-in scorer for data source {source!r} (there are {known}, and {GYM_PREFIX}TASK); set "
                "reward.custom_reward_function.path and .name, or score with reward.reward_model and combine=replace alone"
            )
        extra = missing_extra(source)
        if extra is not None:
            raise ConfigError(
                f"{where}: data source {source!r} is scored by a package that is not installed: pip install "
                f"'governor-rl[{extra}]'"
            )


def _num_steps(config: GovernorConfig, train_set: PromptDataset) -> int:
    trainer = config.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    return trainer.total_epochs * steps_per_epoch(len(train_set), config.data.train_batch_size)


def _check_data(checkpoint: Checkpoint, train_set: PromptDataset) -> None:
    if checkpoint.state()["data"]["fingerprint"] != train_set.fingerprint():
        raise DataError(
            f"{checkpoint.folder} was trained on other prompts than the files now hold; bring the old files back, or start "
            f"a new run with {ANOTHER_RUN}"
        )


def _fingerprints(config: GovernorConfig, run_dir: RunDir, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Of the weights that every start reads anew, by the key of their folder: the reference's and the reward model's.

    Raises:
        ConfigError: a folder holds other weights than when the run began.
    """
    folders = {}
    if config.uses_reference:
        folders["actor_rollout_ref.model.path"] = config.actor_rollout_ref.model.path
    if config.reward.reward_model.enable:
        folders["reward.reward_model.model_path"] = config.reward.reward_model.model_path
    found = {key: weights_fingerprint(path) for key, path in folders.items() if path is not None}
    known = {} if checkpoint is None else run_dir.state().get("models", {})
    for key, fingerprint in found.items():
        if known.get(key, fingerprint) != fingerprint and key not in config.trainer.resume_allow_changes:
            raise ConfigError(
                f"{key}={folders[key]}: the folder holds other weights than when this run began; bring the old ones back, start a "
                f"new run with {ANOTHER_RUN}, or set trainer.resume_allow_changes=[{key}] to go on with these"
            )
    return found
