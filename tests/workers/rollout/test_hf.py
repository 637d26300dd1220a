"""The `hf` back end against transformers' own `generate` and full forwards, and a response's independence of its company."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer.batch import PPOBatch
from workers.actor import ActorRollout
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicyModel, PolicySpec, load_model
from workers.engine.pieces import make_piece
from workers.rollout.hf import HFRollout, Responses, response_mask
from workers.rollout.sampling import TRAIN, VALIDATION, RolloutRequest, RowStream, SamplingParams

CPU = torch.device("cpu")
LOAD = {"dtype": torch.float32, "override_config": {}, "trust_remote_code": False}
PROMPTS = [5, 2, 8, 1, 3, 6]
MAX_TOKENS = 10
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
NEVER = [1000]  # an end token outside of the vocabulary
OFTEN = [1, 3, 4, 7, 9, 12, 20, 33]  # a fifth of the vocabulary: most responses end early


@pytest.fixture
def rollout(write_model: Callable[..., str]) -> Callable[..., HFRollout]:
    """rollout(kind, eos=…, pad=…, max_num_seqs=…)"""

    def make(kind: str = "qwen3", *, eos: list[int] = OFTEN, pad: int = 0, max_num_seqs: int = 256) -> HFRollout:
        model = load_model(AutoModelForCausalLM, write_model(kind), **LOAD)
        return HFRollout(model, eos_token_ids=eos, pad_token_id=pad, max_num_seqs=max_num_seqs, device=CPU)

    return make


def decode(
    rollout: HFRollout,
    batch: PPOBatch,
    params: SamplingParams = SAMPLED,
    *,
    max_tokens: int = MAX_TOKENS,
    step: int = 1,
) -> Responses:
    rows = RowStream(
        seed=0,
        step=step,
        stream=TRAIN,
        prompt_index=[row["prompt_index"] for row in batch.extras],
        sample_index=[row["sample_index"] for row in batch.extras],
    )
    return rollout.generate(batch.prompts, batch.prompt_mask, rows, params=params, max_tokens=max_tokens)


def as_batch(batch: PPOBatch, responses: Responses) -> PPOBatch:
    filled = batch.clone()
    filled.responses, filled.response_mask = responses.tokens, responses.mask
    filled.attention_mask = torch.cat([batch.prompt_mask, responses.mask], dim=1)
    return filled


def batch_sizes(rollout: HFRollout) -> list[int]:
    """Rows of each forward from now on."""
    sizes: list[int] = []
    rollout.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return sizes


# --- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("eos", [NEVER, OFTEN], ids=["to the limit", "ending early"])
def test_greedy_equals_transformers_generate_on_left_padded_prompts(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch], kind: str, eos: list[int]
) -> None:
    backend, batch = rollout(kind, eos=eos), prompts_of(PROMPTS)
    responses = decode(backend, batch, GREEDY)
    expected = backend.model.generate(
        input_ids=batch.prompts,
        attention_mask=batch.prompt_mask.long(),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=eos,
        pad_token_id=0,
    )[:, batch.prompts.shape[1] :]
    width = expected.shape[1]
    assert torch.equal(responses.tokens[:, :width], expected)
    assert not responses.mask[:, width:].any()


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "cohere"])
def test_log_probs_equal_a_later_full_forward_of_the_policy(
    rollout: Callable[..., HFRollout],
    write_model: Callable[..., str],
    prompts_of: Callable,
    kind: str,
    temperature: float,
) -> None:
    batch = prompts_of(PROMPTS, samples=2)
    responses = decode(rollout(kind), batch, SamplingParams(temperature=temperature))
    piece = make_piece(as_batch(batch, responses), np.arange(len(batch)), CPU)
    with torch.no_grad():
        log_prob, *_ = PolicyModel.load(write_model(kind), **LOAD)(
            piece.input_ids,
            piece.positions,
            piece.labels,
            temperature,
        )
    mask = responses.mask
    assert int(mask.sum()) > len(batch)
    assert torch.allclose(responses.log_probs[mask], piece.widen(log_prob)[mask], rtol=0, atol=1e-5)
    assert not responses.log_probs[~mask].any()


def test_greedy_log_probs_are_those_at_temperature_1(
    rollout: Callable[..., HFRollout], write_model: Callable[..., str], prompts_of: Callable[..., PPOBatch]
) -> None:
    batch = prompts_of(PROMPTS)
    responses = decode(rollout(), batch, GREEDY)
    piece = make_piece(as_batch(batch, responses), np.arange(len(batch)), CPU)
    with torch.no_grad():
        log_prob, *_ = PolicyModel.load(write_model("qwen3"), **LOAD)(
            piece.input_ids,
            piece.positions,
            piece.labels,
            1.0,
        )
    assert torch.allclose(responses.log_probs[responses.mask], piece.widen(log_prob)[responses.mask], rtol=0, atol=1e-5)


# --- where a response ends -------------------------------------------------------------------------------------------


def test_the_mask_holds_the_first_end_token_of_any_kind_and_nothing_after() -> None:
    responses = torch.tensor([[5, 8, 2, 8, 5], [9, 5, 5, 5, 5], [5, 5, 5, 5, 5], [5, 5, 5, 5, 8]])
    assert response_mask(responses, [8, 9]).int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1],
    ]


def test_any_of_several_end_tokens_stops_a_response(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch]
) -> None:
    batch = prompts_of(PROMPTS, samples=4)
    responses = decode(rollout(eos=OFTEN), batch)
    free = decode(rollout(eos=NEVER), batch)
    last = [int(row[mask][-1]) for row, mask in zip(responses.tokens, responses.mask, strict=True)]
    assert len(set(last) & set(OFTEN)) >= 4  # different ones did
    for row in range(len(batch)):
        # What it would have said without an end, up to and including the first end token.
        ends = [t for t in range(MAX_TOKENS) if int(free.tokens[row, t]) in OFTEN]
        length = ends[0] + 1 if ends else MAX_TOKENS
        assert responses.mask[row].tolist() == [t < length for t in range(MAX_TOKENS)]
        assert torch.equal(responses.tokens[row, :length], free.tokens[row, :length])
        assert set(responses.tokens[row, length:].tolist()) <= {0}


def test_a_token_equal_to_the_padding_stays_under_the_mask(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch]
) -> None:
    batch = prompts_of(PROMPTS, samples=4)
    usual = decode(rollout(pad=0), batch)
    said = usual.tokens[usual.mask & ~torch.isin(usual.tokens, torch.tensor(OFTEN))]
    pad = int(said.mode().values)  # the token that is said most
    assert int((said == pad).sum()) >= 3
    padded = decode(rollout(pad=pad), batch)
    assert torch.equal(padded.mask, usual.mask)
    assert torch.equal(padded.tokens[padded.mask], usual.tokens[usual.mask])
    assert set(padded.tokens[~padded.mask].tolist()) == {pad}


def test_an_end_token_that_also_pads_is_counted_once(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch]
) -> None:
    batch = prompts_of(PROMPTS, samples=4)
    usual, padded = decode(rollout(pad=0), batch), decode(rollout(pad=OFTEN[0]), batch)
    assert torch.equal(padded.mask, usual.mask)
    assert torch.equal(padded.log_probs, usual.log_probs)


def test_max_tokens_cuts_a_response_that_has_not_ended(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch]
) -> None:
    batch, backend = prompts_of(PROMPTS), rollout(eos=NEVER)
    long, short, one = (decode(backend, batch, max_tokens=max_tokens) for max_tokens in (MAX_TOKENS, 4, 1))
    assert long.tokens.shape == (len(PROMPTS), MAX_TOKENS)
    assert bool(long.mask.all())
    # The numbers drawn for a token do not depend on how many follow.
    assert torch.equal(short.tokens, long.tokens[:, :4])
    assert torch.equal(one.tokens, long.tokens[:, :1])


# --- company ---------------------------------------------------------------------------------------------------------


def assert_same_responses(one: Responses, other: Responses) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.mask, other.mask)
    assert torch.allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-5)


def rows_of(responses: Responses, rows: Tensor) -> Responses:
    return Responses(*(field[rows] for field in responses))


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=0.6, top_k=8, top_p=0.9), GREEDY], ids=repr)
def test_a_response_does_not_depend_on_its_company(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch], params: SamplingParams
) -> None:
    backend, batch = rollout(), prompts_of(PROMPTS, samples=3)
    together = decode(backend, batch, params)
    for row in range(0, len(batch), 2):
        assert_same_responses(decode(backend, batch[row : row + 1], params), rows_of(together, torch.tensor([row])))
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(batch)))
    assert_same_responses(decode(backend, batch[order], params), rows_of(together, order))


@pytest.mark.parametrize("max_num_seqs", [1, 4, 5])
def test_decoding_in_chunks_changes_nothing(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch], max_num_seqs: int
) -> None:
    batch = prompts_of(PROMPTS, samples=3)
    chunked = rollout(max_num_seqs=max_num_seqs)
    sizes = batch_sizes(chunked)
    assert_same_responses(decode(chunked, batch), decode(rollout(), batch))
    assert max(sizes) <= max_num_seqs


def test_rows_that_have_ended_leave_the_batch_and_the_others_do_not_notice(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch]
) -> None:
    backend, batch = rollout(), prompts_of(PROMPTS, samples=4)
    sizes = batch_sizes(backend)
    together = decode(backend, batch)
    lengths = together.mask.sum(-1)
    assert len(set(sizes[1:])) >= 3, "the batch shrank at least twice"
    running = [int((lengths > t).sum()) for t in range(1, len(sizes))]
    assert all(count <= size < 2 * count for count, size in zip(running, sizes[1:], strict=True)), (
        "at most half has ended"
    )
    for row in torch.argsort(lengths)[-4:].tolist():  # the last ones to stay
        assert_same_responses(decode(backend, batch[row : row + 1]), rows_of(together, torch.tensor([row])))


def test_decoding_stops_once_all_have_ended(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch]
) -> None:
    backend = rollout(eos=list(range(41)))
    sizes = batch_sizes(backend)
    assert decode(backend, prompts_of(PROMPTS)).mask.sum(-1).tolist() == [1] * len(PROMPTS)
    assert len(sizes) == 1


def test_a_prompt_repeated_row_after_row_is_read_once(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch]
) -> None:
    backend = rollout(eos=NEVER)
    sizes = batch_sizes(backend)
    decode(backend, prompts_of(PROMPTS, samples=4), max_tokens=3)
    assert sizes == [len(PROMPTS), 4 * len(PROMPTS), 4 * len(PROMPTS)]


def test_wider_prompt_padding_changes_nothing(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch]
) -> None:
    backend = rollout()
    assert_same_responses(decode(backend, prompts_of(PROMPTS, width=15)), decode(backend, prompts_of(PROMPTS)))


def test_a_prompt_token_equal_to_the_padding_is_read(
    rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch]
) -> None:
    """A prompt that starts with the padding token is not the prompt without it."""
    backend, batch = rollout(eos=NEVER), prompts_of([4])
    batch.prompts[0, 0] = 0
    without = batch.clone()
    without.prompt_mask = torch.tensor([[False, True, True, True]])
    assert not torch.equal(decode(backend, batch).log_probs, decode(backend, without).log_probs)


def test_no_rows_give_no_responses(rollout: Callable[..., HFRollout], prompts_of: Callable[..., PPOBatch]) -> None:
    """A device that has no share of a small batch."""
    responses = decode(rollout(), prompts_of(PROMPTS)[torch.zeros(0, dtype=torch.long)])
    assert responses.tokens.shape == (0, MAX_TOKENS)
    assert responses.mask.shape == (0, MAX_TOKENS)


# --- samples of a prompt ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def actor(device_context: DeviceContext, configure: Callable, write_model: Callable[..., str]) -> ActorRollout:
    spec = PolicySpec(path=write_model("qwen3"), eos_token_ids=NEVER, pad_token_id=0)
    return ActorRollout(device_context, configure().actor_rollout_ref, spec)


def sample(actor: ActorRollout, batch: PPOBatch, *, seed: int = 0, step: int = 1, stream: int = TRAIN) -> Tensor:
    request = RolloutRequest(params=SAMPLED, max_tokens=MAX_TOKENS, seed=seed, step=step, stream=stream)
    return actor.generate(batch, request)["responses"]


def test_the_samples_of_a_prompt_differ_and_come_back_the_same(
    actor: ActorRollout, prompts_of: Callable[..., PPOBatch]
) -> None:
    batch = prompts_of(PROMPTS, samples=4)
    first = sample(actor, batch)
    torch.manual_seed(99)  # nothing is drawn from the global generator
    assert torch.equal(sample(actor, batch), first)
    assert len(torch.unique(first, dim=0)) == len(batch)


def test_samples_are_a_function_of_seed_step_stream_prompt_and_sample(
    actor: ActorRollout, prompts_of: Callable[..., PPOBatch]
) -> None:
    batch = prompts_of(PROMPTS, samples=2)
    first = sample(actor, batch)
    for change in ({"seed": 1}, {"step": 2}, {"stream": VALIDATION}):
        assert bool((sample(actor, batch, **change) != first).any(-1).all()), change
    rows = torch.tensor([7, 2])
    assert torch.equal(sample(actor, batch[rows]), first[rows])


def test_new_weights_are_decoded_with_after_update_weights(
    device_context: DeviceContext,
    configure: Callable,
    write_model: Callable[..., str],
    prompts_of: Callable[..., PPOBatch],
) -> None:
    spec = PolicySpec(path=write_model("qwen3"), eos_token_ids=NEVER, pad_token_id=0)
    actor = ActorRollout(device_context, configure().actor_rollout_ref, spec)
    batch = prompts_of(PROMPTS)
    before = sample(actor, batch)
    other = dict(load_model(AutoModelForCausalLM, write_model("qwen3", seed=7), **LOAD).named_parameters())
    with torch.no_grad():
        for name, parameter in actor.engine.hf_model.named_parameters():
            parameter.to_local().copy_(other[name])
    assert torch.equal(sample(actor, batch), before)
    actor.update_weights()
    spec = PolicySpec(path=write_model("qwen3", seed=7), eos_token_ids=NEVER, pad_token_id=0)
    assert torch.equal(sample(actor, batch), sample(ActorRollout(device_context, actor.config, spec), batch))


def test_load_weights_refuses_to_leave_a_weight_behind(rollout: Callable[..., HFRollout]) -> None:
    backend = rollout()
    weights = dict(backend.model.named_parameters())
    weights.pop("model.norm.weight")
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        backend.load_weights(weights.items())
