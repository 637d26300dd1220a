"""The `vllm` back end with a real engine: against the `hf` back end and the trainer, before and after a push, and when one fails."""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from trainer.batch import PPOBatch
from trainer.errors import ConfigError, WorkerLostError
from workers.actor import ActorRollout, score_tokens
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicySpec
from workers.groups import ActorRolloutGroup
from workers.rollout.hf import Responses, response_mask
from workers.rollout.sampling import TRAIN, RolloutRequest, SamplingParams, sample_tokens
from workers.rollout.vllm import default_cache_bytes
from workers.rollout.worker import Rollout

pytestmark = pytest.mark.usefixtures("needs_vllm")

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
PROMPTS = [5, 2, 8, 1, 3, 6, 150]  # the last one fills a block of vLLM's cache on CPU, 128 tokens
MAX_TOKENS = 12
ENGINE = [
    "actor_rollout_ref.rollout.name=vllm",
    "data.max_prompt_length=160",
    f"data.max_response_length={MAX_TOKENS}",
]
NEVER = [1000]  # outside of the vocabulary
MODELS = [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)]
NAMES = [f"{kind} {'tied' if tied else 'untied'}" for kind, tied in MODELS]


class Pair:
    """A trained policy with its engine, and the `hf` back end beside them."""

    def __init__(self, context: DeviceContext, configure: Callable, path: str, *overrides: str) -> None:
        spec = PolicySpec(path=path, eos_token_ids=NEVER, pad_token_id=0)
        self.actor = ActorRollout(context, configure(*ENGINE, *overrides).actor_rollout_ref, spec)
        self.hf = Rollout(context, configure().actor_rollout_ref, spec)
        self.first = {name: value.clone() for name, value in self.actor.engine.full_weights()}
        self.reset()

    @property
    def backend(self):
        return self.actor.rollout.backend

    def reset(self) -> None:
        """The weights of the start, and no end token, in both back ends."""
        self.backend.eos_token_ids = []
        self.change(lambda name, value: self.first[name])

    def change(self, to: Callable[[str, Tensor], Tensor]) -> None:
        """New weights for the policy, and both back ends."""
        with torch.no_grad():
            for name, parameter in self.actor.engine.hf_model.named_parameters():
                parameter.to_local().copy_(to(name, parameter.to_local()))
        self.actor.update_weights()
        self.hf.load_weights(self.actor.engine.full_weights())

    def disturb(self) -> None:
        """As after an update, but stronger: every weight moves."""
        generator = torch.Generator().manual_seed(3)
        self.change(lambda name, value: value + 0.1 * torch.randn(value.shape, generator=generator))

    def decode(
        self, batch: PPOBatch, params: SamplingParams = SAMPLED, *, step: int = 1, by: str = "vllm"
    ) -> Responses:
        request = RolloutRequest(params=params, max_tokens=MAX_TOKENS, seed=0, step=step, stream=TRAIN)
        out = (self.actor if by == "vllm" else self.hf).generate(batch, request)
        return Responses(out["responses"], out["response_mask"], out["rollout_log_probs"])

    def trainer_log_probs(self, batch: PPOBatch, responses: Responses, temperature: float) -> Tensor:
        filled = batch.clone()
        filled.responses, filled.response_mask, filled.loss_mask = responses.tokens, responses.mask, responses.mask
        filled.attention_mask = torch.cat([batch.prompt_mask, responses.mask], dim=1)
        rows = [np.arange(len(batch))]
        scores = score_tokens(self.actor.engine, filled, rows, temperature=temperature, with_entropy=False)
        return scores["log_prob"]


@pytest.fixture(scope="module")
def make_pair(
    needs_vllm: None, device_context: DeviceContext, configure: Callable, write_model: Callable[..., str]
) -> Iterator[Callable[..., Pair]]:
    """make_pair(kind, tied): with the weights of the start; each engine is made once."""
    known: dict[tuple[str, bool], Pair] = {}

    def make(kind: str = "qwen3", tied: bool = True) -> Pair:
        if (kind, tied) not in known:
            path = write_model(kind, tie_word_embeddings=tied, max_position_embeddings=512)
            known[kind, tied] = Pair(device_context, configure, path)
        known[kind, tied].reset()
        return known[kind, tied]

    yield make
    for pair in known.values():
        pair.backend.shutdown()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()


