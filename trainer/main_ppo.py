"""One run from its configuration to its end: `run(config)`, and `python -m trainer.main_ppo key=value …`."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from config.load import flatten, to_plain
from config.notices import notices
from config.pools import pools_of, role_pools
from config.schema import GovernorConfig
from trainer.batch import PPOBatch
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.data.dataset import PromptDataset, load_dataset, steps_per_epoch
from trainer.data.tokenizer import PolicyTokenizer, load_tokenizer
from trainer.display import Display
from trainer.errors import ConfigError, DataError, GovernorError
from trainer.metrics import Metrics
from trainer.plan import adapter_line, batch_plan
from trainer.random_model import build_random_model
from trainer.ray_job import check_folders
from trainer.rollouts import AboutBatch, save_batch
from trainer.run_dir import ANOTHER_RUN, RunDir, last_step
from trainer.samples import sample_rows
from trainer.tracking import Trackers
from workers.engine.lora import ADAPTER_FILES, StartAdapter, prepare_adapter
from workers.engine.models import AdapterSpec, PolicySpec

if TYPE_CHECKING:
    from trainer.ppo.ray_trainer import WorkerGroups
    from workers.pool import Pools
    from workers.reward.group import RewardFunctions

SHOWN_SAMPLES = 2


class FileRecord:
    """A run's record: series in the run directory, trackers, the terminal."""

    def __init__(
        self,
        run_dir: RunDir,
        trackers: Trackers,
        display: Display,
        tokenizer: PolicyTokenizer,
        config: GovernorConfig,
        model_path: str,
        adapter_path: str | None,
    ) -> None:
        self.run_dir, self.trackers, self.display = run_dir, trackers, display
        self.tokenizer, self.config = tokenizer, config
        self.model_path, self.adapter_path = model_path, adapter_path

    def updates(self, step: int, role: str, updates: list[Metrics]) -> None:
        """One line per update in `updates.jsonl`."""
        lines = [{"step": step, "role": role, "update": i, **update} for i, update in enumerate(updates)]
        self.run_dir.append("updates.jsonl", lines)

    def samples(self, step: int, batch: PPOBatch, scored: list[Any], new_log_probs: Tensor) -> None:
        """Some responses in `samples.jsonl`, fewer on the terminal."""
        rows = sample_rows(
            step, batch, scored, new_log_probs, self.tokenizer.tokenizer, self.config.actor_rollout_ref.actor
        )
        self.run_dir.append("samples.jsonl", rows)
        self.display.samples(step, rows[:SHOWN_SAMPLES])

    def batch(self, step: int, batch: PPOBatch, kl_coef: float) -> None:
        """The whole batch, in `trainer.rollout_data_dir`."""
        choice = self.config.trainer.rollout_data_dir
        root = self.run_dir.root / "rollouts" if choice is True else Path(str(choice))
        about = AboutBatch(
            step=step,
            num_steps=self.display.num_steps,
            kl_coef=kl_coef,
            eos_token_ids=self.tokenizer.eos_token_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            model_path=self.model_path,
            adapter_path=self.adapter_path,
        )
        save_batch(root, batch, about, self.config)

    def validation(self, step: int, metrics: Metrics) -> None:
        """A validation by itself: shown, and kept nowhere."""
        self.display.step(step, metrics)

    def metrics(self, step: int, metrics: Metrics) -> None:
        """One line in `metrics.jsonl`, the trackers, the terminal."""
        self.run_dir.append("metrics.jsonl", [{"step": step, **metrics}])
        self.trackers.log(metrics, step)
        self.display.step(step, metrics)


