"""The run in tables: numbers of the files they are made from, made anew only when those change."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from eyas.operate.tables import MOST_ROWS, SOURCES, changed_tables, forecast_history, training
from eyas.operate.wording import bars, curve
from eyas.workspace import RunFolder
from tests.operate.conftest import DATASETS, write_metrics, write_responses


def tables(run: RunFolder) -> dict[str, Any]:
    return {table.name: table for table in changed_tables(run, {})}


def test_prompts_are_accounted_for_without_their_text(finished_run: RunFolder) -> None:
    table = tables(finished_run)["prompts"]
    row = table.rows[1]
    assert row["dataset"] == DATASETS[1]
    assert row["read"] == row["kept"] + row["duplicates"] + row["contaminated"] + 5 + 6
    assert (row["duplicates"], row["contaminated"], row["rejected"]) == (3, 4, "bad json 6, no user turn 5")
    assert (row["p50"], row["0 … 16 tokens"]) == (5, "█")
    assert "asks" not in json.dumps(table.rows), "texts stay out of artifacts"


def test_lengths_are_counted_from_the_rows(finished_run: RunFolder) -> None:
    table = tables(finished_run)["lengths"]
    first, second = table.rows
    assert (first["dataset"], first["response median"], first["longest"]) == (DATASETS[0], 25, 40)
    assert (second["dataset"], second["prompt median"], second["longest"]) == (DATASETS[1], 5, 50)
    assert table.headline == "response median 25, longest 50 tokens"
    drawn = next(value for key, value in second.items() if key.startswith("1 … 50"))
    assert len(drawn) == 16
    assert drawn.rstrip()[-1] == "█", "two of four are 50 tokens long"


def test_training_shows_losses_and_replays_at_their_steps(finished_run: RunFolder) -> None:
    table = tables(finished_run)["training"]
    at = {row["step"]: row for row in table.rows}
    assert at[50]["accept length"] == round(1 + 50 / 480, 3)
    assert at[10]["accept length"] is None
    assert at[50]["loss"] is not None, "a step with a replay was trained, too"
    assert table.headline.startswith("best accept length 1.417 ▁▃▆█ · loss")


def test_a_long_training_is_thinned_and_keeps_its_last_step(run: RunFolder) -> None:
    write_metrics(run, 5_000)
    table = training(run)
    assert table is not None
    losses = [row["step"] for row in table.rows if row["loss"] is not None]
    assert losses[-1] == 5_000
    assert len(table.rows) <= MOST_ROWS + 100


def test_the_benchmark_stands_per_dataset_and_set(finished_run: RunFolder) -> None:
    results = json.loads((finished_run.benchmark / "results.json").read_bytes())
    table = tables(finished_run)["accept-length"]
    by_name = {row["prompts"]: row for row in table.rows}
    assert set(by_name) == {*DATASETS, "set heldout"}
    assert by_name[DATASETS[1]]["identical / tie / wrong"] == "5 / 1 / 0"
    assert by_name["set heldout"]["accept length"] == round(results["per_set"]["heldout"]["accept_length"], 3)


def test_the_forecasts_are_kept_beside_what_came_true(run: RunFolder) -> None:
    start = datetime(2026, 12, 2, 8, tzinfo=UTC)
    run.progress.mkdir(parents=True)
    lines = []
    for hours, left in ((1, 3.0), (1.5, 3.0), (2, 1.5), (3, 0.0)):  # the second message repeats the first one's forecast
        figures = {"remaining_s": left * 3600, "remaining_low_s": left * 3000, "remaining_high_s": left * 4000}
        piece = {"stage": "generate", "name": "a", "done": hours, "total": 3, "unit": "records", "is_final": hours == 3}
        at = (start + timedelta(hours=hours)).isoformat()
        lines.append(json.dumps({**piece, "figures": figures, "at": at, "started_at": start.isoformat()}) + "\n")
    (run.progress / "history.jsonl").write_text("".join(lines))
    table = forecast_history(run)
    assert table is not None
    assert table.rows[0] == {"after": "60 min", "ends after": "4.0 h", "at the earliest": "3.5 h", "at the latest (80 %)": "4.3 h"}
    assert [row["after"] for row in table.rows] == ["60 min", "2.0 h", "3.0 h"], (
        "a forecast holds for the time at which it was made"
    )
    assert table.headline == "generation took 3.0 h"


def test_a_table_is_made_again_only_when_its_files_have_changed(half_run: RunFolder) -> None:
    seen: dict[Any, Any] = {}
    assert [table.name for table in changed_tables(half_run, seen)] == ["prompts", "lengths"]
    assert list(changed_tables(half_run, seen)) == []
    write_responses(half_run, DATASETS[1], [4, 5, 6, 7], [50, 50, 8, 9])
    assert [table.name for table in changed_tables(half_run, seen)] == ["lengths"]
    assert len(seen) < len(SOURCES), "the others have no file yet"


def test_a_curve_shows_small_changes_of_large_values() -> None:
    assert curve([8.5, 8.0, 7.5]) == "█▄▁" or curve([8.5, 8.0, 7.5]) == "█▅▁"
    assert curve([3.0, 3.0]) == "▁▁"
    assert curve([]) == ""


def test_bars_fill_the_tallest_and_keep_the_smallest_visible() -> None:
    assert bars([0, 1, 50, 100]) == " ▁▄█"
    assert bars([]) == bars([0, 0]).strip() == ""
