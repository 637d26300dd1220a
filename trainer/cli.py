"""The console script `governor`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import ConfigError, GovernorError

if TYPE_CHECKING:
    from config.schema import GovernorConfig

USAGE = """governor train [key=value …]     train; without overrides the default job, experiment=copy_ppo
governor train experiment=NAME   another job of config/experiment/
governor config [key=value …]    print the whole configuration, checked and resolved
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
    try:
        return arguments.run(arguments)
    except GovernorError as error:
        from trainer.display import print_error

        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="governor", usage=USAGE, description="PPO for language models, with its limiters exact."
    )
    parser.add_argument("--version", action="version", version=metadata.version("governor-rl"))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text, run in (("train", "train", _train), ("config", "print the configuration", _config)):
        command = commands.add_parser(name, help=text, usage=f"governor {name} [options] [key=value …]")
        command.set_defaults(run=run)
        command.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
        command.add_argument("--config-name", "-cn", default="ppo_trainer", help="a main file besides ppo_trainer")
        command.add_argument(
            "--config-dir", "-cd", help="a folder with files of your own, such as experiment/mine.yaml"
        )
        if name == "train":
            command.add_argument(
                "--multirun", "-m", action="store_true", help="a sweep: ablation=NAME, or overrides with several values"
            )
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
    sweeps = [text for text in arguments.overrides if text.startswith("ablation=") and text != "ablation=null"]
    if sweeps:
        raise ConfigError(f"{sweeps[0]}: names a sweep of several runs; add --multirun")
    config = _checked(arguments)
    from trainer.main_ppo import run

    return run(config)


def _config(arguments: argparse.Namespace) -> int:
    from config.load import to_yaml

    print(to_yaml(_checked(arguments)), end="")
    return 0


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
