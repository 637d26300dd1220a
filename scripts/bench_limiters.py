"""Measures which share of an actor update's time goes into measuring the limiters.

    OMP_NUM_THREADS=1 python scripts/bench_limiters.py --model outputs/models/smollm2

Updates with and without the measuring alternate in one process; a pair's ratio is of CPU seconds. On a busy machine an
update's own time still varies by some percent, so the last line tells what the measuring takes on its own. The update is the actor's own: forward and backward in bfloat16, entropy and KL loss on, AdamW. Exit
code 0 whatever comes out; 2 where the model's folder is missing.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from config.load import load_config
from config.schema import ActorConfig
from trainer.batch import PPOBatch, per_row, require
from trainer.ppo.core_algos import LossCounts
from trainer.ppo.limiters import LimiterProbe, logit_geometry
from workers.engine.fsdp import DeviceContext, FSDPEngine
from workers.engine.models import PolicyModel
from workers.engine.pieces import make_piece
from workers.losses import LossShare, ppo_loss

CPU = torch.device("cpu")
TEMPERATURE = 1.0
LR = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One update of a policy, which can be run again and again."""

    engine: FSDPEngine
    config: ActorConfig
    batch: PPOBatch
    micro_batches: list[np.ndarray]

    def run(self, *, measuring: bool) -> float:
        """Run the update; its CPU seconds."""
        start = time.process_time()
        self.engine.update(self._shares(measuring), lr=LR, grad_clip=1.0)
        return time.process_time() - start

    def _shares(self, measuring: bool) -> Iterator[LossShare]:
        """As `ActorRollout` yields them, with or without the probe."""
        (loss_mask,) = require(self.batch, "loss_mask")
        counts = LossCounts.of(loss_mask)
        for rows in self.micro_batches:
            piece = make_piece(self.batch, rows, CPU)
            output = self.engine.module(
                piece.input_ids, piece.positions, piece.labels, TEMPERATURE, with_entropy=True, with_geometry=measuring
            )
            taken = piece.batch
            old_log_probs, advantages, loss_mask = require(taken, "old_log_probs", "advantages", "loss_mask")
            probe = None
            if measuring:
                probe = LimiterProbe(output.geometry.map(piece.widen), TEMPERATURE, taken.kl_advantages)
            yield ppo_loss(
                log_prob=piece.widen(output.log_prob),
                entropy=piece.widen(output.entropy),
                old_log_probs=old_log_probs,
                ref_log_prob=taken.ref_log_prob,
                advantages=advantages,
                loss_mask=loss_mask,
                counts=counts,
                config=self.config,
                probe=probe,
            )


def random_batch(*, rows: int, prompt: int, response: int, vocabulary: int) -> PPOBatch:
    """Rows of random tokens without padding, with random figures of the policies: what they are costs no time."""
    random = torch.Generator().manual_seed(0)

    def figures() -> Tensor:
        return torch.randn(rows, response, generator=random)

    real = torch.ones(rows, prompt + response, dtype=torch.bool)
    tokens = torch.randint(vocabulary, real.shape, generator=random)
    old_log_probs = figures() - 10
    return PPOBatch(
        uid=per_row([str(row) for row in range(rows)]),
        extras=per_row([{} for _ in range(rows)]),
        prompts=tokens[:, :prompt],
        prompt_mask=real[:, :prompt],
        responses=tokens[:, prompt:],
        response_mask=real[:, prompt:],
        loss_mask=real[:, prompt:],
        attention_mask=real,
        old_log_probs=old_log_probs,
        ref_log_prob=old_log_probs + figures(),
        advantages=figures(),
        kl_advantages=figures(),
        batch_size=[rows],
    )


def prepare(options: argparse.Namespace, context: DeviceContext) -> Update:
    """The update that the options describe."""
    actor = load_config(["experiment=copy_ppo"]).actor_rollout_ref.actor
    config = dataclasses.replace(
        actor,
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.01,
        fsdp_config=dataclasses.replace(actor.fsdp_config, dtype="bfloat16"),
    )
    module = PolicyModel.load(options.model, dtype=torch.float32, override_config={}, trust_remote_code=False)
    batch = random_batch(
        rows=options.rows,
        prompt=options.prompt,
        response=options.response,
        vocabulary=module.model.config.vocab_size,
    )
    rows = np.arange(options.rows)
    return Update(
        engine=FSDPEngine(module, context=context, config=config.fsdp_config, optim=config.optim),
        config=config,
        batch=batch,
        micro_batches=[rows[start : start + options.micro_rows] for start in range(0, len(rows), options.micro_rows)],
    )


def measure_pairs(update: Update, pairs: int) -> dict[bool, list[float]]:
    """CPU seconds of the updates with (True) and without measuring, per pair; which comes first changes from pair to pair."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for measuring in (False, True):
        update.run(measuring=measuring)  # the first update allocates the optimizer's state
    for pair in range(pairs):
        for measuring in (pair % 2 == 0, pair % 2 == 1):
            seconds[measuring].append(update.run(measuring=measuring))
        over, under = seconds[True][-1], seconds[False][-1]
        print(f"pair {pair + 1}: {over:.2f} s with, {under:.2f} s without, {over / under - 1:+.2%}", flush=True)
    return seconds


def geometry_seconds(update: Update) -> float:
    """CPU seconds of `logit_geometry`, which is nearly all of the measuring, for one update's tokens; fastest of five."""
    (responses,) = require(update.batch, "responses")
    vocabulary = update.engine.hf_model.config.vocab_size
    logits = torch.randn(*responses.shape, vocabulary, dtype=torch.bfloat16)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        for rows in map(torch.from_numpy, update.micro_batches):
            logit_geometry(logits[rows[0] : rows[-1] + 1], responses[rows], TEMPERATURE, with_entropy=True)
        seconds.append(time.process_time() - start)
    return min(seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="outputs/models/smollm2", help="a Hugging Face folder")
    parser.add_argument("--rows", type=int, default=8, help="rows of the mini-batch")
    parser.add_argument("--micro-rows", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response")
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args(arguments)
    if not Path(options.model).is_dir():
        print(f"--model {options.model} is no folder; scripts/prepare_smollm2.py writes one", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        update = prepare(options, DeviceContext(0, 1, CPU, init_device_mesh("cpu", (1,))))
        seconds = measure_pairs(update, options.pairs)
        alone = geometry_seconds(update)
        torch.distributed.destroy_process_group()
    ratios = [over / under for over, under in zip(seconds[True], seconds[False], strict=True)]
    print(
        f"median of {len(ratios)} pairs: measuring the limiters costs {statistics.median(ratios) - 1:+.2%} of an update"
    )
    print(f"fastest with over fastest without: {min(seconds[True]) / min(seconds[False]) - 1:+.2%}")
    print(f"logit_geometry on its own: {alone:.3f} s, {alone / min(seconds[False]):.2%} of the fastest update")
    return 0


if __name__ == "__main__":
    sys.exit(main())
