"""The report stands on the run folder alone, needs no network, and says the files' own numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eyas.errors import ConfigError
from eyas.files import read_json, write_json
from eyas.operate import plots, series
from eyas.operate.curve_result import RESULT
from eyas.operate.report import write_report
from eyas.progress import Progress, recorder
from eyas.workspace import RunFolder
from tests.operate.conftest import DATASETS, rewrite_results
from tests.operate.test_learning_curve import result_of


def html_of(run: RunFolder) -> str:
    return write_report(run)[1].read_text()


def test_finished_run_shows_the_numbers_of_its_files(finished_run: RunFolder) -> None:
    markdown, html = (path.read_text() for path in write_report(finished_run))
    results = read_json(finished_run.benchmark / "results.json")
    accept = results["accept_length"]
    for text in (markdown, html):
        assert f"{accept['overall']:.3f}" in text
        assert f"{accept['interval_95'][0]:.3f}–{accept['interval_95'][1]:.3f}" in text
        assert f"{results['speedup']:.2f}×" in text
        assert f"{results['baselines']['bigram']:.3f}" in text
        assert "CC0-1.0" in text
        assert "duplicate" in text
        assert str(finished_run.export) in text


def test_learning_curve_and_diagnosis_stand_in_both_reports(finished_run: RunFolder) -> None:
    write_json(finished_run.root / RESULT, result_of(0.8))
    finding = {
        "cause": "mask coverage",
        "verdict": "cause",
        "seen": "75.0% <of> tokens",
        "bound": "99%",
        "advice": "merge",
        "cost": 0.25,
    }
    write_json(finished_run.root / "diagnosis.json", [finding])
    markdown, html = (path.read_text() for path in write_report(finished_run))
    for text in (markdown, html):
        assert "the second half buys" in text
        assert "44,000" in text
        assert "mask coverage" in text
        assert "25.0%" in text
    assert "75.0% &lt;of&gt; tokens" in html
    assert html.count("<svg") == 4


def test_contexts_longer_than_the_training_are_told_apart(finished_run: RunFolder) -> None:
    """Twelve rows of 38 tokens, a training length of 36."""
    for path in write_report(finished_run):
        assert "up to 72 (longer than any trained record)" in path.read_text()


def test_a_forecast_far_off_does_not_flatten_the_rest() -> None:
    hours, end = [0.1, 0.2, 0.3, 0.4], [20.0, 0.5, 0.6, 0.5]
    low, high = [9.0, 0.4, 0.4, 0.4], [40.0, 0.8, 0.7, 0.6]
    drawing = plots.forecast_curve(series.ForecastHistory(hours=hours, end=end, low=low, high=high, actual=0.5))
    assert "1 of 4 forecasts lie above, up to 1,200 minutes" in drawing
    labels = {float(text) for text in re.findall(r">(\d+)</text>", drawing)}
    assert max(labels) <= 90, "three times the thirty minutes that it took"


def test_a_benchmark_of_an_older_version_is_shown_without_what_it_lacks(finished_run: RunFolder) -> None:
    results = read_json(finished_run.benchmark / "results.json")
    del results["by_context"], results["trained_tokens"]
    rewrite_results(finished_run, results)
    for path in write_report(finished_run):
        assert f"{results['accept_length']['overall']:.3f}" in path.read_text()
        assert "context, tokens" not in path.read_text()


def test_a_grid_is_drawn_beside_its_table(finished_run: RunFolder) -> None:
    results = read_json(finished_run.benchmark / "results.json")
    (chain,) = results["grid"]
    slow = {**chain["timing"][0], "concurrency": 16, "speedup": 0.9, "speedup_min": 0.8, "speedup_max": 1.0}
    chain["timing"].append(slow)
    tree = {**chain, "shape": "K=3 top-k=2 tokens=6", "position_rates": [0.5, 0.25, 0.1]}
    results["grid"] = [chain, tree]
    rewrite_results(finished_run, results)
    html = html_of(finished_run)
    (drawing,) = re.findall(r'<svg(?:(?!</svg>).)*aria-label="grid".*?</svg>', html, re.DOTALL)
    for text in ("K=3 top-k=2 tokens=6", "requests in flight", ">16<", "position of the draft"):
        assert text in drawing


def test_prompts_stand_with_their_account_and_first_texts(finished_run: RunFolder) -> None:
    markdown, html = (path.read_text() for path in write_report(finished_run))
    for name in DATASETS:
        assert f"    what {name} asks" in markdown
        assert f"<pre>&lt;|im_start|&gt;user\nwhat {name} asks</pre>" in html
    assert "bad json 6, no user turn 5" in markdown
    assert "bad json 6, no user turn 5" in html


def test_every_table_names_its_files(finished_run: RunFolder) -> None:
    html = html_of(finished_run)
    for name in ("benchmark/results.json", "draft/metrics.jsonl", "prompts/*/manifest.json", "merged/manifest.json"):
        assert name in html
    assert html.count("<h2>") <= html.count('class="source"') + 1  # the table of phases names its files row by row


def test_html_needs_no_network(finished_run: RunFolder) -> None:
    html = html_of(finished_run).replace("http://www.w3.org", "")
    assert "http://" not in html
    assert "https://" not in html
    assert not re.search(r"<(script|link|img|iframe)\b", html)
    assert "@import" not in html


def test_plots_take_their_colours_from_the_page(finished_run: RunFolder) -> None:
    html = html_of(finished_run)
    svg = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert html.count("<svg") == 3  # lengths, training, accept length
    assert not re.search(r"#[0-9a-f]{6}\b", svg)
    used = set(re.findall(r"var\((--\w+)\)", svg))
    light, dark = (set(re.findall(r"(--\w+):", part)) for part in html.split("prefers-color-scheme: dark", 1))
    assert used <= light
    assert used - {"--font"} <= dark


def test_half_finished_run_leaves_out_what_has_not_happened(half_run: RunFolder) -> None:
    markdown, html = (path.read_text() for path in write_report(half_run))
    assert "stopped" in html
    assert html.count("<svg") == 1
    assert "Accept length" not in html
    assert "waiting" in markdown


def test_run_that_has_done_nothing_has_a_report(run: RunFolder) -> None:
    assert "waiting" in html_of(run)


def test_generation_over_time_comes_from_the_history(half_run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    report = recorder(half_run.progress, every_s=0.0)
    for tokens in range(0, 500, 100):
        report(Progress(stage="generate", name="B1_calls", done=tokens // 100, total=5, unit="records", figures={"tokens": tokens}))
    history = half_run.progress / "history.jsonl"
    lines = history.read_text().splitlines()
    moved = [
        re.sub(r'"at": "[^"]*"', f'"at": "2026-12-02T08:00:{10 * number:02d}+00:00"', line) for number, line in enumerate(lines)
    ]
    history.write_text("\n".join(moved) + "\ntorn")
    assert 'aria-label="throughput"' in html_of(half_run)


def test_names_from_data_are_escaped(finished_run: RunFolder) -> None:
    results = read_json(finished_run.benchmark / "results.json")
    results["per_set"]["<script>alert(1)</script>"] = results["per_set"].pop("heldout")
    rewrite_results(finished_run, results)
    assert "<script>" not in html_of(finished_run)


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(RunFolder(tmp_path))
