import math
import threading
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from sampler.engine_error import EngineError
from sampler.params import SamplingParams
from sampler.sampling import Certain, Sampled, TokenLogprobs, forced, gumbel_noise, sample

PROBABILITIES = [0.05, 0.5, 0.15, 0.3]
LARGEST_SEED = 2**63 - 1
GREEDY = SamplingParams(temperature=0)
PINNED = [386, 877, 794, 142, 679]


def logits_of(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities).log()


def random_logits(size: int = 64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


def allow(*token_ids: int, size: int = 4) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[list(token_ids)] = True
    return mask


def tokens(
    logits: Tensor, params: SamplingParams, mask: np.ndarray | None = None, positions: int = 300
) -> list[int]:
    return [token_at(logits, params, position, mask) for position in range(positions)]


def token_at(
    logits: Tensor,
    params: SamplingParams,
    position: int = 0,
    mask: np.ndarray | None = None,
    counts: Mapping[int, int] | None = None,
) -> int:
    return sample(logits, params, position, mask, counts).token_id


# --- Greedy --------------------------------------------------------------------------------------


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = random_logits()

    assert set(tokens(logits, GREEDY, positions=20)) == {int(logits.argmax())}


def test_greedy_sampling_reads_neither_seed_nor_top_p() -> None:
    logits = random_logits()

    params = SamplingParams(temperature=0, top_p=0.1, seed=7)

    assert token_at(logits, params) == token_at(logits, GREEDY)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-40, 5e-324])
def test_a_temperature_near_zero_comes_to_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)

    assert set(tokens(logits_of(PROBABILITIES), params)) == {1}
    assert set(tokens(logits_of(PROBABILITIES), params, allow(0, 2))) == {2}


def test_a_temperature_without_end_comes_to_even_chances() -> None:
    counts = Counter(tokens(logits_of(PROBABILITIES), SamplingParams(temperature=1e6)))

    assert counts.keys() == {0, 1, 2, 3}
    assert min(counts.values()) > 50


# --- A function of seed, position and logits -----------------------------------------------------


def test_a_token_does_not_depend_on_what_was_sampled_before() -> None:
    logits, params = random_logits(), SamplingParams(seed=3)
    in_order = tokens(logits, params, positions=50)

    backwards = [token_at(logits, params, position) for position in reversed(range(50))]
    between_others = []
    for position in range(50):
        tokens(-logits, SamplingParams(temperature=2, seed=position), positions=position % 3)
        between_others.append(token_at(logits, params, position))

    assert backwards[::-1] == in_order
    assert between_others == in_order


def test_a_token_does_not_depend_on_the_generators_of_the_process() -> None:
    logits, params = random_logits(), SamplingParams(seed=3)

    torch.manual_seed(1)
    first = tokens(logits, params, positions=50)
    torch.manual_seed(2)
    second = tokens(logits, params, positions=50)

    assert first == second


def test_sampling_leaves_the_generators_of_the_process_alone() -> None:
    before = torch.get_rng_state()

    tokens(random_logits(), SamplingParams(top_p=0.9), positions=5)

    assert torch.equal(torch.get_rng_state(), before)


def test_a_token_is_the_same_on_any_thread() -> None:
    logits, params = random_logits(), SamplingParams(seed=3)
    here, there = tokens(logits, params, positions=50), list[int]()

    thread = threading.Thread(target=lambda: there.extend(tokens(logits, params, positions=50)))
    thread.start()
    thread.join()

    assert there == here


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = random_logits()
    before = logits.clone()

    params = SamplingParams(0.5, 0.5, top_logprobs=3, presence_penalty=1, frequency_penalty=1)
    sample(logits, params, 0, allow(1, 2, 3, size=64), {1: 2})

    assert torch.equal(logits, before)


def test_the_drawn_token_is_pinned_across_versions() -> None:
    """A seed that a client kept must go on meaning the same tokens."""
    assert tokens(torch.zeros(1000), SamplingParams(seed=42), positions=5) == PINNED


