"""What the names of models mean, and what is said of a file that makes no sense."""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.client_events import parse_create
from protocol.errors import ProtocolError
from server.model_routes import ModelConfig, ModelRoutes, ModelRoutesError, ResolvedModels

SERVED = ("small", "large")

FILE = """
default = "assistant"
fallback = "small"

[alias]
"gpt-5-codex" = "codex"
codex = "assistant"
tiny = "small"

[split.assistant]
small = 9
cautious = 1

[model.cautious]
of = "small"
temperature = 0.2
max_output_tokens = 512
instructions = "Be careful."
reasoning = { effort = "low" }

[price.small]
input = 0.1
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.fixture
def routes(path: Path) -> ModelRoutes:
    return ModelRoutes.from_file(path, SERVED)


def split(**weights: float) -> ModelRoutes:
    """Return routes whose ``mixed`` is split among served models."""
    return ModelRoutes(list(weights), {"split": {"mixed": weights}})


def shares(routes: ModelRoutes, name: str, num_keys: int) -> Counter[str]:
    return Counter(routes.resolve(name, f"conversation {i}").model for i in range(num_keys))


# --- What a name means ---------------------------------------------------------------------------


def test_a_served_model_is_itself() -> None:
    config = ModelRoutes(SERVED).resolve("large", None)

    assert config == ModelConfig("large", "large", "large")


@pytest.mark.parametrize("name", ["medium", "LARGE", " large", "large\n"])
def test_without_a_file_other_names_are_not_found(name: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        ModelRoutes(SERVED).resolve(name, None)

    assert (refused.value.code, refused.value.status) == ("model_not_found", 404)


def test_a_configuration_has_the_model_that_runs_it_and_its_defaults(routes: ModelRoutes) -> None:
    config = routes.resolve("cautious", None)

    assert (config.requested, config.name, config.model) == ("cautious", "cautious", "small")
    assert config.defaults == {
        "temperature": 0.2,
        "max_output_tokens": 512,
        "instructions": "Be careful.",
        "reasoning": {"effort": "low"},
    }


def test_an_alias_means_what_its_target_means(routes: ModelRoutes) -> None:
    config = routes.resolve("tiny", None)

    assert config == ModelConfig("tiny", "small", "small")


def test_a_chain_of_aliases_and_splits_is_followed_to_its_end(routes: ModelRoutes) -> None:
    keys = [f"conversation {i}" for i in range(100)]

    by_alias = [routes.resolve("gpt-5-codex", key) for key in keys]

    assert {config.requested for config in by_alias} == {"gpt-5-codex"}
    assert {config.name for config in by_alias} == {"small", "cautious"}
    assert [config.name for config in by_alias] == [
        routes.resolve("assistant", key).name for key in keys
    ]


def test_a_name_that_nobody_knows_means_the_fallback(routes: ModelRoutes) -> None:
    config = routes.resolve("gpt-9", None)

    assert config == ModelConfig("gpt-9", "small", "small")


def test_a_fallback_may_be_any_name_that_is_known() -> None:
    table = {"fallback": "tiny", "alias": {"tiny": "mixed"}, "split": {"mixed": {"large": 1}}}

    config = ModelRoutes(SERVED, table).resolve("gpt-9", None)

    assert config == ModelConfig("gpt-9", "large", "large")


def test_no_name_means_the_default(routes: ModelRoutes) -> None:
    config = routes.resolve(None, "a conversation")

    assert config.requested == "assistant"
    assert config == routes.resolve("assistant", "a conversation")


def test_without_a_default_no_name_means_the_only_model() -> None:
    config = ModelRoutes(["small"]).resolve(None, None)

    assert config == ModelConfig("small", "small", "small")


def test_without_a_default_a_name_is_required_where_there_are_several_models() -> None:
    with pytest.raises(ProtocolError) as refused:
        ModelRoutes(SERVED).resolve(None, None)

    assert (refused.value.code, refused.value.param) == ("missing_required_parameter", "model")


def test_an_empty_name_is_no_name_even_for_the_fallback(routes: ModelRoutes) -> None:
    with pytest.raises(ProtocolError) as refused:
        routes.resolve("", None)

    assert (refused.value.code, refused.value.param) == ("missing_required_parameter", "model")


def test_all_names_are_listed_with_the_served_models_first(routes: ModelRoutes) -> None:
    assert routes.names == [
        "small", "large", "cautious", "gpt-5-codex", "codex", "tiny", "assistant"
    ]  # fmt: skip


def test_each_name_that_is_listed_can_be_resolved(routes: ModelRoutes) -> None:
    for name in routes.names:
        assert routes.resolve(name, None).model in SERVED


def test_prices_are_handed_through_as_they_came(routes: ModelRoutes) -> None:
    assert routes.price_table == {"small": {"input": 0.1}}
    assert ModelRoutes(SERVED).price_table == {}


# --- What a configuration does -------------------------------------------------------------------


def test_defaults_fill_in_what_a_body_leaves_out_or_has_as_null() -> None:
    config = ModelConfig("a", "cautious", "small", {"temperature": 0.2, "top_p": 0.5, "seed": 7})
    body = {"model": "a", "input": "Hello", "temperature": 0, "top_p": None, "user": None}
    before = dict(body)

    applied = config.applied_to(body)

    assert applied == {
        "model": "cautious",
        "input": "Hello",
        "temperature": 0,
        "top_p": 0.5,
        "seed": 7,
        "user": None,
    }
    assert body == before


def test_a_member_of_the_body_is_taken_as_a_whole() -> None:
    config = ModelConfig("a", "a", "a", {"text": {"verbosity": "low"}})
    text = {"format": {"type": "json_object"}}

    assert config.applied_to({"text": text})["text"] == text


def test_a_body_with_defaults_is_a_valid_create(routes: ModelRoutes) -> None:
    body = routes.resolve("cautious", None).applied_to({"input": "Hello", "max_output_tokens": 8})

    params = parse_create(body, transport="http")

    assert (params.model, params.temperature, params.max_output_tokens) == ("cautious", 0.2, 8)
    assert params.reasoning is not None
    assert params.reasoning.effort == "low"


# --- Splits --------------------------------------------------------------------------------------


def test_a_conversation_goes_the_same_way_in_each_process_and_release() -> None:
    routes = split(small=3, large=1)

    went = [routes.resolve("mixed", f"conversation {i}").model for i in range(12)]

    assert "".join(model[0] for model in went) == "lssslslslsss"


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 100), st.floats(1, 100)), min_size=1, max_size=4))
def test_targets_get_their_share_of_the_conversations(weights: list[float]) -> None:
    num_keys = 20_000
    routes = split(**{f"model-{i}": weight for i, weight in enumerate(weights)})

    counts = shares(routes, "mixed", num_keys)

    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = math.sqrt(num_keys * share * (1 - share))
        assert abs(counts[f"model-{i}"] - num_keys * share) <= 6 * deviation + 1e-6


@given(
    st.dictionaries(
        st.text(min_size=1),
        st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        min_size=1,
    ),
    st.text(),
)
def test_the_same_key_has_the_same_answer_whatever_the_weights(
    weights: dict[str, float], sticky: str
) -> None:
    first, second = split(**weights), split(**dict(reversed(weights.items())))

    config = first.resolve("mixed", sticky)

    assert config == first.resolve("mixed", sticky) == second.resolve("mixed", sticky)
    assert config.model in weights


def test_a_weight_may_be_a_whole_number_beyond_any_float() -> None:
    routes = split(small=1, large=10**400)

    assert shares(routes, "mixed", 100) == {"large": 100}


def test_a_target_that_is_added_takes_conversations_and_the_others_stay() -> None:
    before, after = split(small=2, large=1), split(small=2, large=1, new=1)
    keys = [f"conversation {i}" for i in range(1000)]

    moved = [
        after.resolve("mixed", key).model
        for key in keys
        if before.resolve("mixed", key).model != after.resolve("mixed", key).model
    ]

    assert set(moved) == {"new"}
    assert 150 < len(moved) < 350


def test_a_split_among_splits_is_drawn_independently() -> None:
    halves = {"small": 1, "large": 1}
    table = {"split": {"outer": {"inner": 1, "small": 1}, "inner": halves}}

    counts = shares(ModelRoutes(SERVED, table), "outer", 4000)

    assert 850 < counts["large"] < 1150


def test_without_a_key_each_request_is_drawn_for_itself() -> None:
    routes = split(small=1, large=1)

    went = Counter(routes.resolve("mixed", None).model for _ in range(400))

    assert min(went["small"], went["large"]) > 100


def test_what_follows_a_response_goes_where_that_went_whatever_its_key(routes: ModelRoutes) -> None:
    for parent in ("small", "cautious"):
        for key in (None, *map(str, range(20))):
            config = routes.resolve("gpt-5-codex", key, parent)

            assert (config.name, config.requested) == (parent, "gpt-5-codex")
            assert config.defaults == routes.resolve(parent, None).defaults


def test_a_name_that_cannot_mean_what_went_before_means_what_it_says(routes: ModelRoutes) -> None:
    assert routes.resolve("tiny", None, "cautious").name == "small"
    assert routes.resolve("cautious", None, "small").name == "cautious"
    for parent in ("large", "gone", "gpt-5-codex"):
        assert routes.resolve("assistant", "key", parent) == routes.resolve("assistant", "key")


def test_the_meanings_of_a_name_are_all_that_its_ways_lead_to(routes: ModelRoutes) -> None:
    table = {
        "fallback": "outer",
        "alias": {"a": "outer", "b": "inner"},
        "split": {"outer": {"b": 1, "large": 1}, "inner": {"small": 2}},
    }
    nested = ModelRoutes(SERVED, table)

    for name in ("outer", "a", "nobody"):
        assert nested.meanings(name) == {"small", "large"}
        assert nested.is_split(name)
    for name in ("inner", "b"):
        assert nested.meanings(name) == {"small"}
        assert not nested.is_split(name)
    assert routes.meanings(None) == {"small", "cautious"}
    assert ModelRoutes(SERVED).meanings("nobody") == ()
    assert ModelRoutes(SERVED).meanings(None) == ()


# --- What was resolved ---------------------------------------------------------------------------


def test_what_was_resolved_is_found_again(routes: ModelRoutes) -> None:
    resolved = ResolvedModels(routes)

    first = resolved.resolve("assistant", "a conversation")
    second = resolved.resolve("assistant", "a conversation")

    assert first is second
    assert first == routes.resolve("assistant", "a conversation")
    assert (resolved.num_hits, resolved.num_misses) == (1, 1)


def test_conversations_share_what_does_not_depend_on_them(routes: ModelRoutes) -> None:
    resolved = ResolvedModels(routes)

    for key in ("one", "other", None):
        resolved.resolve("tiny", key)
    for key in ("one", "other"):
        resolved.resolve("gpt-5-codex", key)

    assert (resolved.num_hits, resolved.num_misses) == (2, 3)


def test_no_name_is_kept_too() -> None:
    resolved = ResolvedModels(ModelRoutes(["small"]))

    assert resolved.resolve(None, None) is resolved.resolve(None, "a conversation")


def test_a_random_draw_is_not_kept(routes: ModelRoutes) -> None:
    resolved = ResolvedModels(routes)

    names = {resolved.resolve(name, None).name for name in [None, "codex"] * 200}

    assert names == {"small", "cautious"}
    assert (resolved.num_hits, resolved.num_misses) == (0, 400)


def test_without_a_key_there_may_be_one_to_stand_in(routes: ModelRoutes) -> None:
    went = set()
    for connection in map(str, range(100)):
        resolved = ResolvedModels(routes, sticky=connection)
        names = {resolved.resolve(name, None).name for name in [None, "codex"] * 3}
        went |= names

        assert len(names) == 1
        assert (resolved.num_hits, resolved.num_misses) == (4, 2)
        assert resolved.resolve(None, "key") == routes.resolve(None, "key")
    assert went == {"small", "cautious"}


def test_what_follows_a_response_need_not_be_resolved(routes: ModelRoutes) -> None:
    resolved = ResolvedModels(routes)

    names = [resolved.resolve("codex", key, "cautious").name for key in (None, "a", "b")]

    assert names == ["cautious"] * 3
    assert (resolved.num_hits, resolved.num_misses) == (3, 0)


def test_what_was_not_asked_for_longest_makes_room(routes: ModelRoutes) -> None:
    resolved = ResolvedModels(routes, max_kept=2)

    for name in ("small", "large", "small", "tiny", "small", "large"):
        resolved.resolve(name, None)

    assert (resolved.num_hits, resolved.num_misses) == (2, 4)


def test_what_a_client_spells_at_great_length_is_not_kept(routes: ModelRoutes) -> None:
    resolved = ResolvedModels(routes)

    for name, key in (("x" * 513, None), ("assistant", "y" * 513)) * 2:
        resolved.resolve(name, key)

    assert (resolved.num_hits, resolved.num_misses) == (0, 4)


def test_a_name_that_is_not_found_is_refused_each_time() -> None:
    resolved = ResolvedModels(ModelRoutes(SERVED))

    for _ in range(2):
        with pytest.raises(ProtocolError):
            resolved.resolve("gpt-9", None)

    assert (resolved.num_hits, resolved.num_misses) == (0, 2)


# --- Files that make no sense --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "default = 'nobody'",
            "default: expected a name that is served or defined here, got 'nobody'",
        ),
        ("fallback = ''", "fallback: expected the name of a model, got ''"),
        ("default = 3", "default: expected the name of a model, got 3"),
        (
            "aliases = {}",
            "aliases: unknown key, expected one of: default, fallback, alias, split, model, price",
        ),
        ("alias = 'small'", "alias: expected a table, got 'small'"),
        ("price = 1", "price: expected a table, got 1"),
        ("alias.a = 'b'", "alias.a: expected a name that is served or defined here, got 'b'"),
        ("alias.a = {}", "alias.a: expected the name of a model, got {}"),
        ("alias.\"\" = 'small'", "alias.\"\": expected the name of a model, got ''"),
        ("alias.a = 'a'", "alias.a: expected a way to a model, got 'a' → 'a'"),
        (
            "alias = { a = 'b', b = 's' }\nsplit.s = { small = 1, a = 1 }",
            "expected a way to a model, got 'a' → 'b' → 's' → 'a'",
        ),
        ("split.s = 'small'", "split.s: expected a table, got 'small'"),
        ("split.s = {}", "split.s: expected at least one name with a weight"),
        ('split."a b".small = 0', 'split."a b".small: expected a positive number, got 0'),
        ("split.s.small = -0.5", "split.s.small: expected a positive number, got -0.5"),
        ("split.s.small = inf", "split.s.small: expected a positive number, got inf"),
        ("split.s.small = nan", "split.s.small: expected a positive number, got nan"),
        ("split.s.small = true", "split.s.small: expected a positive number, got True"),
        ("split.s.small = '9'", "split.s.small: expected a positive number, got '9'"),
        ("split.s.x = 1", "split.s.x: expected a name that is served or defined here, got 'x'"),
        ("model.m = 'small'", "model.m: expected a table, got 'small'"),
        (
            "model.m.top_p = 1",
            "model.m.of: expected the name of a served model ('large' or 'small'), got None",
        ),
        ("model.m.of = ['small']", "('large' or 'small'), got ['small']"),
        (
            "model = { m.of = 'small', n.of = 'm' }",
            "model.n.of: expected the name of a served model",
        ),
        (
            "model.m = { of = 'small', temprature = 1 }",
            "model.m.temprature: unknown key, expected one of: of, temperature,",
        ),
        ("model.m = { of = 'small', tools = [] }", "model.m.tools: unknown key"),
        (
            "model.m = { of = 'small', text.verbose = 'low' }",
            "model.m.text.verbose: unknown key, expected one of: format, verbosity",
        ),
        (
            "model.m = { of = 'small', reasoning.efort = 'low' }",
            "model.m.reasoning.efort: unknown key",
        ),
        ("model.m = { of = 'small', temperature = 3 }", "model.m: invalid value for 'temperature'"),
        (
            "model.m = { of = 'small', temperature = '1' }",
            "model.m: invalid type for 'temperature'",
        ),
        ("model.m = { of = 'small', text = 'low' }", "model.m: invalid type for 'text'"),
        (
            "model.m = { of = 'small', text.format.type = 'xml' }",
            "model.m: invalid value for 'text.format",
        ),
        (
            "model.m = { of = 'small', top_p = nan }",
            "model.m.top_p: expected a finite number, got nan",
        ),
        (
            "[model.m]\nof = 'small'\ntext.format = "
            "{ type = 'json_schema', name = 'n', schema.enum = [1, 2020-02-02] }",
            "model.m.text.format.schema.enum[1]: expected a value that JSON has, got 2020-02-02",
        ),
        (
            "alias.small = 'large'",
            "alias.small: expected a name of its own, got that of a served model",
        ),
        (
            "model.small.of = 'small'",
            "model.small: expected a name of its own, got that of a served model",
        ),
        (
            "alias.x = 'small'\nsplit.x.small = 1",
            "split.x: expected a name of its own, got that of alias.x",
        ),
        (
            "alias.x = 'small'\nmodel.x.of = 'small'",
            "alias.x: expected a name of its own, got that of model.x",
        ),
        (
            "price.smal.input = 1",
            "price.smal: expected the name of a served model or of one in the table 'model', "
            "got 'smal'",
        ),
        ("alias.a = 'small'\nprice.a.input = 1", "price.a: expected the name of a served model"),
        ("split.s.small = 1\nprice.s.input = 1", "price.s: expected the name of a served model"),
        ("alias.x = 'small'\nalias.x = 'large'\n", "cannot overwrite a value (at line 2,"),
        ("\nalias = = 1", "invalid value (at line 2, column 9)"),
        pytest.param(
            f"split.s.small = {'9' * 5000}", "exceeds the limit (4300 digits)", id="long number"
        ),
        pytest.param(f"default = {'[' * 5000}", "it is nested too deeply", id="deep"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_its_name_and_the_place(
    path: Path, text: str, message: str
) -> None:
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ModelRoutesError) as refused:
        ModelRoutes.from_file(path, SERVED)

    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelRoutesError) as refused:
        ModelRoutes.from_file(tmp_path / "none.toml", SERVED)

    assert str(refused.value) == f"cannot read {tmp_path / 'none.toml'}: No such file or directory"


def test_a_file_that_is_no_text_is_refused(path: Path) -> None:
    path.write_bytes(b"\xff")

    with pytest.raises(ModelRoutesError) as refused:
        ModelRoutes.from_file(path, SERVED)

    assert str(refused.value) == f"cannot read {path}: it is not a text file"


def test_an_empty_file_changes_nothing(path: Path) -> None:
    path.write_text("", encoding="utf-8")

    routes = ModelRoutes.from_file(path, ["small"])

    assert routes.names == ["small"]
    assert routes.resolve(None, None).model == "small"


def test_a_chain_of_thousands_of_aliases_is_followed() -> None:
    aliases: dict[str, Any] = {f"alias-{i}": f"alias-{i + 1}" for i in range(5000)}
    aliases["alias-5000"] = "small"

    routes = ModelRoutes(SERVED, {"alias": aliases})

    assert routes.resolve("alias-0", None).model == "small"


def test_the_example_of_the_manual_makes_sense(path: Path) -> None:
    manual = Path(__file__).parents[2] / "docs" / "models.md"
    _, example, *_ = re.split(r"```toml\n|```", manual.read_text(encoding="utf-8"))
    path.write_text(example, encoding="utf-8")

    routes = ModelRoutes.from_file(path, ["smollm2-135m-instruct"])

    assert routes.names == [
        "smollm2-135m-instruct", "cautious", "gpt-5-codex", "gpt-5-mini", "assistant"
    ]  # fmt: skip
    assert routes.resolve(None, None).requested == "assistant"
