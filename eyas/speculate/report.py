"""`benchmark/report.md`: the figures of `results.json` as a page that a person reads."""

from __future__ import annotations

from typing import Any


def render_report(results: dict[str, Any]) -> str:
    """`report.md`: the figures with their raw counts, spread and what they do not say."""
    accept, outputs = results["accept_length"], results["outputs"]
    lines = [
        "# Benchmark of the draft",
        "",
        f"Engine: {results['engine']} ({_details(results['engine_details'])}), "
        f"K = {results['num_draft_tokens']} drafts per verification.",
        "",
        f"**Accept length {accept['overall']:.3f}** (95 % interval {span(accept['interval_95'])}; "
        f"{accept['num_accepted']:,} accepted in "
        f"{accept['num_verifications']:,} verifications; {accept['overall_pools']}). {results['definition'].capitalize()}.",
        "",
    ]
    if not accept["has_enough_verifications"]:
        lines += [
            f"That is {accept['num_verifications']:,} verifications, fewer than the "
            f"{accept['wanted_verifications']:,} wanted: read the interval.",
            "",
        ]
    lines += [
        f"Replies at temperature 0 against the target without draft: {outputs['checked']} checked, "
        f"{outputs['identical']} identical, {outputs['tie']} ties, {outputs['wrong']} wrong.",
        "",
        "| prompts | accept length | 95 % | verifications | predicted | bigram | prompt-lookup | identical / tie / wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_accept_line(name, item) for name, item in (results["per_dataset"] | results["per_set"]).items()]
    lines += [
        "",
        "| in flight | speed-up | spread | tok/s off | tok/s on | latency p50 off → on | p90 | p99 | first token p50 off → on |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_timing_line(point) for point in results["timing"]]
    lines += [*_per_dataset(results), *_grid(results)]
    lines += [line for finding in findings(results) for line in ("", finding)]
    if accept["position_rates"]:
        rates = ", ".join(f"{rate:.2f}" for rate in accept["position_rates"])
        lines += ["", f"Drafts accepted at each position, given those before it: {rates}."]
    lines += _by_context(results)
    loops = results["loops"]
    lines += [
        "",
        f"{loops['with_loop']} of {loops['replies']} replies fell into a loop; {loops['tokens'] - loops['loop_free_tokens']:,} of "
        f"{loops['tokens']:,} tokens lie behind one and count in no figure above.",
        "",
    ]
    return "\n".join(lines)


def findings(results: dict[str, Any]) -> list[str]:
    """A sentence each: up to which load the draft pays, which shape to set, and what the test of sampling found."""
    paying = [item["concurrency"] for item in results["best"] if item["shape"]]
    lost = results["break_even_concurrency"]
    if paying and lost is not None:
        sentences = [
            f"Break-even lies between {max(paying)} and {lost} requests in flight: serve without the draft from {lost} on."
        ]
    elif paying and len(paying) == len(results["best"]):
        sentences = ["The draft pays at every number of requests in flight that was measured."]
    elif paying:
        sentences = [
            f"The draft pays at {', '.join(map(str, paying))} in flight; elsewhere its gain is within the spread of its blocks."
        ]
    else:
        sentences = ["At no number of requests in flight that was measured does the draft gain beyond the spread of its blocks."]
    best = [
        f"{item['shape']} ({item['speedup']:.2f}×) at {item['concurrency']}"
        if item["shape"]
        else f"no draft at {item['concurrency']}"
        for item in results["best"]
    ]
    if paying:
        sentences.append(f"Best by these figures, in flight: {'; '.join(best)} (a gain that its slowest pair of blocks shows too).")
    return [*sentences, _sampling(results["sampling"])]


def span(interval: list[float] | None, digits: int = 3) -> str:
    """Both ends of an interval; a dash where too few replies give none."""
    return "–" if interval is None else f"{interval[0]:.{digits}f}–{interval[1]:.{digits}f}"


def _per_dataset(results: dict[str, Any]) -> list[str]:
    """What one request of each dataset sees, at the first number in flight."""
    rows = [(name, item["timing"][0]) for name, item in results["per_dataset"].items() if item["timing"]]
    if not rows:
        return []
    lines = [
        "",
        f"| one request of, {rows[0][1]['concurrency']} in flight | speed-up | tok/s off | tok/s on | latency p50 off → on |",
    ]
    lines.append("|---|---|---|---|---|")
    for name, point in rows:
        latency = _times(point["latency_s_off"]["p50"], point["latency_s_on"]["p50"])
        rates = f"{point['tokens_per_s_off']:.1f} | {point['tokens_per_s_on']:.1f}"
        lines.append(f"| {name} | {point['speedup']:.2f}× | {rates} | {latency} |")
    return lines


def _by_context(results: dict[str, Any]) -> list[str]:
    """Accept length by length of the context, the training length marked."""
    if not results.get("by_context"):
        return []
    lines = ["", "| context, tokens | accept length | 95 % | verifications | predicted |", "|---|---|---|---|---|"]
    for band in results["by_context"]:
        name = f"up to {band['up_to']:,}" if band["up_to"] is not None else f"above {band['above']:,}"
        name += " (longer than any trained record)" if band["is_longer_than_training"] else ""
        cells = [name, f"{band['accept_length']:.3f}", span(band["interval_95"]), f"{band['num_verifications']:,}"]
        lines.append("| " + " | ".join([*cells, _number(band["predicted_accept_length"])]) + " |")
    return lines


def _grid(results: dict[str, Any]) -> list[str]:
    """Shapes of the draft beside each other."""
    lines: list[str] = []
    if len(results["grid"]) > 1:
        loads = " | ".join(f"speed-up at {point['concurrency']}" for point in results["timing"])
        lines += ["", f"| shape | accept length | verifications | {loads} |", "|---|---|---|" + "---|" * len(results["timing"])]
        lines += [
            f"| {shape['shape']} | {shape['accept_length']:.3f} | {shape['num_verifications']:,} | "
            + " | ".join(
                f"{point['speedup']:.2f}× ({point['speedup_min']:.2f}–{point['speedup_max']:.2f})" for point in shape["timing"]
            )
            + " |"
            for shape in results["grid"]
        ]
    return lines


def _sampling(sampling: dict[str, Any] | None) -> str:
    if sampling is None:
        return "The distribution above temperature 0 was not tested (`benchmark.sampled_replies` is 0)."
    return (
        f"At temperature 1, {sampling['replies_per_side']} replies a side to {sampling['prompts']} prompts: "
        f"p = {sampling['p_value']:.4f} that both sides draw from one distribution (permutation test). {_power(sampling)}"
    )


def _power(sampling: dict[str, Any]) -> str:
    if "power" not in sampling:  # measured by an older version
        return ""
    share = sampling["found_share"]
    if share is None:
        return "So few replies find no fault reliably: raise `benchmark.sampled_replies`."
    return (
        f"Found with {sampling['power'] * 100:.0f} % probability would have been a server that puts the likeliest token in place "
        f"of its draw at {share * 100:.0f} % of the positions."
    )


def _details(details: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(details.items()))


def _accept_line(name: str, item: dict[str, Any]) -> str:
    outputs, baselines = item["outputs"], item["baselines"]
    cells = [
        name,
        f"{item['accept_length']:.3f}",
        span(item["interval_95"]),
        f"{item['num_verifications']:,}",
        _number(item["predicted_accept_length"]),
        _number(baselines.get("bigram")),
        _number(baselines.get("prompt_lookup")),
        f"{outputs['identical']} / {outputs['tie']} / {outputs['wrong']}",
    ]
    return "| " + " | ".join(cells) + " |"


def _timing_line(point: dict[str, Any]) -> str:
    def pair(key: str, percent: str) -> str:
        off, on = point[f"{key}_off"], point[f"{key}_on"]
        return _times(off[percent], on[percent]) if off and on else "–"

    cells = [
        str(point["concurrency"]),
        f"{point['speedup']:.2f}×",
        f"{point['speedup_min']:.2f}–{point['speedup_max']:.2f}",
        f"{point['tokens_per_s_off']:.1f}",
        f"{point['tokens_per_s_on']:.1f}",
        pair("latency_s", "p50"),
        pair("latency_s", "p90"),
        pair("latency_s", "p99"),
        pair("first_token_s", "p50"),
    ]
    return "| " + " | ".join(cells) + " |"


def _times(off_s: float, on_s: float) -> str:
    """Two times without and with the draft, in milliseconds where both are below a second."""
    if max(off_s, on_s) < 1:
        return f"{off_s * 1000:.0f} → {on_s * 1000:.0f} ms"
    return f"{off_s:.2f} → {on_s:.2f} s"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