# --- Noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**32, LARGEST_SEED])
@pytest.mark.parametrize("position", [0, 1, 2**20])
def test_noise_is_finite_and_has_the_gumbel_distribution(seed: int, position: int) -> None:
    noise = gumbel_noise(seed, position, 50_000)

    assert noise.shape == (50_000,)
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.03)
    assert noise.var() == pytest.approx(np.pi**2 / 6, rel=0.05)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 5), (0, 6)),  # neighbours
        ((0, 5), (1, 5)),
        ((1, 2), (2, 1)),
        ((0, 1), (1, 0)),
        ((0, 0), (2**62, 0)),
        ((0, 0), (0, 2**31)),
    ],
)
def test_another_seed_or_position_gives_independent_noise(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    size = 10_000
    first, second = gumbel_noise(*one, size), gumbel_noise(*other, size)

    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    # Nor is one the other's, shifted: of 10,000 values out of 2**24, 6 are shared by chance.
    assert len(np.intersect1d(first, second)) < 25


def test_noise_of_one_seed_and_position_is_always_the_same() -> None:
    assert np.array_equal(gumbel_noise(5, 9, 100), gumbel_noise(5, 9, 100))


@pytest.mark.parametrize("size", [1, 2, 1001])
@pytest.mark.parametrize(("seed", "position"), [(0, 0), (5, 9), (LARGEST_SEED, 2**31)])
def test_noise_is_made_of_what_numpy_has_for_uniform_numbers(
    seed: int, position: int, size: int
) -> None:
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position << 64))
    uniform = generator.random(size, dtype=np.float32)

    noise = gumbel_noise(seed, position, size)

    assert np.array_equal(noise, -np.log(-np.log(uniform)))


def test_noise_is_finite_where_the_uniform_number_is_zero() -> None:
    """One in 2**24 is: number 2,641 is the first one at this position."""
    noise = gumbel_noise(0, 895, 2642)

    assert noise[-1] == noise.min() == pytest.approx(-np.log(-np.log(np.finfo(np.float32).tiny)))


def test_differences_in_the_last_bits_of_logits_hardly_ever_change_a_token() -> None:
    """As they come of a context that is computed in other pieces, or another format."""
    generator = torch.Generator().manual_seed(2)
    params, changed = SamplingParams(seed=3), 0
    logits = 3 * torch.randn(50_000, generator=generator)

    for position in range(400):
        other = logits + 1e-3 * torch.randn(len(logits), generator=generator)
        changed += token_at(logits, params, position) != token_at(other, params, position)

    assert changed <= 4


# --- Frequencies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_over_positions_follow_the_softmax(temperature: float) -> None:
    logits = random_logits(8)

    drawn = tokens(logits, SamplingParams(temperature=temperature, seed=11), positions=1500)

    assert chi_square(drawn, torch.softmax(logits / temperature, dim=-1)) < CRITICAL_7


def test_frequencies_over_seeds_follow_the_softmax() -> None:
    logits = random_logits(8)

    drawn = [token_at(logits, SamplingParams(seed=seed), 17) for seed in range(1500)]

    assert chi_square(drawn, torch.softmax(logits, dim=-1)) < CRITICAL_7


def test_frequencies_in_the_nucleus_keep_their_proportions() -> None:
    logits = random_logits(8)
    nucleus = torch.softmax(logits, dim=-1).sort(descending=True).indices[:3]
    top_p = float(torch.softmax(logits, dim=-1)[nucleus].sum()) - 1e-3

    drawn = tokens(logits, SamplingParams(top_p=top_p, seed=5), positions=1000)

    expected = torch.zeros(8).index_fill(0, nucleus, 1) * torch.softmax(logits, dim=-1)
    assert chi_square(drawn, expected / expected.sum()) < CRITICAL_2


CRITICAL_2, CRITICAL_7 = 13.82, 24.32
"""What chi-square exceeds once in a thousand, for 2 and 7 degrees of freedom."""


def chi_square(drawn: list[int], probabilities: Tensor) -> float:
    counts = Counter(drawn)
    expected = {token: p * len(drawn) for token, p in enumerate(probabilities.tolist()) if p > 0}
    assert counts.keys() <= expected.keys()
    return math.fsum((counts[token] - n) ** 2 / n for token, n in expected.items())


# --- Nucleus -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    [
        (1e-60, {1}),  # the most likely token, always
        (0.01, {1}),
        (0.49, {1}),
        (0.51, {1, 3}),
        (0.79, {1, 3}),
        (0.81, {1, 2, 3}),
        (0.94, {1, 2, 3}),
        (0.96, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, nucleus: set[int]) -> None:
    assert set(tokens(logits_of(PROBABILITIES), SamplingParams(top_p=top_p))) == nucleus


def test_top_p_counts_probabilities_after_the_temperature() -> None:
    hot, cold = (SamplingParams(temperature=t, top_p=0.6) for t in (100.0, 0.25))

    assert len(set(tokens(logits_of(PROBABILITIES), hot))) == 3
    assert len(set(tokens(logits_of(PROBABILITIES), cold))) == 1


