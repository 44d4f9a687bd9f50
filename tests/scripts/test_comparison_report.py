"""The report says what the figures say, stands for itself, and is valid of whatever there is."""

import io
import re
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from scripts.comparison import findings, tables
from scripts.comparison.claims import Verdict, caching, many_calls, overhead
from scripts.comparison.drawing import STYLES
from scripts.comparison.plots import cumulative_tokens_forwarded, plots
from scripts.comparison.report import DESCRIPTIONS, ours, render, summary, write_report
from scripts.comparison.results import Agreement, Design, Results, Split, Trial
from scripts.comparison.statistics import BASELINE, Comparison, Estimate, Measured
from scripts.comparison.wording import listed, minutes, plural, ratio, seconds, share, size
from tests.scripts.example_results import COMMAND, Times, example, paired, split, trial, turn

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """An HTML page whose elements are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "aria-labelledby"):
                self.references.append((value or "").removeprefix("#"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"closed but not open: {tag}"
        assert self.open.pop() == tag


def results_of(trials: Iterable[Trial], **members: bool | list[str]) -> Results:
    return Results(command=COMMAND, began_at=0.0, trials=list(trials), **members)  # type: ignore[arg-type]


def four(baseline: float, suspended: float, **others: float) -> Times:
    """Return seconds of a run; each of the two is measured twice."""
    return {
        Design.STATELESS_CACHE: baseline,
        Design.AGAIN: baseline,
        Design.SUSPENDED: suspended,
        Design.SUSPENDED_AGAIN: suspended,
        **others,
    }


@pytest.fixture(scope="module")
def whole() -> Results:
    return example()


@pytest.fixture(scope="module")
def html(whole: Results) -> str:
    return render(whole)


# --- The page -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_is_well_formed_and_its_ids_are_unique(html: str) -> None:
    page = Page(html)

    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)


@pytest.mark.slow
def test_the_page_needs_nothing_but_itself(html: str) -> None:
    page = Page(html)

    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "http://" not in html
    assert "https://" not in html
    assert not re.search(r"url\((?!#)", html)
    assert "@import" not in html
    assert len(html.encode()) < 3_000_000


@pytest.mark.slow
def test_the_page_names_every_design_and_the_command(html: str) -> None:
    assert all(f">{design}<" in html or f"</i>{design}<" in html for design in Design)
    assert (
        "<pre>scripts/compare --out &#39;a &lt;folder&gt;&#39; &amp;&amp; echo done</pre>" in html
    )


@pytest.mark.slow
def test_the_page_has_its_sections_in_order(html: str) -> None:
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", html)

    assert headings == [
        "The answer",
        "What a run costs",
        "The claims of the launch write-up",
        "How it depends",
        "What the server does around the model",
        "Do the designs sample the same tokens?",
        "Other servers",
        "When it does not matter",
        "How it was measured",
    ]


@pytest.mark.slow
def test_a_whole_report_is_not_called_partial(html: str, whole: Results) -> None:
    assert "is partial" not in html
    assert whole.notes[0] in html


@pytest.mark.parametrize("note", ["<script>alert(1)</script>", 'a "quoted" & <b>bold</b> note'])
def test_notes_are_escaped(note: str) -> None:
    page = render(results_of([], notes=[note]))

    assert note not in page
    assert "<script" not in page


@pytest.mark.slow
def test_names_in_plots_are_escaped() -> None:
    trials = paired(four(2.0, 1.0), engine="<b>&engine", workload="<i>calls")

    page = render(results_of(trials))

    assert "<b>&" not in page
    assert "<i>calls" not in page
    Page(page)


def test_empty_results_give_a_report_that_says_so() -> None:
    page = render(results_of([]))

    Page(page)
    assert "This report is partial." in page
    assert "there is no answer" in page
    assert "Nothing was measured." in page
    assert page.count("Not measured.") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "designs",
    [
        [Design.SUSPENDED],
        [Design.STATELESS_CACHE],
        [Design.STATELESS],
        [Design.SUSPENDED_AGAIN],
        [Design.AGAIN, Design.STATELESS_CACHE_RECONNECT],
        [Design.CHAINED, Design.STATELESS_CACHE],
        ["llama.cpp server"],
    ],
)
def test_partial_results_give_a_valid_report(whole: Results, designs: Sequence[str]) -> None:
    trials = [each for each in whole.trials if each.design in designs and each.round == 0]

    page = render(msgspec.structs.replace(whole, trials=trials, is_complete=False))

    Page(page)
    assert "This report is partial." in page


@pytest.mark.slow
def test_a_report_of_a_server_that_does_not_tell_its_times_is_valid(whole: Results) -> None:
    untold = [each for each in whole.trials if each.design == "llama.cpp server"]
    trials = [msgspec.structs.replace(each, design=Design.STATELESS_CACHE) for each in untold]

    page = render(results_of([*trials, *untold]))

    Page(page)


def test_a_report_is_written_as_one_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("an older one")

    write_report(results_of([]), path)

    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_report(results_of([]), tmp_path / "missing" / "report.html")


def test_the_four_designs_are_described_with_the_cached_baseline_first() -> None:
    assert [each.design for each in DESCRIPTIONS] == [
        Design.STATELESS_CACHE,
        Design.CHAINED,
        Design.SUSPENDED,
        Design.STATELESS,
    ]


@pytest.mark.slow
def test_the_page_says_what_its_figures_leave_out(html: str) -> None:
    said = " ".join(html.split())

    assert "without HTTP headers, and without the headers and masks of WebSocket frames" in said
    assert "how far they drift from what they sampled" in said
    assert "how often the server looked" in said


# --- Whether it is the same run -------------------------------------------------------------------


def agreed(design: Design, **members: int) -> Agreement:
    same = {"num_runs": 3, "equal_runs": 3, "num_turns": 6, "drifted_turns": 0}
    return Agreement(
        design=design, sampler="greedy", num_tokens=300, differing_tokens=0, **(same | members)
    )


def test_designs_that_sample_other_tokens_than_they_must_are_named() -> None:
    found = findings.disagreements(
        [
            agreed(Design.CHAINED, equal_runs=2),
            agreed(Design.SUSPENDED_INJECT, drifted_turns=1),
            agreed(Design.SUSPENDED_AGAIN),
            agreed(Design.STATELESS, equal_runs=1, drifted_turns=4),
        ]
    )

    assert found == [
        "chained (greedy): 1 of 3 runs sampled other tokens than suspended, and 0 of 6 turns went "
        "on from other ones.",
        "suspended, inject (greedy): 0 of 3 runs sampled other tokens than suspended, and 1 of 6 "
        "turns went on from other ones.",
    ]


def test_tokens_that_differ_are_told_of_before_all_else() -> None:
    results = results_of([], notes=["Something is missing."])
    results.agreements = [agreed(Design.CHAINED, equal_runs=0)]

    page = render(results)

    Page(page)
    fault = page.index("The designs do not sample the same tokens.")
    assert fault < page.index("Something is missing.") < page.index("The answer")
    assert "it is a fault, told of at the top" in page


def test_tokens_that_agree_are_no_news() -> None:
    results = results_of([])
    results.agreements = [agreed(Design.CHAINED), agreed(Design.STATELESS, equal_runs=0)]

    page = render(results)

    assert "do not sample the same tokens" not in page
    assert "in the others nothing differs" in " ".join(page.split())


# --- Tables ---------------------------------------------------------------------------------------


def test_the_summary_has_the_cached_baseline_first_and_ratios_to_it() -> None:
    [grid] = tables.summary_grids(Measured(paired(four(2.0, 1.0, stateless=8.0))))

    rows = {row.name: row.entries for row in grid.rows}

    assert next(iter(rows)) == BASELINE
    assert rows[Design.SUSPENDED][0].details[-1] == "0.500× [0.500–0.500]"
    assert rows["stateless"][0].details[-1] == "4× [4–4]"
    assert not rows[Design.SUSPENDED][0].is_muted
    assert rows[Design.AGAIN][0].is_muted
    assert "noise floor end to end 0 %" in grid.remark


def test_tokens_forwarded_again_are_shown() -> None:
    one = trial(BASELINE, [turn(split(decode=1.0))] * 21)
    again = msgspec.structs.replace(one, counts={**one.counts, "tokens_reforwarded": 77.0})

    [grid] = tables.summary_grids(Measured([again]))

    assert grid.rows[0].entries[3] == tables.Entry("420", ("of them again 77",))


def test_an_engine_is_summed_up_by_its_cell_of_twenty_calls() -> None:
    trials = [
        each
        for calls in (1, 10, 20, 43)
        for each in paired(four(2.0, 1.0), num_turns=calls + 1, workload=f"{calls} calls", x=calls)
    ]

    cell = findings.headline(Measured(trials), "int4")

    assert cell is not None
    assert cell.workload == "20 calls"


def test_an_engine_without_many_calls_is_summed_up_by_its_most() -> None:
    trials = [
        each
        for calls in (1, 5)
        for each in paired(four(2.0, 1.0), num_turns=calls + 1, workload=f"{calls} calls", x=calls)
    ]

    cell = findings.headline(Measured(trials), "int4")

    assert cell is not None
    assert cell.workload == "5 calls"


def test_the_lag_of_the_loop_is_given_by_design_and_engine() -> None:
    grid = tables.lag_grid(Measured(paired(four(2.0, 1.0))))

    assert grid.columns == ("design", "int4")
    # Five rounds, each of a hundred looks.
    assert grid.rows[0].entries == (tables.Entry("≤ 1 ms", ("99 %: ≤ 5 ms", "500 looks")),)


def test_stages_are_given_by_design_for_one_run() -> None:
    [grid] = tables.stage_grids(Measured(paired(four(2.0, 1.0))))

    assert grid.columns == ("stage", "stateless+cache", "suspended")
    assert [row.name for row in grid.rows][:2] == ["parse", "render"]
    assert grid.rows[0].entries[0].details == ("21 runs, 42 items",)


def test_other_servers_stand_beside_ours_on_the_same_workload() -> None:
    trials = [
        *paired(four(2.0, 1.0)),
        *paired({"llama.cpp server": 3.0}, engine="Q4_1"),
        *paired(four(2.0, 1.0), workload="5 calls"),
    ]

    [grid] = tables.outside_grids(Measured(trials))

    assert grid.title == "calls: 20 calls"
    assert [row.name for row in grid.rows] == [
        "stateless+cache, int4",
        "suspended, int4",
        "llama.cpp server, Q4_1",
    ]


def test_the_terminal_shows_each_engine_and_design(whole: Results) -> None:
    console = Console(width=200, file=io.StringIO(), record=True)

    console.print(summary(whole))

    text = console.export_text()
    assert "int4: calls, 20 calls" in text
    assert all(str(design) in text for design in (Design.CHAINED, Design.SUSPENDED_AGAIN))
    assert "partial" not in text


def test_the_terminal_says_that_results_are_partial() -> None:
    console = Console(width=200, file=io.StringIO(), record=True)

    console.print(summary(results_of([])))

    assert "(partial)" in console.export_text()


# --- The answer -----------------------------------------------------------------------------------


def test_the_answer_says_how_much_sooner() -> None:
    answer = findings.answer(Measured(paired(four(2.0, 1.0, stateless=8.0, chained=1.6))))

    assert answer[0] == (
        "With 20 tool calls on int4, beside stateless requests with warm caches, an agent run that "
        "stays suspended takes 50 % less time (0.500× [0.500–0.500]) end to end; chained by "
        "previous_response_id over one WebSocket it takes 20 % less time (0.800× [0.800–0.800]) "
        "and stateless without any cache 4 times the time (4× [4–4])."
    )
    assert answer[-1].startswith("In 0 of 1 cell it does not matter")


def test_the_answer_says_that_there_is_no_difference() -> None:
    answer = findings.answer(Measured(paired(four(1.0, 1.0), noise=0.1)))

    assert "takes the same time within the noise" in answer[0]
    assert "In 1 of 1 cell it does not matter" in answer[-1]
    assert "(1 of 1 on int4)" in answer[-1]


def test_the_answer_of_a_single_round_concludes_nothing() -> None:
    answer = findings.answer(Measured(paired(four(2.0, 1.0), num_rounds=1)))

    assert len(answer) == 1
    assert "50 % less time (0.500×) (not to be told from noise yet) end to end." in answer[0]


def test_the_answer_prefers_a_real_engine() -> None:
    trials = [*paired(four(2.0, 1.0), engine="simulated 1000"), *paired(four(2.0, 1.9))]

    assert "on int4" in findings.answer(Measured(trials))[0]


def test_the_answer_says_how_it_depends_on_the_pace() -> None:
    trials = [
        each
        for pace, suspended in ((65, 1.0), (1000, 0.8), (4000, 0.6))
        for each in paired(
            four(1.0, suspended),
            experiment="pace",
            engine=f"simulated {pace}",
            workload=f"{pace} tokens/s",
            x=pace,
        )
    ]

    answer = findings.answer(Measured(trials))

    assert answer[1] == (
        "At a given pace of the model, it saves nothing that can be told from noise at 65 "
        "tokens/s, 20 % at 1,000 tokens/s and 40 % at 4,000 tokens/s: the faster the model, the "
        "more it matters how the run is held."
    )


# --- When it does not matter ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "low", "high", "reason"),
    [
        (0.5, 0.45, 0.55, ""),
        (0.97, 0.965, 0.975, "less than 5 %"),
        (0.97, 0.9, 1.1, "within the noise"),
        (1.2, 1.1, 1.3, "suspended is slower"),
    ],
)
def test_a_cell_does_not_matter_for_a_reason(
    value: float, low: float, high: float, reason: str
) -> None:
    comparison = Comparison(Estimate(value, low, high, 5), noise=0.01)

    assert findings.reason_not_to_care(comparison, None) == reason


def test_a_difference_that_long_tools_hide_does_not_matter() -> None:
    without = Comparison(Estimate(0.5, 0.45, 0.55, 5), noise=0.01)
    with_tools = Comparison(Estimate(0.98, 0.97, 0.99, 5), noise=0.01)

    assert (
        findings.reason_not_to_care(without, with_tools) == "less than 5 % of the time with tools"
    )


def test_where_it_does_not_matter_is_said_by_what_is_varied() -> None:
    runs = {1: 1.0, 5: 0.99, 20: 0.7, 43: 0.6}
    tools = {"none": 0.0, "50 ms": 0.05, "500 ms": 0.5}
    trials = [
        *(
            each
            for calls, ratio_there in runs.items()
            for each in paired(four(1.0, ratio_there), workload=f"{calls} calls", x=calls)
        ),
        *(
            each
            for label, waited in tools.items()
            for each in paired(
                four(1.0, 0.7), experiment="tools", workload=label, x=waited, tool_seconds=waited
            )
        ),
    ]

    assert findings.where_not(Measured(trials)) == [
        "calls, int4: up to 5 calls",
        "tools, int4: at 500 ms",
    ]


def test_paces_are_one_line_of_where_it_does_not_matter() -> None:
    trials = [
        each
        for pace in (65, 1000)
        for each in paired(
            four(1.0, 1.0 if pace == 65 else 0.5),
            experiment="pace",
            engine=f"simulated {pace}",
            workload=f"{pace} tokens/s",
            x=pace,
        )
    ]

    assert findings.where_not(Measured(trials)) == ["pace: at 65 tokens/s"]


def test_what_is_left_of_a_suspended_turn_is_named() -> None:
    parts = split(network=0.01, pre_inference=0.02, decode=0.07)
    trials = [trial(design, [turn(parts)] * 21) for design in (BASELINE, Design.SUSPENDED)]

    assert findings.what_is_left(Measured(trials)) == [
        "int4 (20 calls): the largest share of a suspended turn of 100 ms is decode, 70 %; of what "
        "is not inference, pre-inference, 20 ms (20 %)."
    ]


# --- The claims -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suspended", "verdict"),
    [
        (0.5, Verdict.HELD),
        (0.6, Verdict.HELD),
        (0.7, Verdict.PARTLY),
        (1.0, Verdict.NOT_HELD),
        (1.5, Verdict.NOT_HELD),
    ],
)
def test_many_calls_are_judged_by_the_best_cell(suspended: float, verdict: Verdict) -> None:
    trials = [
        *paired(four(1.0, suspended)),
        *paired(four(1.0, 0.1), num_turns=6, workload="5 calls", x=5),
    ]

    claim = many_calls(Measured(trials))

    assert claim.verdict is verdict
    assert [each.cell for each in claim.evidence] == ["calls: 20 calls, int4"]


def test_the_chained_design_may_make_the_first_claim_hold() -> None:
    claim = many_calls(Measured(paired(four(1.0, 0.9, chained=0.5))))

    assert claim.verdict is Verdict.HELD
    assert claim.found.startswith("At most 50 % less time (0.500× [0.500–0.500]) (chained, calls")


def test_claims_about_noise_do_not_hold() -> None:
    claim = many_calls(Measured(paired(four(1.0, 0.97), noise=0.1, seed=3)))

    assert claim.verdict is Verdict.NOT_HELD


def test_few_calls_do_not_judge_the_claim_on_many() -> None:
    claim = many_calls(Measured(paired(four(1.0, 0.5), num_turns=6, workload="5 calls", x=5)))

    assert claim.verdict is Verdict.NOT_MEASURED


def test_a_single_round_judges_nothing() -> None:
    claim = many_calls(Measured(paired(four(1.0, 0.5), num_rounds=1)))

    assert claim.verdict is Verdict.NOT_MEASURED
    assert claim.found.startswith("It was measured, but not often enough")


def first_tokens(cached: Split, stateless: Split) -> Measured:
    trials = [
        trial(design, [turn(parts)] * 5, round_number=number)
        for number in range(3)
        for design, parts in (
            (Design.STATELESS_CACHE, cached),
            (Design.AGAIN, cached),
            (Design.STATELESS, stateless),
        )
    ]
    return Measured(trials)


@pytest.mark.parametrize(
    ("stateless", "verdict"),
    [
        (split(pre_inference=0.040, prefill=0.010), Verdict.HELD),
        (split(pre_inference=0.012, prefill=0.300), Verdict.PARTLY),
        (split(pre_inference=0.012, prefill=0.010), Verdict.NOT_HELD),
    ],
)
def test_caching_is_judged_with_the_prefix_forgotten_and_kept(
    stateless: Split, verdict: Verdict
) -> None:
    claim = caching(first_tokens(split(pre_inference=0.010, prefill=0.010), stateless))

    assert claim.verdict is verdict


def test_caching_says_what_it_saves_in_both_ways() -> None:
    cached = split(pre_inference=0.010, prefill=0.010)

    claim = caching(first_tokens(cached, split(pre_inference=0.030, prefill=0.070)))

    assert claim.found == (
        "Over 1 cell the first token comes 80 % sooner with caches (median; from 80 % to 80 %), "
        "and 50 % sooner with the prefix kept in both."
    )


def test_caching_is_not_measured_without_the_stateless_design() -> None:
    assert caching(Measured(paired(four(1.0, 0.5)))).verdict is Verdict.NOT_MEASURED


def paces(overhead_by_pace: dict[float, float], designs: Sequence[Design]) -> Measured:
    """Return turns of a second of which that share is overhead."""
    trials = [
        trial(
            design,
            [turn(split(pre_inference=part, decode=1 - part))] * 21,
            experiment="pace",
            engine=f"simulated {pace:g}",
            workload=f"{pace:g} tokens/s",
            x=pace,
            round_number=number,
        )
        for pace, part in overhead_by_pace.items()
        for design in designs
        for number in range(3)
    ]
    return Measured(trials)


STATELESS = (Design.STATELESS_CACHE, Design.STATELESS)


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ({65: 0.05, 1000: 0.6, 4000: 0.8}, Verdict.HELD),
        ({65: 0.05, 1000: 0.3, 4000: 0.8}, Verdict.PARTLY),
        ({65: 0.05, 1000: 0.3, 4000: 0.4}, Verdict.PARTLY),
        ({65: 0.20, 1000: 0.6}, Verdict.PARTLY),
        ({65: 0.20, 1000: 0.3, 4000: 0.4}, Verdict.NOT_HELD),
        ({65: 0.05}, Verdict.NOT_MEASURED),
        ({1000: 0.6}, Verdict.NOT_MEASURED),
        ({}, Verdict.NOT_MEASURED),
    ],
)
def test_overhead_is_judged_at_both_paces(shares: dict[float, float], verdict: Verdict) -> None:
    assert overhead(paces(shares, STATELESS)).verdict is verdict


def test_the_overhead_of_suspended_runs_does_not_judge_the_claim() -> None:
    measured = paces({65: 0.05, 1000: 0.6}, [Design.SUSPENDED])

    assert overhead(measured).verdict is Verdict.NOT_MEASURED


# --- Plots ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_plot_has_its_lines(whole: Results) -> None:
    drawn = {plot.name: plot.svg() for plot in plots(ours(whole))}

    assert list(drawn) == [
        *("calls", "context", "split", "pace", "forwarded"),
        *("results", "concurrency", "tools", "connections"),
    ]
    for name in ("calls", "context", "results", "concurrency"):
        for line in ("stateless-cache", "stateless", "chained", "suspended", "suspended-inject"):
            assert f'id="{name}.{name}-int4-{line}"' in drawn[name]
            assert f'id="{name}.{name}-simulated-1000-{line}"' in drawn[name]
        assert f'id="{name}.{name}-int4-ratio-suspended"' in drawn[name]
        assert f'id="{name}.{name}-int4-ratio-stateless"' not in drawn[name]
    assert 'id="split.split-simulated-4000-pre-inference"' in drawn["split"]
    assert 'id="pace.pace-stateless-cache"' in drawn["pace"]
    assert 'id="pace.pace-half"' in drawn["pace"]
    assert 'id="forwarded.forwarded-suspended"' in drawn["forwarded"]
    assert 'id="tools.tools-int4-suspended"' in drawn["tools"]
    assert (
        'id="connections.connections-int4-stateless-cache-new-connections"'
        in (drawn["connections"])
    )


@pytest.mark.slow
def test_lines_have_the_colour_of_their_design_and_text_that_of_the_page() -> None:
    [plot] = [each for each in plots(Measured(paired(four(2.0, 1.0)))) if each.name == "calls"]

    svg = plot.svg()

    assert STYLES[Design.SUSPENDED].color in svg
    assert STYLES[Design.STATELESS_CACHE].color in svg
    assert "currentColor" in svg
    assert "#000000" not in svg
    assert "#010203" not in svg


def test_a_caption_says_what_the_plot_shows() -> None:
    [plot, *_] = plots(Measured(paired(four(2.1, 1.05, stateless=8.0))))

    assert re.fullmatch(
        r"At the largest value measured: on int4, 20 calls: stateless\+cache [\d.]+ s, suspended "
        r"[\d.]+ (s|ms) and stateless [\d.]+ s \(suspended / stateless\+cache 0\.500× "
        r"\[0\.500–0\.500\]\)\.",
        plot.caption,
    )


def test_the_caption_on_paces_says_where_overhead_dominates() -> None:
    measured = paces({65: 0.05, 1000: 0.6, 4000: 0.8}, STATELESS)

    [plot] = [each for each in plots(measured) if each.name == "pace"]

    assert "stateless+cache 5 % at 65 and 80 % at 4,000 (more than inference from 1,000" in (
        plot.caption
    )


def test_no_figures_give_no_plots() -> None:
    assert plots(Measured([])) == []


def test_designs_differ_in_colour_and_in_marker() -> None:
    assert len({style.color for style in STYLES.values()}) == len(STYLES)
    assert len({style.marker for style in STYLES.values()}) == len(STYLES)


def test_tokens_forwarded_add_up_over_the_turns() -> None:
    turns = [turn(split(decode=1.0), tokens_forwarded=tokens) for tokens in (100, 20, 30)]

    assert cumulative_tokens_forwarded(trial(BASELINE, turns)) == [100, 120, 150]


def test_tokens_forwarded_are_not_known_where_a_turn_does_not_tell() -> None:
    turns = [turn(split(decode=1.0), tokens_forwarded=tokens) for tokens in (100, None)]

    assert cumulative_tokens_forwarded(trial(BASELINE, turns)) == []


# --- Words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (12.34, "12.3 s"),
        (0.0123, "12.3 ms"),
        (0.00078, "780 µs"),
        (0.0, "0 µs"),
        (-0.0004, "-400 µs"),
    ],
)
def test_times_have_three_digits_and_a_unit(value: float, shown: str) -> None:
    assert seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.05, "5 %"), (0.0512, "5.1 %"), (0.3823, "38 %"), (0.0, "0 %"), (1.0, "100 %")],
)
def test_shares_are_percentages(value: float, shown: str) -> None:
    assert share(value) == shown


def test_other_figures_are_written_for_people() -> None:
    assert size(12_345) == "12.3 kB"
    assert size(12) == "12 B"
    assert minutes(90.4) == "90 seconds"
    assert minutes(2712) == "45 minutes"
    assert plural(1, "cell") == "1 cell"
    assert plural(1200, "cell") == "1,200 cells"
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert ratio(Estimate(0.5, 0.5, 0.5, 1)) == "0.500×"