def assert_same_responses(one: Responses, other: Responses, *, atol: float = 1e-4) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.mask, other.mask)
    assert torch.allclose(one.log_probs, other.log_probs, rtol=0, atol=atol)


def rows_of(responses: Responses, rows: Tensor) -> Responses:
    return Responses(*(field[rows] for field in responses))


# --- the same policy as the trainer's --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "tied"), MODELS, ids=NAMES)
def test_greedy_equals_hf_before_and_after_a_push(
    make_pair: Callable[..., Pair], prompts_of: Callable[..., PPOBatch], kind: str, tied: bool
) -> None:
    """Tied embeddings too: vLLM's packed copy of the output layer stays old unless it is packed anew."""
    pair, batch = make_pair(kind, tied), prompts_of(PROMPTS)
    before = pair.decode(batch, GREEDY)
    assert_same_responses(before, pair.decode(batch, GREEDY, by="hf"))
    pair.disturb()
    after = pair.decode(batch, GREEDY)
    assert_same_responses(after, pair.decode(batch, GREEDY, by="hf"))
    assert bool((after.tokens != before.tokens).any(-1).all()), "the push changed every response"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_are_the_trainers(
    pair: Pair, prompts_of: Callable[..., PPOBatch], temperature: float
) -> None:
    batch = prompts_of(PROMPTS, samples=4)
    for _ in range(2):
        responses = pair.decode(batch, SamplingParams(temperature=temperature))
        log_probs = pair.trainer_log_probs(batch, responses, temperature)
        assert torch.allclose(responses.log_probs, log_probs, rtol=0, atol=1e-3)
        pair.disturb()


def test_tokens_are_drawn_from_the_policy(pair: Pair, prompts_of: Callable[..., PPOBatch]) -> None:
    """Pearson's statistic of the first token, whose expectation is one less than the number of tokens that are compared."""
    batch = prompts_of([4], samples=1024)
    responses = pair.decode(batch)
    logits = pair.hf.backend.model(batch.prompts[:1]).logits[0, -1].detach()
    expected = logits.double().softmax(-1) * len(batch)
    counts = torch.bincount(responses.tokens[:, 0], minlength=len(expected))
    often = expected > 5
    statistic, freedom = float(((counts - expected).square() / expected)[often].sum()), int(often.sum()) - 1
    assert freedom >= 10
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_in_bfloat16_the_sampler_follows_the_trainer_to_its_precision(
    device_context: DeviceContext,
    configure: Callable,
    write_model: Callable[..., str],
    prompts_of: Callable[..., PPOBatch],
) -> None:
    path = write_model("qwen3", tie_word_embeddings=True, max_position_embeddings=512)
    pair = Pair(device_context, configure, path, "actor_rollout_ref.rollout.dtype=bfloat16")
    try:
        batch = prompts_of(PROMPTS, samples=4)
        for _ in range(2):
            responses = pair.decode(batch)
            difference = (responses.log_probs - pair.trainer_log_probs(batch, responses, 1.0)).abs()
            assert 1e-4 < float(difference.max()) < 0.1
            pair.disturb()
    finally:
        pair.backend.shutdown()


def test_greedy_log_probs_are_those_at_temperature_1(pair: Pair, prompts_of: Callable[..., PPOBatch]) -> None:
    batch = prompts_of(PROMPTS)
    responses = pair.decode(batch, GREEDY)
    assert torch.allclose(responses.log_probs, pair.trainer_log_probs(batch, responses, 1.0), rtol=0, atol=1e-3)


CUTS = [
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=0.7, top_p=0.6),
    SamplingParams(temperature=0.7, min_p=0.3),
]


