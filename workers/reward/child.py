"""The process that runs a reward function, so that a call that hangs can be killed from outside.

Started by `workers.reward.worker` as `python -m workers.reward.child FD`; it talks over the inherited pipe FD. What the
function prints goes to the process's own stdout and disturbs nothing.
"""

import sys
import traceback
from multiprocessing.connection import Connection

from trainer.errors import RewardError
from workers.reward.function import call_function, load_function


def main(descriptor: int) -> None:
    """Load the function that comes first through the pipe, then answer each row with (ok, reward or text)."""
    pipe = Connection(descriptor)
    spec = pipe.recv()
    try:
        function = load_function(spec)
    except BaseException:
        pipe.send((False, f"{spec.label} cannot be imported:\n{traceback.format_exc()}"))
        return
    pipe.send((True, None))
    while True:
        try:
            row = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, call_function(function, spec, row)))
        except RewardError as error:
            pipe.send((False, str(error)))
        except Exception:
            pipe.send((False, f"{spec.label} raised for {row.row}:\n{traceback.format_exc()}"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