class StopSignals:
    """INT and TERM: the first asks the run to stop after its step, the second ends the process at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.received: int | None = None
        self.ended_by: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        return self

    def install(self) -> None:
        """Take the signals; to be called again after ray.init, which takes TERM for itself and aborts on it."""
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            for number in self._before:
                signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _: Any) -> None:
        if self.received is not None:
            self.ended_by = number
            sys.exit(128 + number)
        self.received = number
        self.say(
            f"{signal.Signals(number).name}: this step is finished and saved, then the run stops; once more ends it at once"
        )


def run(config: GovernorConfig) -> int:
    """Train, and return the exit code: 0, or 130 and 143 when a signal stopped the run.

    Raises:
        GovernorError: the run could not go on; `run.json` says so too.
    """
    check_folders(flatten(to_plain(config)))
    run_dir = RunDir(Path(config.trainer.default_local_dir).resolve())
    run_dir.acquire()
    display = Display(num_steps=0, console="console" in config.trainer.logger)
    signals = StopSignals(display.notice)
    try:
        with signals:
            code = _run(config, run_dir, display, signals)
    except BaseException as error:
        display.stop()
        code, reason = error.exit_code if isinstance(error, GovernorError) else 1, f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit) and signals.ended_by is not None:
            # The code is set again, since Ray, while it waits, raises SystemExit(1) for one that a handler raised.
            code = error.code = 128 + signals.ended_by
            reason = f"{signal.Signals(signals.ended_by).name}, twice"
        if run_dir.is_running:
            run_dir.write_state("failed", exit_code=code, reason=reason)
        raise
    finally:
        run_dir.release()
    return code


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """What a run consists of before Ray starts."""

    config: GovernorConfig
    run_dir: RunDir
    display: Display
    signals: StopSignals
    checkpoint: Checkpoint | None  # where it goes on from
    last_recorded_step: int  # in metrics.jsonl, after what lies behind the checkpoint was cut off
    model_path: str  # of the run's first weights
    adapter: StartAdapter | None  # with LoRA, the first one on them
    tokenizer: PolicyTokenizer
    train_set: PromptDataset
    val_set: PromptDataset | None
    num_steps: int

    def data_sources(self) -> set[str]:
        """Those of all rows."""
        sets = [self.train_set] if self.val_set is None else [self.train_set, self.val_set]
        return {row.data_source for dataset in sets for row in dataset.rows}


def _run(config: GovernorConfig, run_dir: RunDir, display: Display, signals: StopSignals) -> int:
    """The parts of a run in order: old run, model, data, then the steps."""
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
        return 0
    if checkpoint is not None:
        _check_data(checkpoint, train_set)
    only_looks = config.trainer.val_only and checkpoint is not None  # the run stays as it is
    if not only_looks:
        run_dir.cut_back(done)
    parts = RunParts(
        config=config,
        run_dir=run_dir,
        display=display,
        signals=signals,
        checkpoint=checkpoint,
        last_recorded_step=done if only_looks else last_step(run_dir.read("metrics.jsonl")),
        model_path=path,
        adapter=adapter,
        tokenizer=tokenizer,
        train_set=train_set,
        val_set=val_set,
        num_steps=num_steps,
    )
    if only_looks:
        _train(parts, Trackers.none(display.notice))
        return 0
    return _run_recorded(parts)


def _run_recorded(parts: RunParts) -> int:
    """The steps, with the run's state, trackers and report around them."""
    config, run_dir, display = parts.config, parts.run_dir, parts.display
    run_dir.write_config(config)
    run_dir.write_state("running", exit_code=None, reason=None, seed=config.data.seed)
    plan = batch_plan(config, num_train_rows=len(parts.train_set), num_steps=parts.num_steps)
    display.plan(
        plan if parts.adapter is None else [*plan, adapter_line(config.actor_rollout_ref.model, parts.adapter)]
    )
    trackers = _make_trackers(config, run_dir, display)
    run_dir.write_state("running", tracker_ids=trackers.run_ids())
    try:
        complete = _train(parts, trackers)
    finally:
        display.stop()
        trackers.close()
    if complete:
        run_dir.write_state("done", exit_code=0, reason=None)
        _write_report(run_dir, display)
        display.say(f"Done: {run_dir.root}")
        return 0
    number = parts.signals.received
    assert number is not None, "only a signal stops a run before its end"
    run_dir.write_state("stopped", exit_code=128 + number, reason=signal.Signals(number).name)
    _write_report(run_dir, display)
    display.say(f"Stopped and saved: {run_dir.root}. The same command goes on from here.")
    return 128 + number


def _train(parts: RunParts, trackers: Trackers) -> bool:
    """Start Ray and the workers, and run the steps that are left; False if a signal stopped them."""
    import ray

    from trainer.ppo.ray_trainer import RayPPOTrainer
    from trainer.ray_session import start_ray
    from workers.reward.group import RewardFunctions
    from workers.reward.manager import uses_functions

    config, checkpoint, tokenizer = parts.config, parts.checkpoint, parts.tokenizer
    logs = parts.run_dir.root / "logs"
    started_ray = start_ray(config)
    parts.signals.install()
    functions, pools = None, None
    try:
        if uses_functions(config.reward):
            functions = RewardFunctions(config.reward, parts.data_sources(), log_dir=str(logs))
        pools = open_pools(config, logs)
        groups = _worker_groups(parts, pools, functions)

        def save_beside(aside: str) -> None:
            pools.save_rng(aside)
            tokenizer.tokenizer.save_pretrained(f"{aside}/actor")

        trainer = RayPPOTrainer(
            config,
            groups=groups,
            train_set=parts.train_set,
            val_set=parts.val_set,
            pad_token_id=tokenizer.pad_token_id,
            num_steps=parts.num_steps,
            record=FileRecord(
                parts.run_dir,
                trackers,
                parts.display,
                tokenizer,
                config,
                parts.model_path,
                None if parts.adapter is None else parts.adapter.path,
            ),
            checkpoints=CheckpointStore(
                parts.run_dir.root / "checkpoints", max_to_keep=config.trainer.max_ckpt_to_keep
            ),
            save_beside=save_beside,
            memory=pools.memory,
            mfu=groups.actor_rollout.mfu,
            should_stop=lambda: parts.signals.received is not None,
        )
        if checkpoint is not None:
            pools.load_rng(str(checkpoint.folder))
            trainer.resume(checkpoint, last_recorded_step=parts.last_recorded_step)
        parts.display.start(trainer.step)
        return trainer.fit()
    finally:
        if pools is not None:
            pools.shutdown()
        if functions is not None:
            functions.shutdown()
        if started_ray:
            ray.shutdown()


