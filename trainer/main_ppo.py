"""One run from its configuration to its end: `run(config)`, and `python -m trainer.main_ppo key=value …`."""

import signal
import sys
from pathlib import Path

from config.load import flatten, to_plain
from config.schema import GovernorConfig
from trainer.checkpoint import CheckpointStore
from trainer.display import Display
from trainer.errors import GovernorError
from trainer.plan import adapter_line, batch_plan
from trainer.prepare import RunParts, prepare
from trainer.ray_job import check_folders
from trainer.record import FileRecord
from trainer.run_dir import RunDir, last_step
from trainer.signals import StopSignals
from trainer.tracking import Trackers


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


def _run(config: GovernorConfig, run_dir: RunDir, display: Display, signals: StopSignals) -> int:
    parts = prepare(config, run_dir, display)
    if parts is None:
        return 0
    if parts.only_looks:
        _train(parts, signals, Trackers.none(display.notice))
        return 0
    return _run_recorded(parts, signals)


def _run_recorded(parts: RunParts, signals: StopSignals) -> int:
    """The steps, with the run's state, trackers and report around them."""
    config, run_dir, display = parts.config, parts.run_dir, parts.display
    run_dir.write_config(config)
    run_dir.write_state("running", exit_code=None, reason=None, seed=config.data.seed, models=parts.fingerprints)
    plan = batch_plan(config, num_train_rows=len(parts.train_set), num_steps=parts.num_steps)
    display.plan(
        plan if parts.adapter is None else [*plan, adapter_line(config.actor_rollout_ref.model, parts.adapter)]
    )
    trackers = _make_trackers(config, run_dir, display)
    run_dir.write_state("running", tracker_ids=trackers.run_ids())
    try:
        complete = _train(parts, signals, trackers)
    finally:
        display.stop()
        trackers.close()
    if complete:
        run_dir.write_state("done", exit_code=0, reason=None)
        _write_report(run_dir, display)
        display.say(f"Done: {run_dir.root}")
        return 0
    number = signals.received
    assert number is not None, "only a signal stops a run before its end"
    run_dir.write_state("stopped", exit_code=128 + number, reason=signal.Signals(number).name)
    _write_report(run_dir, display)
    display.say(f"Stopped and saved: {run_dir.root}. The same command goes on from here.")
    return 128 + number


def _train(parts: RunParts, signals: StopSignals, trackers: Trackers) -> bool:
    """Start Ray and the workers, and run the steps that are left; False if a signal stopped them."""
    import ray

    from trainer.ppo.ray_trainer import RayPPOTrainer
    from trainer.ray_session import start_ray
    from trainer.roles import open_pools, worker_groups
    from workers.reward.group import RewardFunctions
    from workers.reward.manager import uses_functions

    config, checkpoint, tokenizer = parts.config, parts.checkpoint, parts.tokenizer
    logs = parts.run_dir.root / "logs"
    started_ray = start_ray(config)
    signals.install()
    functions, pools = None, None
    try:
        if uses_functions(config.reward):
            functions = RewardFunctions(config.reward, parts.data_sources(), log_dir=str(logs))
        pools = open_pools(config, logs)
        groups = worker_groups(parts, pools, functions)

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
            should_stop=lambda: signals.received is not None,
        )
        if checkpoint is not None:
            pools.load_rng(str(checkpoint.folder))
            recorded = checkpoint.step if parts.only_looks else last_step(parts.run_dir.read("metrics.jsonl"))
            trainer.resume(checkpoint, last_recorded_step=recorded)
        parts.display.start(trainer.step)
        return trainer.fit()
    finally:
        if pools is not None:
            pools.shutdown()
        if functions is not None:
            functions.shutdown()
        if started_ray:
            ray.shutdown()


def _write_report(run_dir: RunDir, display: Display) -> None:
    from trainer.report.page import write_report

    try:
        display.say(f"Report: {write_report(run_dir.root)}")
    except Exception as error:  # a picture of a run must not cost the run
        display.notice(f"The report could not be written: {type(error).__name__}: {error}")


def _make_trackers(config: GovernorConfig, run_dir: RunDir, display: Display) -> Trackers:
    return Trackers(
        config.trainer.logger,
        project=config.trainer.project_name,
        name=config.trainer.experiment_name,
        root=run_dir.root,
        run_ids=run_dir.state().get("tracker_ids") or {},
        config=to_plain(config),
        warn=display.notice,
    )


if __name__ == "__main__":
    from trainer.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
