"""Sampling: numbers that depend on their row alone, and tokens from exactly the distribution that was asked for."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workers.rollout.sampling import TRAIN, VALIDATION, RowStream, SamplingParams, sample_tokens

INF = float("inf")
JUST_BELOW_1 = float(np.nextafter(1.0, 0.0))
SINGLE = 1e-6  # the log-probabilities are float32: 6e-8 relative, over a handful of operations


def numbers(prompts: list[int], samples: list[int], *, num_tokens: int = 6, **changes: int) -> Tensor:
    arguments = {"seed": 1, "step": 2, "stream": TRAIN} | changes
    return RowStream(prompt_index=prompts, sample_index=samples, **arguments).uniform(num_tokens)


def logits_of(p: list[float]) -> Tensor:
    return torch.tensor([[math.log(x) if x else -INF for x in p]])


def draw(p: list[float], uniform: list[float] | Tensor, **params: Any) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities from softmax(log p / temperature) for each of the uniform numbers."""
    uniform = torch.as_tensor(uniform, dtype=torch.float64)
    return sample_tokens(
        logits_of(p).expand(len(uniform), -1), uniform, SamplingParams(**({"temperature": 1.0} | params))
    )


def distribution(p: list[float], num_strata: int = 20_000, **params: Any) -> list[float]:
    """Shares of the tokens over evenly spread uniform numbers, which are their probabilities to 1 / num_strata."""
    tokens, _ = draw(p, (torch.arange(num_strata, dtype=torch.float64) + 0.5) / num_strata, **params)
    return (torch.bincount(tokens, minlength=len(p)) / num_strata).tolist()


# --- uniform numbers -------------------------------------------------------------------------------------------------


def test_a_rows_numbers_depend_on_neither_company_nor_order() -> None:
    prompts, samples = [4, 4, 9, 0], [0, 1, 0, 3]
    together = numbers(prompts, samples)
    alone = torch.cat([numbers([prompt], [sample]) for prompt, sample in zip(prompts, samples, strict=True)])
    assert together.equal(alone)
    assert numbers(prompts[::-1], samples[::-1]).equal(together.flip(0))
    assert (together.shape, together.dtype) == ((4, 6), torch.float64)


def test_seed_step_stream_prompt_and_sample_each_give_other_numbers() -> None:
    rows = [
        numbers([4], [0]),
        numbers([4], [0], seed=0),
        numbers([4], [0], step=1),
        numbers([4], [0], stream=VALIDATION),
        numbers([5], [0]),
        numbers([4], [1]),
        numbers([0], [4]),
    ]
    assert len({tuple(row.flatten().tolist()) for row in rows}) == len(rows)


def test_a_longer_limit_only_adds_numbers_at_the_end() -> None:
    assert numbers([4], [0], num_tokens=50)[:, :6].equal(numbers([4], [0]))


def test_each_row_has_a_seed_of_its_own_for_an_engine_with_generators() -> None:
    def seeds(prompts: list[int], samples: list[int], stream: int = TRAIN) -> list[int]:
        return RowStream(seed=1, step=2, stream=stream, prompt_index=prompts, sample_index=samples).seeds()

    together = seeds([4, 4, 9], [0, 1, 0])
    assert together == seeds([4], [0]) + seeds([4], [1]) + seeds([9], [0])
    assert len({*together, *seeds([4, 4, 9], [0, 1, 0], VALIDATION)}) == 6
    assert all(0 <= seed < 2**63 for seed in together)


def test_no_rows_give_no_numbers() -> None:
    assert numbers([], []).shape == (0, 6)