@pytest.mark.parametrize("params", CUTS, ids=["top_k", "top_p", "min_p"])
def test_a_cut_leaves_the_same_tokens_with_the_same_log_probs_as_with_hf(
    pair: Pair, prompts_of: Callable[..., PPOBatch], params: SamplingParams
) -> None:
    batch = prompts_of([4], samples=64)
    responses = pair.decode(batch, params)
    logits = pair.hf.backend.model(batch.prompts[:1]).logits[:, -1].detach()
    tokens, log_probs = sample_tokens(logits.expand(2000, -1), torch.arange(2000).double() / 2000, params)
    expected = {int(token): float(log_prob) for token, log_prob in zip(tokens, log_probs, strict=True)}
    first = {int(row[0]): float(at[0]) for row, at in zip(responses.tokens, responses.log_probs, strict=True)}
    assert len(expected) < 20  # of 41
    assert set(first) <= set(expected)
    assert len(first) >= 2
    assert first == pytest.approx({token: expected[token] for token in first}, abs=1e-4)


# --- what a response depends on --------------------------------------------------------------------------------------


def test_a_response_is_a_function_of_its_row_whatever_the_company(
    pair: Pair, prompts_of: Callable[..., PPOBatch]
) -> None:
    batch = prompts_of(PROMPTS, samples=4)
    together = pair.decode(batch)
    assert len(torch.unique(together.tokens, dim=0)) == len(batch)
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(batch)))
    assert_same_responses(pair.decode(batch[order]), rows_of(together, order))
    for row in (0, 13, len(batch) - 1):
        assert_same_responses(pair.decode(batch[row : row + 1]), rows_of(together, torch.tensor([row])))
    assert bool((pair.decode(batch, step=2).tokens != together.tokens).any(-1).all())


def test_the_process_is_left_as_it_was(
    device_context: DeviceContext, configure: Callable, write_model: Callable[..., str], prompts_of: Callable
) -> None:
    """vLLM seeds and draws from the global generators, and replaces torch.set_num_threads."""
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    set_num_threads = torch.set_num_threads
    pair = Pair(device_context, configure, write_model("qwen3"))
    pair.decode(prompts_of(PROMPTS))
    pair.backend.shutdown()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert torch.set_num_threads is set_num_threads


# --- where a response ends -------------------------------------------------------------------------------------------


def test_any_of_several_end_tokens_stops_a_response_and_stays_in_it(
    pair: Pair, prompts_of: Callable[..., PPOBatch]
) -> None:
    """The run's end tokens alone: token 1, which the model's folder names, is none of them here."""
    batch, ends = prompts_of(PROMPTS, samples=8), [3, 4, 7, 9, 12, 20, 33]
    free = pair.decode(batch)
    assert bool(free.mask.all())
    pair.backend.eos_token_ids = ends
    responses = pair.decode(batch)
    mask = response_mask(free.tokens, ends)
    assert torch.equal(responses.mask, mask)
    assert torch.equal(responses.tokens, free.tokens.where(mask, 0))
    assert torch.allclose(responses.log_probs, free.log_probs.where(mask, 0.0), rtol=0, atol=1e-4)
    last = responses.tokens.gather(1, mask.sum(-1, keepdim=True) - 1)
    assert len(set(last.flatten().tolist()) & set(ends)) >= 4
    assert bool(((responses.tokens == 1) & mask).any())


def test_no_rows_give_no_responses(pair: Pair, prompts_of: Callable[..., PPOBatch]) -> None:
    """A device that has no share of a small batch."""
    responses = pair.decode(prompts_of(PROMPTS)[torch.zeros(0, dtype=torch.long)])
    assert [tuple(field.shape) for field in responses] == [(0, MAX_TOKENS)] * 3


def test_a_small_cache_changes_nothing(
    pair: Pair,
    device_context: DeviceContext,
    configure: Callable,
    write_model: Callable[..., str],
    prompts_of: Callable,
) -> None:
    """Two of three prompts of 120 tokens outgrow their first block: there are four, so that one is taken back and starts over."""
    path = write_model("qwen3", tie_word_embeddings=True, max_position_embeddings=512)
    block = default_cache_bytes(AutoConfig.from_pretrained(path), torch.float32, tokens=128, sequences=1) // 2
    few = ["max_num_seqs=3", "max_num_batched_tokens=3", f"engine_kwargs.vllm.kv_cache_memory_bytes={5 * block}"]
    small = Pair(device_context, configure, path, *(f"actor_rollout_ref.rollout.{key}" for key in few))
    batch = prompts_of([120, 122, 125, 3])
    assert_same_responses(small.decode(batch), pair.decode(batch))
    small.backend.shutdown()