def test_top_p_counts_probabilities_among_the_allowed_tokens() -> None:
    params = SamplingParams(top_p=0.55)  # of 0.05, 0.15 and 0.3 the last alone is 0.6

    assert set(tokens(logits_of(PROBABILITIES), params, allow(0, 2, 3))) == {3}


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_what_is_drawn_is_the_greatest_with_noise_in_a_nucleus_that_was_sorted_out(
    spread: float, top_p: float
) -> None:
    size, seed = 3000, 9
    # Rounded, so that many are equally likely.
    logits = (spread * random_logits(size)).round(decimals=1)
    probabilities = torch.softmax(logits, dim=-1).double()
    order = sorted(range(size), key=lambda token: (-probabilities[token].item(), token))
    before = torch.cumsum(probabilities[order], dim=-1) - probabilities[order]
    mass_before = dict(zip(order, before.tolist(), strict=True))
    slack = 1e-5  # where the sum comes within rounding of it, either may be right
    nucleus = [token for token, mass in mass_before.items() if mass < top_p - slack]

    for position in range(100):
        noisy = logits.numpy() + gumbel_noise(seed, position, size)
        drawn = token_at(logits, SamplingParams(top_p=top_p, seed=seed), position)
        assert mass_before[drawn] < top_p + slack
        assert noisy[drawn] >= noisy[nucleus].max() - slack


def test_of_equally_likely_tokens_the_nucleus_keeps_the_first() -> None:
    assert set(tokens(torch.zeros(4), SamplingParams(top_p=0.4))) == {0, 1}


# --- Mask ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1e-40, 0.1, 1.0, 2.0, 1e6])
@pytest.mark.parametrize("top_p", [1e-60, 0.1, 0.9, 1.0])
def test_a_masked_token_is_never_drawn_however_likely(temperature: float, top_p: float) -> None:
    logits = torch.tensor([1e4, 0.0, 1.0, 1e30])
    params = SamplingParams(temperature, top_p)

    assert set(tokens(logits, params, allow(1, 2), positions=50)) <= {1, 2}


@pytest.mark.parametrize("temperature", [0, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.1, 1.0])
def test_a_token_that_alone_is_allowed_is_drawn_however_unlikely(
    temperature: float, top_p: float
) -> None:
    logits = torch.tensor([1e4, 0.0, -1e4, 1e4])

    assert set(tokens(logits, SamplingParams(temperature, top_p), allow(2), positions=20)) == {2}


def test_a_mask_that_allows_all_changes_nothing() -> None:
    logits, params = random_logits(), SamplingParams(top_p=0.9, seed=8)

    masked = tokens(logits, params, np.ones(64, dtype=bool), positions=50)

    assert masked == tokens(logits, params, positions=50)


# --- Penalties -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("presence", "frequency", "counts", "token"),
    [
        (0.0, 0.0, {1: 100}, 1),
        (0.5, 0.0, {}, 1),
        (0.4, 0.0, {1: 100}, 1),
        (0.6, 0.0, {1: 1}, 3),
        (0.6, 0.0, {1: 1, 3: 1}, 1),
        (0.0, 0.3, {1: 1}, 1),
        (0.0, 0.3, {1: 2}, 3),
        (0.0, 0.3, {1: 2, 3: 1}, 1),
        (0.0, 0.3, {1: 3, 3: 1}, 3),
        (0.0, 0.3, {1: 2, 3: 2}, 1),
        (0.3, 0.3, {1: 1}, 3),
        (-0.6, 0.0, {3: 1}, 3),
        (0.0, -0.3, {3: 2}, 3),
    ],
)
def test_penalties_are_taken_off_the_logits_of_what_was_sampled(
    presence: float, frequency: float, counts: dict[int, int], token: int
) -> None:
    logits = torch.tensor([-5.0, 1.0, -5.0, 0.5])
    params = SamplingParams(0, presence_penalty=presence, frequency_penalty=frequency)

    assert token_at(logits, params, counts=counts) == token


def test_penalties_come_before_the_temperature() -> None:
    logits = torch.tensor([-50.0, 1.0, -50.0, 0.5])
    params = SamplingParams(0.01, presence_penalty=0.6)

    drawn = {token_at(logits, params, position, counts={1: 1}) for position in range(50)}

    assert drawn == {3}


def test_a_token_that_is_forbidden_stays_so_whatever_the_penalties() -> None:
    logits = torch.tensor([0.0, 10.0, 0.0, 0.0])
    params = SamplingParams(presence_penalty=-2, frequency_penalty=-2)

    drawn = {token_at(logits, params, p, allow(0, 2), {1: 1000}) for p in range(50)}

    assert drawn == {0, 2}


def test_without_penalties_it_makes_no_difference_what_was_sampled() -> None:
    logits, params = random_logits(), SamplingParams(seed=3)

    drawn = [token_at(logits, params, p, counts={p % 64: p}) for p in range(1, 50)]

    assert drawn == [token_at(logits, params, p) for p in range(1, 50)]