def test_the_numbers_are_uniform_in_0_to_1() -> None:
    # One number each of 20,000 rows: their order statistics stay within 1.95 / sqrt(n), which chance exceeds once in
    # a thousand (Kolmogorov-Smirnov); the numbers are fixed.
    n = 20_000
    ordered = (
        numbers(list(range(n // 4)) * 4, [k for k in range(4) for _ in range(n // 4)], num_tokens=1)
        .flatten()
        .sort()
        .values
    )
    assert 0 <= float(ordered[0]) < float(ordered[-1]) < 1
    assert float((ordered - torch.arange(n) / n).abs().max()) < 1.95 / math.sqrt(n)


def test_no_global_generator_is_read_or_moved() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = numbers([4], [0])
    sample_tokens(torch.zeros(1, 3), first[:, 0], SamplingParams(temperature=1.0))
    assert torch.get_rng_state().equal(torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


# --- the distribution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_frequencies_follow_softmax_of_logits_over_temperature(temperature: float) -> None:
    logits, n = torch.tensor([1.0, -1.0, 0.3, 2.0, 0.0, -0.5]), 20_000
    uniform = numbers([3], [0], num_tokens=n)[0]
    tokens, _ = sample_tokens(logits.expand(n, -1), uniform, SamplingParams(temperature=temperature))
    expected = n * torch.softmax(logits.double() / temperature, -1)
    chi_square = float(((torch.bincount(tokens, minlength=6) - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 5 degrees of freedom: chance exceeds it once in a thousand; the numbers are fixed


P = [0.05, 0.5, 0.15, 0.3]


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, P),
        ({"top_k": -1}, P),
        ({"top_k": 0}, P),
        ({"top_k": 4}, P),
        ({"top_k": 99}, P),
        ({"top_k": 2}, [0, 0.5 / 0.8, 0, 0.3 / 0.8]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        # The fewest likeliest tokens that reach it: 0.5, 0.8, 0.95, 1.
        ({"top_p": 0.45}, [0, 1, 0, 0]),
        ({"top_p": 0.79}, [0, 0.5 / 0.8, 0, 0.3 / 0.8]),
        ({"top_p": 0.81}, [0, 0.5 / 0.95, 0.15 / 0.95, 0.3 / 0.95]),
        ({"top_p": 0.97}, P),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        # At least this share of the likeliest one's 0.5.
        ({"min_p": 0.29}, [0, 0.5 / 0.95, 0.15 / 0.95, 0.3 / 0.95]),
        ({"min_p": 0.31}, [0, 0.5 / 0.8, 0, 0.3 / 0.8]),
        ({"min_p": 0.99}, [0, 1, 0, 0]),
        # top-k first: of the three left the first two hold 0.8 / 0.95 = 0.842, which reaches 0.84; of all four 0.8.
        ({"top_k": 3, "top_p": 0.84}, [0, 0.5 / 0.8, 0, 0.3 / 0.8]),
        ({"top_k": 3, "min_p": 0.31}, [0, 0.5 / 0.8, 0, 0.3 / 0.8]),
        # A temperature of 0.5 squares the probabilities, before any cut: 0.0025, 0.25, 0.0225, 0.09 of 0.365.
        ({"temperature": 0.5, "top_k": 2}, [0, 0.25 / 0.34, 0, 0.09 / 0.34]),
        ({"temperature": 0.5, "top_p": 0.68}, [0, 1, 0, 0]),
        ({"temperature": 0.5, "min_p": 0.35}, [0, 0.25 / 0.34, 0, 0.09 / 0.34]),
        ({"temperature": 0.5, "min_p": 0.37}, [0, 1, 0, 0]),
    ],
)
def test_cuts_by_hand_in_frequency_and_log_probability(params: dict[str, Any], wanted: list[float]) -> None:
    assert distribution(P, **params) == pytest.approx(wanted, abs=1e-4)  # 2 strata of 20,000
    for token, p in enumerate(wanted):
        if p:
            middle = sum(wanted[:token]) + p / 2
            got, log_prob = draw(P, [middle], **params)
            assert got.tolist() == [token]
            assert float(log_prob) == pytest.approx(math.log(p), abs=SINGLE)


def test_every_row_is_cut_by_its_own_distribution_and_number() -> None:
    logits = torch.cat([logits_of(P), logits_of([0.7, 0.1, 0.1, 0.1]), logits_of([0.1, 0.1, 0.1, 0.7])])
    uniform, params = torch.tensor([0.3, 0.2, 0.999], dtype=torch.float64), SamplingParams(temperature=0.8, top_p=0.9)
    tokens, log_probs = sample_tokens(logits, uniform, params)
    for row in range(3):
        token, log_prob = sample_tokens(logits[row : row + 1], uniform[row : row + 1], params)
        assert token.item() == tokens[row].item()
        assert log_prob.item() == pytest.approx(log_probs[row].item(), abs=SINGLE)


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = logits_of(P).bfloat16()
    uniform, params = torch.tensor([0.3], dtype=torch.float64), SamplingParams(temperature=0.7)
    for got, wanted in zip(
        sample_tokens(logits, uniform, params), sample_tokens(logits.float(), uniform, params), strict=True
    ):
        assert got.equal(wanted)


@pytest.mark.parametrize(
    "p", [[0, 0.5, 0, 0.5, 0, 0], [0, 0, 1, 0], [0.3, 0.3, 0.4, 0], [0] + [0.1] * 10 + [0], [1e-9, 1, 1e-9, 0]], ids=str
)
@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.5, JUST_BELOW_1])
def test_a_token_of_probability_0_is_never_drawn(p: list[float], uniform: float) -> None:
    (token,), (log_prob,) = draw(p, [uniform])
    assert p[int(token)] > 0
    assert math.isfinite(log_prob)


def test_the_last_number_draws_the_last_possible_token_of_any_distribution() -> None:
    # In many random rows the running sum ends a rounding away from 1; the tokens behind the last possible one follow.
    logits = 4 * torch.randn(500, 300, generator=torch.Generator().manual_seed(0))
    logits[:, 280:] = -INF
    uniform = torch.full((500,), JUST_BELOW_1, dtype=torch.float64)
    tokens, log_probs = sample_tokens(logits, uniform, SamplingParams(temperature=1.0))
    assert int(tokens.max()) == 279
    assert bool(torch.isfinite(log_probs).all())
    for params in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}):
        tokens, log_probs = sample_tokens(logits, uniform, SamplingParams(temperature=1.0, **params))
        assert bool(torch.isfinite(log_probs).all())


# --- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uniform", [0.0, 0.5, JUST_BELOW_1])
def test_greedy_takes_the_likeliest_token_with_its_log_probability_at_temperature_1(uniform: float) -> None:
    (token,), (log_prob,) = draw(P, [uniform], temperature=0.0, top_k=2, top_p=0.3, min_p=0.9)
    assert int(token) == 1
    assert float(log_prob) == pytest.approx(math.log(0.5), abs=SINGLE)


def test_only_temperature_0_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-3).greedy