# --- a push ----------------------------------------------------------------------------------------------------------


def test_a_push_forgets_the_prompts_read_before(pair: Pair, prompts_of: Callable[..., PPOBatch]) -> None:
    def cached(batch: PPOBatch) -> int:
        prompt = {"prompt_token_ids": batch.prompts[0][batch.prompt_mask[0]].tolist()}
        (output,) = pair.backend.llm.generate([prompt], use_tqdm=False)
        return output.num_cached_tokens

    batch = prompts_of([150])
    pair.decode(batch, GREEDY)
    assert cached(batch) == 128
    pair.disturb()
    assert_same_responses(pair.decode(batch, GREEDY), pair.decode(batch, GREEDY, by="hf"))
    pair.disturb()
    assert cached(batch) == 0


def test_nothing_is_decoded_before_the_first_push(
    device_context: DeviceContext, configure: Callable, write_model: Callable[..., str], prompts_of: Callable
) -> None:
    spec = PolicySpec(path=write_model("qwen3"), eos_token_ids=NEVER, pad_token_id=0)
    rollout = Rollout(device_context, configure(*ENGINE).actor_rollout_ref, spec)
    with pytest.raises(AssertionError, match="no weights were given"):
        rollout.generate(prompts_of(PROMPTS), RolloutRequest(params=GREEDY, max_tokens=4, seed=0, step=1, stream=TRAIN))
    rollout.backend.shutdown()


def break_model(llm) -> None:
    """The engine's model loses a layer: a push fails in its middle, when half of the weights are new."""
    llm.apply_model(lambda model: model.model.layers.__delitem__(1))


def leave_a_request(llm) -> None:
    """A request is still running, so that the cache of old prompts cannot be emptied."""
    from vllm import SamplingParams as EngineParams

    llm.llm_engine.add_request("left", {"prompt_token_ids": [5] * 140}, EngineParams(max_tokens=10, ignore_eos=True))
    llm.llm_engine.step()


def pass_over_a_layer(llm) -> None:
    """The engine's model takes no notice of a weight that it is given."""

    def spoil(model) -> None:
        load = model.load_weights
        model.load_weights = lambda weights: load(item for item in weights if "layers.1.mlp.down_proj" not in item[0])

    llm.apply_model(spoil)


@pytest.mark.parametrize("harm", [break_model, leave_a_request, pass_over_a_layer])
def test_a_push_that_fails_is_done_again_with_a_new_engine(
    pair: Pair, prompts_of: Callable[..., PPOBatch], harm: Callable
) -> None:
    batch, engine = prompts_of(PROMPTS), pair.backend.llm
    harm(engine)
    pair.disturb()
    assert pair.backend.llm is not engine
    assert_same_responses(pair.decode(batch, GREEDY), pair.decode(batch, GREEDY, by="hf"))