def test_a_token_is_the_same_however_its_counts_are_ordered() -> None:
    logits = random_logits()
    params = SamplingParams(seed=3, presence_penalty=0.5, frequency_penalty=0.3)
    counts = {token: 1 + token % 3 for token in range(20)}
    backwards = dict(reversed(counts.items()))

    one, other = (
        [token_at(logits, params, p, None, c) for p in range(50)] for c in (counts, backwards)
    )

    assert one == other


# --- What is no number ---------------------------------------------------------------------------

NO_NUMBERS = {
    "one is NaN": [0.0, 1.0, torch.nan, 2.0],
    "all are NaN": [torch.nan] * 4,
    "all are minus infinity": [-torch.inf] * 4,
    "the largest is infinite": [0.0, torch.inf, 1.0, 2.0],
    "NaN beside infinity": [torch.inf, 1.0, torch.nan, 2.0],
}


@pytest.mark.parametrize("logits", NO_NUMBERS.values(), ids=NO_NUMBERS.keys())
@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_logprobs=2)],
    ids=["greedy", "drawn", "nucleus", "log-probabilities"],
)
@pytest.mark.parametrize("mask", [None, allow(1, 3)], ids=["free", "masked"])
def test_logits_that_mean_nothing_are_an_error(
    logits: list[float], params: SamplingParams, mask: np.ndarray | None
) -> None:
    with pytest.raises(EngineError, match="the model gave no numbers"):
        sample(torch.tensor(logits), params, 0, mask)


@pytest.mark.parametrize("logit", [torch.nan, torch.inf])
def test_what_is_no_number_is_an_error_where_a_token_is_forced_too(logit: float) -> None:
    with pytest.raises(EngineError, match="the model gave no numbers"):
        forced(torch.tensor([1.0, logit]), 1)


@pytest.mark.parametrize("logit", [-torch.inf, -3.0])
def test_a_token_that_is_forced_may_be_as_unlikely_as_can_be(logit: float) -> None:
    assert forced(torch.tensor([1.0, logit]), 1) == Sampled(1)


def test_nothing_is_worked_out_for_a_token_that_is_forced() -> None:
    assert forced(Certain(0, work_out=pytest.fail), 1) == Sampled(1)


def test_one_number_is_enough() -> None:
    logits = torch.tensor([-torch.inf, -torch.inf, -3.0, -torch.inf])

    assert set(tokens(logits, SamplingParams(), positions=20)) == {2}


# --- Log-probabilities ---------------------------------------------------------------------------


def test_log_probabilities_come_only_if_they_are_asked_for() -> None:
    assert sample(logits_of(PROBABILITIES), GREEDY, 0) == Sampled(1)


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_log_probabilities_are_those_of_the_token_and_of_the_likeliest(num_top: int) -> None:
    params = SamplingParams(0, top_logprobs=num_top)

    logprobs = sample(logits_of(PROBABILITIES), params, 0).logprobs

    assert logprobs is not None
    assert logprobs.token_id == 1
    assert logprobs.logprob == pytest.approx(math.log(0.5))
    assert [token for token, _ in logprobs.top] == [1, 3, 2][:num_top]
    expected = [math.log(p) for p in (0.5, 0.3, 0.15)][:num_top]
    assert [value for _, value in logprobs.top] == pytest.approx(expected)


def test_log_probabilities_are_the_models_own_whatever_steers_sampling() -> None:
    params = SamplingParams(0.1, 0.1, top_logprobs=2, presence_penalty=2, frequency_penalty=2)

    logprobs = sample(logits_of(PROBABILITIES), params, 0, allow(0), {0: 9, 1: 9}).logprobs

    assert logprobs is not None
    assert logprobs.token_id == 0
    assert logprobs.logprob == pytest.approx(math.log(0.05))
    assert [token for token, _ in logprobs.top] == [1, 3]
    assert [value for _, value in logprobs.top] == pytest.approx([math.log(0.5), math.log(0.3)])


def test_a_token_is_the_same_with_and_without_log_probabilities() -> None:
    logits = random_logits()

    plain, told = (
        tokens(logits, SamplingParams(seed=3, top_logprobs=n), positions=50) for n in (None, 5)
    )

    assert told == plain


def test_there_are_no_more_log_probabilities_than_tokens() -> None:
    logprobs = sample(logits_of(PROBABILITIES), SamplingParams(top_logprobs=20), 0).logprobs

    assert logprobs is not None
    assert len(logprobs.top) == 4


def test_log_probabilities_are_finite_so_that_they_can_be_written() -> None:
    logits = torch.tensor([0.0, -torch.inf, -1e30, -1e4])

    logprobs = sample(logits, SamplingParams(top_logprobs=4), 0, allow(2)).logprobs

    top = ((0, 0.0), (3, -9999.0), (2, -9999.0), (1, -9999.0))
    assert logprobs == TokenLogprobs(2, -9999.0, top)
