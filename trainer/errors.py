"""Errors that end a run, each with its exit code.

An error of this kind is for the user: its text holds the full key or file, the value, the rule and the way out, and
the CLI prints it without a traceback. Everything else is a fault of this code and rises with its traceback.
"""


class GovernorError(Exception):
    """A run that cannot go on, told to the user in one message.

    It carries its text alone, so that it survives pickling between Ray processes.
    """

    exit_code = 1


class ConfigError(GovernorError):
    """The configuration is refused (exit 2)."""

    exit_code = 2


class DataError(GovernorError):
    """A data file, a row or the tokenizer cannot be used (exit 3)."""

    exit_code = 3


class ResourceError(GovernorError):
    """The cluster does not have what the run asks for (exit 4)."""

    exit_code = 4


class DivergedError(GovernorError):
    """A number that must be finite is not (exit 5)."""

    exit_code = 5


class CheckpointError(GovernorError):
    """No checkpoint can be used, or none can be written (exit 6)."""

    exit_code = 6


class WorkerLostError(GovernorError):
    """A worker process died or does not answer (exit 7)."""

    exit_code = 7


class RewardError(GovernorError):
    """A reward function raised, timed out or returned what is not a reward (exit 8)."""

    exit_code = 8


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