def cut_one(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, value[:3] if "layers.1.mlp.down_proj" in name else value


def leave_one_out(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    if "layers.1.self_attn.k_proj" not in name:  # vLLM joins it with q_proj and v_proj
        yield name, value


def add_one(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, value
    if name == "model.norm.weight":
        yield "model.norm.rotary_emb.inv_freq", value  # a name that vLLM passes over


@pytest.mark.parametrize("spoil", [cut_one, leave_one_out, add_one])
def test_a_push_that_fails_again_ends_the_engine_and_says_so(
    device_context: DeviceContext,
    configure: Callable,
    write_model: Callable[..., str],
    prompts_of: Callable,
    spoil: Callable,
) -> None:
    pair = Pair(device_context, configure, write_model("qwen3"))
    spoilt = [item for name, value in pair.actor.engine.full_weights() for item in spoil(name, value)]
    with pytest.raises(WorkerLostError, match="did not take the new weights") as caught:
        pair.backend.load_weights(spoilt)
    assert copy.copy(str(caught.value)).startswith("actor_rollout_ref.rollout.name=vllm: the engine of device 0")
    with pytest.raises(AssertionError, match="the engine was ended"):
        pair.decode(prompts_of(PROMPTS), GREEDY)


def test_an_engine_that_fails_while_decoding_is_told(
    device_context: DeviceContext, configure: Callable, write_model: Callable[..., str], prompts_of: Callable
) -> None:
    pair = Pair(device_context, configure, write_model("qwen3"))
    pair.backend.llm.apply_model(lambda model: delattr(model.model, "norm"))
    with pytest.raises(WorkerLostError, match="failed while decoding"):
        pair.decode(prompts_of(PROMPTS), GREEDY)
    pair.actor.update_weights()  # the next push starts it anew
    assert_same_responses(pair.decode(prompts_of([5]), GREEDY), pair.decode(prompts_of([5]), GREEDY, by="hf"))
    pair.backend.shutdown()


# --- start -----------------------------------------------------------------------------------------------------------


def test_a_model_that_vllm_cannot_run_is_told(
    device_context: DeviceContext, configure: Callable, write_model: Callable[..., str]
) -> None:
    """On CPU vLLM has no attention for heads of 16."""
    spec = PolicySpec(path=write_model("qwen3", head_dim=16), eos_token_ids=NEVER, pad_token_id=0)
    with pytest.raises(ConfigError, match=r"the engine does not start .*head_dim"):
        Rollout(device_context, configure(*ENGINE).actor_rollout_ref, spec)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("engine_kwargs.vllm.no_such=1", "no_such"),
        ("engine_kwargs.vllm.kv_cache_dtype=nope", "cache_dtype: Input should be 'auto'"),
        ("max_model_len=4096", r"max_model_len \(4096\) is greater than the derived max_model_len"),
    ],
)
def test_an_argument_that_vllm_refuses_is_told(
    device_context: DeviceContext, configure: Callable, write_model: Callable[..., str], setting: str, told: str
) -> None:
    spec = PolicySpec(path=write_model("qwen3", max_position_embeddings=512), eos_token_ids=NEVER, pad_token_id=0)
    config = configure(*ENGINE, f"actor_rollout_ref.rollout.{setting}").actor_rollout_ref
    with pytest.raises(ConfigError, match=told):
        Rollout(device_context, config, spec)


# --- several devices -------------------------------------------------------------------------------------------------


def test_two_devices_share_an_engine(
    open_pool: Callable, configure: Callable, write_model: Callable[..., str], prompts_of: Callable
) -> None:
    """Tensor parallel: both run all rows, and each returns its own, none included. Nothing of it outlives them."""
    shared_memory = Path("/dev/shm")
    before = set(shared_memory.glob("*"))
    spec = PolicySpec(path=write_model("qwen3"), eos_token_ids=[3, 4, 7, 9], pad_token_id=0)
    shared = configure(*ENGINE, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    request = RolloutRequest(params=GREEDY, max_tokens=MAX_TOKENS, seed=0, step=1, stream=TRAIN)
    with open_pool(2) as pool:
        answers = []
        for config in (shared, configure()):
            group = ActorRolloutGroup(pool, config.actor_rollout_ref, spec)  # the second takes the first one's place
            answers.append([group.generate(prompts_of(PROMPTS)[torch.arange(rows)], request) for rows in (5, 1)])
        assert len(torch.unique(answers[0][0].responses, dim=0)) == 5
        for one, other in zip(*answers, strict=True):
            assert torch.equal(one.responses, other.responses)
            assert torch.equal(one.response_mask, other.response_mask)
            assert torch.allclose(one.rollout_log_probs, other.rollout_log_probs, rtol=0, atol=1e-4)
            assert not torch.equal(one.rollout_log_probs, other.rollout_log_probs), "two back ends"
    assert set(shared_memory.glob("*")) == before
