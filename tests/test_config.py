"""One config tree; every refusal names the key, the value and the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.config import RunConfig, load_config
from eyas.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == RunConfig()


def test_overrides_reach_nested_keys_and_list_items(tmp_path: Path) -> None:
    path = write(tmp_path, "prompts: {datasets: [{name: B1, source: 'file:a'}]}")
    config = load_config(path, ["generation.sampling.temperature=0.5", "prompts.datasets.0.quota=7", "name=x"])
    assert config.generation.sampling.temperature == 0.5
    assert config.prompts.datasets[0].quota == 7
    assert config.name == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour: red", "unknown key 'colour'"),
        ("draft: {learning_rte: 1}", "unknown key 'draft.learning_rte'"),
        ("draft: {learning_rate: -1}", r"draft.learning_rate: .*greater than 0, got -1"),
        ("draft: {num_unroll_steps: many}", "draft.num_unroll_steps: .*got 'many'"),
        ("server: {kind: sglang}", "server.urls is empty"),
        ("prompts: {datasets: [{name: a, source: x}, {name: a, source: y}]}", "these stand twice: a"),
        ("prompts: {datasets: [{name: ../a, source: x}]}", r"prompts.datasets.0.name: .*got '../a'"),
        ("[1, 2]", "holds a list"),
        ("a: [", "is not YAML"),
        ("draft: {epochs: 1}\nhidden: {codec: fp8}\ndraft: {seed: 1}", r"key 'draft' stands twice in .*line 3"),
        ("draft: {epochs: 1, seed: 1, epochs: 2}", "key 'epochs' stands twice"),
        ("prompts: &a\n  datasets: [*a]", "no tree of names and values"),
        ("2024-01-01: x", "no tree of names and values"),
        ("name: " + "[" * 3000, "is not YAML: it is nested too deeply"),
        ("prompts: {datasets: [{name: a, source: x, quota: yes}]}", r"datasets.0.quota: .*wanted a number, got True"),
        ("operate: {stall_s: .nan}", "operate.stall_s: .*finite number, got nan"),
        ("draft: {betas: [0.9, .inf]}", "draft.betas.1: .*finite number, got inf"),
        ("target: {chat_template_kwargs: {day: 2024-01-01}}", "target.chat_template_kwargs: .*date is not JSON serializable"),
    ],
)
def test_a_wrong_config_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(write(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert "run.yaml" in str(caught.value)
    assert caught.value.exit_code == 2


def test_anchors_and_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    text = "draft: &draft {epochs: 1}\nprompts: {datasets: [&a {name: a, source: x, quota: 3}, {<<: *a, name: b}]}"
    first, second = load_config(write(tmp_path, text)).prompts.datasets
    assert (first.name, second.name, second.quota) == ("a", "b", 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "is not key=value"),
        ("=1", "is not key=value"),
        ("name.x=1", "goes below a single value"),
        ("prompts.datasets.3.quota=1", "is not an index below 1"),
        ("name=[", "the value is not YAML"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    path = write(tmp_path, "name: a\nprompts: {datasets: [{name: B1, source: 'file:a'}]}")
    with pytest.raises(ConfigError, match=message):
        load_config(path, [override])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read \(No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_every_field_is_described_and_has_a_default() -> None:
    def check(model: type, where: str) -> None:
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            nested = getattr(field.annotation, "model_fields", None)
            if nested is not None:
                check(field.annotation, f"{where}.{name}")  # type: ignore[arg-type]
            else:
                assert field.description, f"{where}.{name} has no description"
            assert not field.is_required() or where.endswith(("datasets", "GateConfig")) or name in {"warn", "stop"}, name

    check(RunConfig, "RunConfig")


@pytest.mark.parametrize(
    ("word", "meaning"), [("yes", True), ("true", True), ("'yes'", True), ("no", False), ("null", None), ("auto", None)]
)
def test_a_yes_or_no_that_yaml_reads_as_a_boolean_is_understood(tmp_path: Path, word: str, meaning: bool | None) -> None:
    assert load_config(write(tmp_path, f"target: {{always_reasons: {word}}}")).target.must_reason is meaning


def test_what_is_left_to_the_target_may_stand_as_null(tmp_path: Path) -> None:
    path = write(tmp_path, "generation: {sampling: {temperature: null, top_p: null, top_k: null}}")
    assert load_config(path) == RunConfig()


def test_a_temperature_below_zero_is_refused_unless_it_means_the_targets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation.sampling.temperature: .*-1 alone"):
        load_config(write(tmp_path, "generation: {sampling: {temperature: -0.5}}"))
