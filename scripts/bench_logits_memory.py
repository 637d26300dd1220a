"""Measures the memory and time of an actor update with whole logits, with logits in chunks, and with gradient checkpointing.

    OMP_NUM_THREADS=1 python scripts/bench_logits_memory.py

The model has SmolLM2-135M's shape (vocabulary 49,152) and random weights, built here. Each case is a process of its own,
so that its peak is its own: the largest resident memory during one forward and backward of the actor's loss, entropy and
limiter measuring on, less what the process held before it. Float32; a prompt of one eighth of a row. Seconds are CPU
seconds of the same pass. Exit code 0 whatever comes out.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_limiters import random_batch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from config.load import load_config
from trainer.batch import require
from trainer.ppo.core_algos import LossCounts
from workers.actor import ActorRollout, LocalUpdate
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicySpec

VOCABULARY = 49152
CASES: dict[str, dict[str, Any]] = {
    "whole logits": {},
    "chunks of 128": {"logits_chunk_size": 128},
    "chunks of 512": {"logits_chunk_size": 512},
    "checkpointing, whole logits": {"enable_gradient_checkpointing": True},
    "checkpointing, chunks of 128": {"enable_gradient_checkpointing": True, "logits_chunk_size": 128},
    "checkpointing, chunks of 512": {"enable_gradient_checkpointing": True, "logits_chunk_size": 512},
}


def write_model(folder: str, num_layers: int) -> None:
    """A policy of SmolLM2-135M's shape, and its depth unless told otherwise."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def resident_gib(what: str) -> float:
    """Resident memory of this process: VmRSS, what it has, or VmHWM, the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 2**20


def forget_peak() -> None:
    """Let VmHWM begin anew; Linux."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def run_case(folder: str, options: argparse.Namespace) -> dict[str, float]:
    """One update of a case, in this process."""
    torch.set_num_threads(1)
    roles = load_config(["experiment=copy_grpo"]).actor_rollout_ref
    # SGD, whose step makes nothing as large as the weights: the peak is forward and backward's.
    actor = dataclasses.replace(
        roles.actor, entropy_coeff=0.01, optim=dataclasses.replace(roles.actor.optim, optimizer="SGD")
    )
    roles = dataclasses.replace(roles, actor=actor, model=dataclasses.replace(roles.model, **CASES[options.case]))
    with tempfile.TemporaryDirectory() as rendezvous:
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}/one", rank=0, world_size=1)
        context = DeviceContext(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
        policy = ActorRollout(context, roles, PolicySpec(path=folder, eos_token_ids=[2], pad_token_id=0))
        figures = {}
        # The first update is small, and makes all that is made once.
        for rows, length in ((1, 16), (options.rows, options.length)):
            prompt = max(length // 8, 1)
            batch = random_batch(rows=rows, prompt=prompt, response=length - prompt, vocabulary=VOCABULARY)
            (loss_mask,) = require(batch, "loss_mask")
            update = LocalUpdate(counts=LossCounts.of(loss_mask), micro_batches=[np.arange(rows)])
            forget_peak()
            before, start = resident_gib("VmRSS"), time.process_time()
            policy.update(batch, [update], 1e-6)
            figures = {"gib": resident_gib("VmHWM") - before, "seconds": time.process_time() - start}
        torch.distributed.destroy_process_group()
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help="rows of the micro-batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, prompt and response")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--case", choices=CASES, help="run this one case alone, in this process")
    parser.add_argument("--model", help="folder of the model that --case runs")
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(run_case(options.model, options)))
        return 0
    results: dict[str, dict[str, float]] = {}
    print(f"{options.rows} rows of {options.length} tokens, {options.layers} layers, vocabulary 49,152, float32")
    print(f"{'case':<30}{'peak above start':>18}{'of whole':>10}{'CPU time':>10}{'of whole':>10}")
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, options.layers)
        own = [f"--{name}={getattr(options, name)}" for name in ("rows", "length", "layers")]
        for case in CASES:
            command = [sys.executable, __file__, "--case", case, "--model", folder, *own]
            # One arena, and large blocks given back at once: the peak is of what lives, not of what malloc keeps.
            environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            results[case] = found = json.loads(done.stdout.splitlines()[-1])
            whole = results["whole logits"]
            print(
                f"{case:<30}{found['gib']:>14.2f} GiB{found['gib'] / whole['gib']:>10.2f}"
                f"{found['seconds']:>8.1f} s{found['seconds'] / whole['seconds']:>10.2f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
