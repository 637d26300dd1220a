"""The members of a sweep through one of Hydra's launchers, such as joblib's or submitit's: `hydra/launcher=NAME`.

Hydra composes nothing that a run reads: its job is to call `LaunchedMember` once for each member, wherever that is, and
that starts the member's process with its own checked overrides.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode

from config.sweep import FOLDER_KEY, SWEEP_FOLDER_KEY, quoted_override
from trainer.errors import ConfigError
from trainer.sweep import Job, MemberProcess


class LaunchedMember:
    """Hydra's task function: starts the process of the member whose number the job has."""

    def __init__(self, members: Sequence[tuple[list[str], Path]]) -> None:
        self.members, self.folder = members, os.getcwd()
        self.process = MemberProcess()

    def __call__(self, _: Any) -> int:
        """The exit code of the member."""
        os.chdir(self.folder)
        command, errors = self.members[HydraConfig.get().job.num]
        with self.process:
            return self.process.run(command, errors)


def launch(jobs: Sequence[Job], settings: Sequence[str], root: Path) -> int | None:
    """Run the jobs through the launcher and note how they ended; the signal that this process received, if one.

    Raises:
        ConfigError: no launcher of that name is installed, or it does not take these settings.
    """
    if not jobs:
        return None
    task, started = LaunchedMember([(job.command(), job.errors) for job in jobs]), time.time()
    overrides = [*settings, quoted_override(SWEEP_FOLDER_KEY, str(root)), "hydra.sweep.subdir=."]
    overrides += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    with initialize_config_module("config", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            config = hydra.compose_config("ppo_trainer", overrides, run_mode=RunMode.MULTIRUN, from_shell=False)
            context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
            launcher = Plugins.instance().instantiate_launcher(context, task, config)
        except (HydraException, ImportError, RuntimeError) as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise ConfigError(
                f"{', '.join(settings)}: {reason}. Is the plugin hydra-NAME-launcher installed?"
            ) from error
        folders = [
            [quoted_override(FOLDER_KEY, str(job.folder))] for job in jobs
        ]  # only so that jobs can be told apart
        results = launcher.launch(folders, initial_job_idx=0)
    for job, result in zip(jobs, results, strict=True):
        if result.status == JobStatus.COMPLETED:
            job.end(result.return_value, stopped=task.process.received is not None, started=started)
            job.seconds = None  # when it started is the launcher's affair
        else:
            job.state, job.exit_code = "failed", 1
            job.reason = f"the launcher could not run it: {result._return_value}"
    return task.process.received
