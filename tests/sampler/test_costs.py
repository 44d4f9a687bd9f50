import pytest

from sampler.costs import Average, Costs


def test_an_average_follows_what_it_sees_and_drops_its_guess_at_once() -> None:
    average = Average(100.0)

    average.observe(1.0)
    first = average.value
    for _ in range(50):
        average.observe(3.0)

    assert first == 1.0
    assert average.value == pytest.approx(3.0, abs=0.02)


def test_the_first_value_of_an_average_counts_for_no_more_than_the_next_ones() -> None:
    average = Average(100.0)

    for value in (50.0, *[1.0] * 9):
        average.observe(value)

    assert average.value == pytest.approx(5.9)


def test_the_price_of_a_step_and_of_a_token_are_told_apart() -> None:
    costs = Costs()
    for num_tokens in (1, 8, 64, 256):
        costs.observe_forward(num_tokens, 0.01 + 0.001 * num_tokens)

    rates = costs.rates

    assert rates.step_seconds == pytest.approx(0.01)
    assert rates.token_seconds == pytest.approx(0.001)


def test_many_decode_steps_do_not_wash_out_the_few_prefills() -> None:
    costs = Costs()
    costs.observe_forward(256, 0.266)
    for num_rows in [1, 2, 3] * 1000:
        costs.observe_forward(num_rows, 0.01 + 0.001 * num_rows)

    assert costs.rates.token_seconds == pytest.approx(0.001)


def test_without_a_usable_line_a_token_costs_its_share_of_a_step() -> None:
    one_size, falling = Costs(), Costs()
    one_size.observe_forward(200, 0.4)
    falling.observe_forward(1, 0.4)
    falling.observe_forward(99, 0.1)

    assert (one_size.rates.step_seconds, one_size.rates.token_seconds) == (0.0, 0.002)
    assert (falling.rates.step_seconds, falling.rates.token_seconds) == (0.0, 0.005)


def test_writing_and_reading_are_measured_apart_and_by_the_block() -> None:
    costs = Costs()
    costs.observe_swap(50, 0.1, is_in=False)
    costs.observe_swap(10, 0.5, is_in=True)
    costs.observe_swap(0, 9.0, is_in=True)

    assert costs.rates.swap_seconds(2) == pytest.approx(2 * (0.002 + 0.05))


def test_the_queue_of_who_comes_back_without_a_cache_is_measured() -> None:
    costs = Costs()
    costs.observe_requeue(0.7)

    assert costs.rates.requeue_seconds == 0.7
