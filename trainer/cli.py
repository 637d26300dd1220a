"""The console script `governor`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from trainer.errors import GovernorError

USAGE = """governor train [key=value …]     train; without overrides the default job, experiment=copy_ppo
governor train experiment=NAME   another job of config/experiment/
governor config [key=value …]    print the whole configuration, checked and resolved
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
    parser = argparse.ArgumentParser(
        prog="governor", usage=USAGE, description="PPO for language models, with its limiters exact."
    )
    parser.add_argument("--version", action="version", version=metadata.version("governor-rl"))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in (("train", "train"), ("config", "print the configuration")):
        command = commands.add_parser(name, help=text, usage=f"governor {name} [options] [key=value …]")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
        command.add_argument("--config-name", "-cn", default="ppo_trainer", help="a main file besides ppo_trainer")
        command.add_argument(
            "--config-dir", "-cd", help="a folder with files of your own, such as experiment/mine.yaml"
        )
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command is None:
        parser.print_usage()
        return 2
    flags = [text for text in rest if text.startswith("-")]
    if flags:
        parser.error(f"no such option: {flags[0]}; overrides have the form key=value")
    try:
        return _run(arguments.command, [*arguments.overrides, *rest], arguments.config_name, arguments.config_dir)
    except GovernorError as error:
        from trainer.display import print_error

        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(command: str, overrides: Sequence[str], config_name: str, config_dir: str | None) -> int:
    from config.load import ConfigFaults, load_config, to_yaml
    from trainer.errors import ConfigError

    try:
        config = load_config(overrides, config_name=config_name, config_dir=config_dir)
    except ConfigFaults as faults:
        raise ConfigError(str(faults)) from None
    if command == "config":
        print(to_yaml(config), end="")
        return 0
    from trainer.main_ppo import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