def _worker_groups(parts: RunParts, pools: "Pools", functions: "RewardFunctions | None") -> "WorkerGroups":
    """The roles of the run, built one after another in their pools' processes."""
    from trainer.ppo.ray_trainer import WorkerGroups
    from workers.groups import ActorRolloutGroup, CriticGroup, ReferenceGroup
    from workers.reward.group import RewardGroup
    from workers.reward.model_group import RewardModelGroup

    config, tokenizer = parts.config, parts.tokenizer
    roles, reference, critic, reward_model = config.actor_rollout_ref, None, None, None
    pool_of = {role: pools[name] for role, name in role_pools(config).items()}
    policy, first_policy = _policies(parts)
    actor = ActorRolloutGroup(pool_of["actor"], roles, policy, rollout_pool=pool_of["rollout"])
    if config.uses_reference:
        reference = ReferenceGroup(pool_of["ref"], roles, first_policy)
    if config.uses_critic:
        critic = CriticGroup(
            pool_of["critic"],
            config.critic,
            _critic_path(parts),
            seed=config.data.seed,
            max_response_length=config.data.max_response_length,
        )
    if config.reward.reward_model.enable:
        reward_model = RewardModelGroup(pool_of["reward_model"], config.reward.reward_model)
    reward = RewardGroup(
        config.reward,
        tokenizer.tokenizer,
        tokenizer.eos_token_ids,
        max_response_length=config.data.max_response_length,
        functions=functions,
        model=reward_model,
    )
    return WorkerGroups(actor_rollout=actor, reward=reward, reference=reference, critic=critic)


def _policies(parts: RunParts) -> tuple[PolicySpec, PolicySpec]:
    """The policy that is trained, as it goes on, and the run's first, which is the reference."""
    tokens = parts.tokenizer
    first = PolicySpec(path=parts.model_path, eos_token_ids=tokens.eos_token_ids, pad_token_id=tokens.pad_token_id)
    here = None if parts.checkpoint is None else str(parts.checkpoint.folder / "actor")
    if parts.adapter is None:
        return (first if here is None else replace(first, path=here)), first
    # A fresh adapter changes nothing: without it stands the reference. A trained one is kept as it was at the start.
    trained = parts.config.actor_rollout_ref.model.lora_adapter_path is not None
    kept = parts.adapter.path if trained and parts.config.uses_reference else None
    policy = replace(first, adapter=AdapterSpec(path=here or parts.adapter.path, reference=kept))
    return policy, policy


def _critic_path(parts: RunParts) -> str:
    """The folder that the critic goes on from, or begins with."""
    if parts.checkpoint is not None:
        return str(parts.checkpoint.folder / "critic")
    path = parts.config.critic.model.path
    return parts.model_path if path is None else _absolute(path)


def open_pools(config: GovernorConfig, log_dir: Path, names: Collection[str] | None = None) -> "Pools":
    """The processes on devices that the configuration asks for, of the pools of these names or of all; Ray must run."""
    from workers.placement import PoolSpec
    from workers.pool import Pools

    trainer, device = config.trainer, _device(config)
    return Pools(
        [
            PoolSpec(
                name=name,
                nnodes=pool.nnodes,
                devices_per_node=pool.n_gpus_per_node,
                device=device,
                cpu_threads=trainer.cpu_threads,
                timeout_s=config.actor_rollout_ref.nccl_timeout,
                placement_timeout_s=trainer.placement_timeout_s,
                log_dir=str(log_dir),
            )
            for name, pool in pools_of(config).items()
            if names is None or name in names
        ]
    )


# --- parts -----------------------------------------------------------------------------------------------------------


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
    return _absolute(model.path)


def _absolute(path: str) -> str:
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


def _write_report(run_dir: RunDir, display: Display) -> None:
    from trainer.report.page import write_report

    try:
        display.say(f"Report: {write_report(run_dir.root)}")
    except Exception as error:  # a picture of a run must not cost the run
        display.notice(f"The report could not be written: {type(error).__name__}: {error}")


def _make_trackers(config: GovernorConfig, run_dir: RunDir, display: Display) -> Trackers:
    known = json.loads((run_dir.root / "run.json").read_text(encoding="utf-8"))
    run_ids: Mapping[str, str] = known.get("tracker_ids") or {}
    return Trackers(
        config.trainer.logger,
        project=config.trainer.project_name,
        name=config.trainer.experiment_name,
        root=run_dir.root,
        run_ids=run_ids,
        config=to_plain(config),
        warn=display.notice,
    )


def _device(config: GovernorConfig) -> str:
    import ray

    if config.trainer.device != "auto":
        return config.trainer.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


if __name__ == "__main__":
    from trainer.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
