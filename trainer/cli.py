"""The console script `governor`."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, GovernorError
from trainer.ray_job import JobEnd, in_ray_job, say_end

if TYPE_CHECKING:
    from config.schema import GovernorConfig

USAGE = """governor train [key=value …]     train; without overrides the default job, experiment=copy_ppo
governor train experiment=NAME   another job of config/experiment/
governor config [key=value …]    print the whole configuration, checked and resolved
governor submit --address http://HEAD:8265 -- key=value …   train as a job on a Ray cluster
governor report RUN_DIR          write RUN_DIR/report.html anew
governor export RUN_DIR --out DIR    the policy of a run or checkpoint; --merged: a LoRA adapter merged into its base
governor train --multirun ablation=NAME     a sweep of config/ablation/, or key=1,2,3
governor compare DIR…            compare runs, or the members of a sweep
governor replay BATCH_DIR --checkpoint DIR key=a,b   one kept batch, many settings
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; 141 when nobody reads its output any more."""
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at its end, which must not find the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command is None:
        parser.print_usage()
        return 2
    # argparse gives back what follows an option; overrides may stand anywhere.
    flags = [text for text in rest if text.startswith("-")]
    if flags or (rest and "overrides" not in arguments):
        hint = "; overrides have the form key=value" if "overrides" in arguments else ""
        parser.error(f"no such option: {(flags or rest)[0]}{hint}")
    if "overrides" in arguments:
        arguments.overrides += rest
    if arguments.command == "train" and in_ray_job():
        return _run_as_job(arguments)
    return _run(arguments).code


def _run(arguments: argparse.Namespace) -> JobEnd:
    """Run a command; its exit code, and the text of its error if the user was told one."""
    try:
        return JobEnd(arguments.run(arguments), "")
    except GovernorError as error:
        from trainer.display import print_error

        print_error(str(error))
        return JobEnd(error.exit_code, str(error))
    except KeyboardInterrupt:
        return JobEnd(130, "")


def _run_as_job(arguments: argparse.Namespace) -> int:
    """Run as the entrypoint of a Ray job, whose last line says how it ended, whatever ended it."""
    try:
        end = _run(arguments)
    except SystemExit as exit_:  # a second signal
        end = JobEnd(exit_.code if isinstance(exit_.code, int) else 1, "")
    except Exception as error:
        traceback.print_exc()
        end = JobEnd(1, f"{type(error).__name__}: {error}")
    say_end(end)
    return end.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="governor", usage=USAGE, description="PPO for language models, with its limiters exact."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text, run in (("train", "train", _train), ("config", "print the configuration", _config)):
        command = commands.add_parser(name, help=text, usage=f"governor {name} [options] [key=value …]")
        command.set_defaults(run=run)
        command.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
        command.add_argument("--config-name", "-cn", default="ppo_trainer", help="a main file in place of ppo_trainer")
        command.add_argument(
            "--config-dir", "-cd", help="a folder with files of your own, such as experiment/mine.yaml"
        )
        if name == "train":
            command.add_argument(
                "--multirun", "-m", action="store_true", help="a sweep: ablation=NAME, or overrides with several values"
            )
    _add_submit(commands)
    report = commands.add_parser("report", help="write a run's report.html anew")
    report.set_defaults(run=_report)
    report.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    export = commands.add_parser("export", help="write the policy of a run or checkpoint to a folder of its own")
    export.set_defaults(run=_export)
    export.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path, help="a run's newest checkpoint, or the one")
    export.add_argument("--out", type=Path, required=True, help="the folder to make")
    export.add_argument("--merged", action="store_true", help="merge a LoRA adapter into its base")
    export.add_argument("--base", type=Path, help="where the base is, if it was moved")
    compare = commands.add_parser("compare", help="compare runs or the members of a sweep")
    compare.set_defaults(run=_compare)
    compare.add_argument(
        "folders", metavar="DIR", nargs="+", type=Path, help="run directories, or folders that hold some"
    )
    compare.add_argument("--out", type=Path, help="where compare.html and compare.md go; default: the first DIR")
    replay = commands.add_parser("replay", help="run a kept batch's update again under other settings")
    replay.set_defaults(run=_replay)
    replay.add_argument("batch_dir", metavar="BATCH_DIR", type=Path, help="rollouts/step_N of a run")
    replay.add_argument("overrides", nargs="*", metavar="key=a,b", help="settings; several values make a grid")
    replay.add_argument("--checkpoint", type=Path, help="the checkpoint of the step before; not for step 1")
    return parser


def _version() -> str:
    try:
        return metadata.version("governor-rl")
    except metadata.PackageNotFoundError:  # in a Ray job, which got the sources alone
        return "unknown: not installed here"


def _add_submit(commands: Any) -> None:
    submit = commands.add_parser(
        "submit", help="train as a job on a Ray cluster", usage="governor submit [options] -- [key=value …]"
    )
    submit.set_defaults(run=_submit)
    submit.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    submit.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)  # refused with a way out
    submit.add_argument("--config-name", "-cn", default="ppo_trainer", help="a main file in place of ppo_trainer")
    submit.add_argument("--config-dir", "-cd", help="a folder with files of your own, inside the working directory")
    submit.add_argument("--address", help="the cluster's dashboard, http://HEAD:8265; default: RAY_API_SERVER_ADDRESS")
    submit.add_argument(
        "--working-dir", metavar="DIR", type=Path, default=Path(), help="sent to all nodes; default: this folder"
    )
    submit.add_argument(
        "--exclude", metavar="NAME", action="append", default=[], help="a file, folder or pattern that is not sent"
    )
    submit.add_argument(
        "--env", metavar="NAME", action="append", default=[], help="an environment variable that goes with the job"
    )
    submit.add_argument(
        "--stop-wait",
        metavar="SECONDS",
        type=int,
        default=60,
        help="how long a job that is stopped may finish its step and save, before Ray kills it; default: 60",
    )
    instead = submit.add_mutually_exclusive_group()
    instead.add_argument("--no-wait", action="store_true", help="send the job and end; its log is not followed")
    instead.add_argument("--follow", metavar="ID", help="follow a job that is there, and return its exit code")
    instead.add_argument("--stop", metavar="ID", help="stop a job, and wait until it has ended")


def _checked(arguments: argparse.Namespace) -> "GovernorConfig":
    from config.load import ConfigFaults, load_config

    try:
        return load_config(arguments.overrides, config_name=arguments.config_name, config_dir=arguments.config_dir)
    except ConfigFaults as faults:
        raise ConfigError(str(faults)) from None


def _train(arguments: argparse.Namespace) -> int:
    if arguments.multirun:
        from trainer.sweep import run_sweep

        return run_sweep(arguments.overrides, config_name=arguments.config_name, config_dir=arguments.config_dir)
    sweeps = _ablations(arguments.overrides)
    if sweeps:
        raise ConfigError(f"{sweeps[0]}: names a sweep of several runs; add --multirun")
    config = _checked(arguments)
    from trainer.main_ppo import run

    return run(config)


def _ablations(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if text.startswith("ablation=") and text != "ablation=null"]


def _config(arguments: argparse.Namespace) -> int:
    from config.load import to_yaml

    print(to_yaml(_checked(arguments)), end="")
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    from trainer.submit import Submission, follow, stop, submit

    job_id = arguments.follow or arguments.stop
    if job_id:
        if arguments.overrides:
            raise ConfigError(f"{arguments.overrides[0]}: {job_id} is sent already and takes no overrides")
        return (follow if arguments.follow else stop)(job_id, address=arguments.address)
    flags = [text for text in arguments.overrides if text.startswith("-")]
    sweeps = [*(["--multirun"] if arguments.multirun else []), *_ablations(arguments.overrides)]
    sweeps += [text for text in flags if text in ("--multirun", "-m")]
    if sweeps:
        raise ConfigError(
            f"{sweeps[0]}: a sweep cannot be submitted: submit each of its members, or run it on a node of the cluster with "
            "RAY_ADDRESS=auto governor train --multirun …"
        )
    if flags:
        raise ConfigError(f"{flags[0]}: options of governor submit stand before the --, overrides key=value behind it")
    submission = Submission(
        overrides=arguments.overrides,
        config_name=arguments.config_name,
        config_dir=arguments.config_dir,
        working_dir=arguments.working_dir,
        exclude=arguments.exclude,
        env=arguments.env,
        stop_wait_s=arguments.stop_wait,
    )
    return submit(submission, address=arguments.address, wait=not arguments.no_wait)


def _report(arguments: argparse.Namespace) -> int:
    from trainer.report.page import write_report

    print(write_report(arguments.run_dir))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from trainer.export import export

    print(export(arguments.source, arguments.out, merged=arguments.merged, base=arguments.base))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from trainer.replay import replay

    print(replay(arguments.batch_dir, arguments.checkpoint, arguments.overrides), end="")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from trainer.compare import compare

    print(compare(arguments.folders, arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
