"""What each verb of the command line does; `cli` parses the words and handles errors and signals."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console

from eyas.config import RunConfig
from eyas.errors import ConfigError, EyasError
from eyas.files import write_json
from eyas.operate.configs import read_config, recorded_config
from eyas.operate.keys import server_api_key
from eyas.operate.phases import PHASES, Phase, require_earlier, require_finished
from eyas.operate.wording import duration
from eyas.workspace import RunFolder, exclusive

FLOW_GRACE_S = 30.0
WITHOUT_TORCH = ("prepare", "generate")


def run_verb(options: argparse.Namespace, api_key: str) -> int:
    """The whole pipeline, as a Prefect flow in a child process or, with --no-prefect, here."""
    if options.no_prefect or options.dry_run:
        return _run_phases(options, api_key, PHASES)
    from eyas.operate.children import child_process, wait_for
    from eyas.operate.following import follow_log, follow_progress, readable
    from eyas.operate.pipeline import held
    from eyas.operate.preflight import preflight
    from eyas.operate.terminal import terminal

    began = time.monotonic()
    config = read_config(options)
    preflight(options.run, config, api_key=server_api_key(config, api_key))
    run = RunFolder(options.run)
    log, resolved = run.logs / "flow.log", run.logs / "config.yaml"
    # The flow takes the run's own lock some seconds from now: until it ends, another command is not to touch log and config.
    with exclusive(run.root / ".command.lock", f"run {run.root}"):
        with held(run):
            log.unlink(missing_ok=True)
            write_json(resolved, config.model_dump(mode="json"))  # JSON is YAML
        command = [sys.executable, "-m", "flows.pipeline", "--config", str(resolved), "--run", str(run.root)]
        command += ["--ui"] if options.ui else []
        with terminal() as screen:
            progress, lines = follow_progress(run.progress, screen.report), follow_log(log, readable(screen.say))

            def look() -> None:
                progress()  # first: the sentence at a phase's end stands under its last line
                lines()

            with child_process(command, log=log, parent_death_signal=signal.SIGINT, grace_s=FLOW_GRACE_S) as process:
                try:
                    code = wait_for(process, look)
                except KeyboardInterrupt:
                    screen.say(f"ending the run, within {FLOW_GRACE_S:.0f} s; Ctrl-C again ends it at once")
                    raise
    if code < 0:
        raise EyasError(f"the run's process was killed by signal {-code} (log {log}); run the same command again to continue")
    if code == 0:
        show_result(run, took_s=time.monotonic() - began, opens=options.open)
    return code


def prepare_verb(options: argparse.Namespace, api_key: str) -> int:
    return _run_phases(options, api_key, ["prepare"])


def generate_verb(options: argparse.Namespace, api_key: str) -> int:
    return _run_phases(options, api_key, ["generate"])


def merge_verb(options: argparse.Namespace, api_key: str) -> int:
    return _run_phases(options, api_key, ["merge"])


def extract_verb(options: argparse.Namespace, api_key: str) -> int:
    return _run_phases(options, api_key, ["extract"])


def train_verb(options: argparse.Namespace, api_key: str) -> int:
    return _run_phases(options, api_key, ["train"])


def bench_verb(options: argparse.Namespace, api_key: str) -> int:
    return _run_phases(options, api_key, ["bench"])


def export_verb(options: argparse.Namespace, api_key: str) -> int:
    """The best checkpoint in the engines' format."""
    from eyas.draft.export import export_draft
    from eyas.operate.pipeline import held, open_run

    config = read_config(options)
    if options.dry_run:
        return _dry_run(options.run, config, server_api_key(config, api_key))
    run = RunFolder(options.run)
    require_finished(run, "train", [run.draft], for_what="eyas export")
    with held(run):
        open_run(run.root, config)
        export_draft(run, config)
    print(f"draft: {run.export}")
    return 0


def deploy_verb(options: argparse.Namespace, api_key: str) -> int:
    """The draft in service, or 1 and the reason; Eyas' own engine is tried and then left to `eyas engine`."""
    from eyas.operate.deploy import deploy_run
    from eyas.operate.pipeline import held

    config = read_config(options)
    run, key = RunFolder(options.run), server_api_key(config, api_key)
    require_finished(run, "bench", [run.benchmark], for_what="eyas deploy")
    with held(run):
        decision = deploy_run(run, config, api_key=key)
    if not decision.serves_draft:
        print(f"not deployed: {decision.reason}", file=sys.stderr)
        return 1
    how = f"; serve it: eyas engine --run {run.root} --draft {run.export}" if config.server.kind == "embedded" else ""
    print(f"deployed: {decision.reason}{how}")
    return 0


def engine_verb(options: argparse.Namespace, api_key: str) -> int:
    """The embedded engine, until Ctrl-C."""
    from eyas.engine.process import EngineProcess
    from eyas.operate.preflight import check_port
    from eyas.target.spec import load_target

    config = read_config(options)
    engine = config.server.engine
    if options.port is not None:
        engine = engine.model_copy(update={"port": options.port})
    check_port(engine.port)
    spec = load_target(config.target)
    log = RunFolder(options.run).logs / "engine.log"
    with EngineProcess(
        spec.folder,
        config=engine,
        draft_dir=options.draft,
        context_length=config.target.context_length,
        api_key=server_api_key(config, api_key),
        log=log,
    ) as server:
        print(f"serving {spec.folder.name} at {server.url}   (log {log}; Ctrl-C ends it)", flush=True)
        signal.pause()
    return 0


def plan_verb(options: argparse.Namespace, api_key: str) -> int:
    """Bring plan.json and plan.md up to date and print the latter."""
    from eyas.operate.pipeline import held, open_run
    from eyas.operate.plan import PlanKeeper, render_plan

    config = read_config(options)
    run = RunFolder(options.run)
    if not run.run_json.is_file():  # what a run recorded stays: its own processes read it
        with held(run):
            open_run(run.root, config)
    print(render_plan(PlanKeeper(run, config).refresh()), end="")
    return 0


def diagnose_verb(options: argparse.Namespace, api_key: str) -> int:
    """Measure why drafts are refused; the findings are also in diagnosis.json."""
    from eyas.speculate.diagnosis import diagnose, render

    config = read_config(options)
    print(render(diagnose(RunFolder(options.run), config, options.draft, traffic=options.traffic)))
    return 0


def learning_curve_verb(options: argparse.Namespace, api_key: str) -> int:
    """Measure the learning curve of a run, finished or not, and print what the rest of its data will buy."""
    from eyas.operate.curve_result import render_curve
    from eyas.operate.learning_curve import learning_curve
    from eyas.operate.plan import PlanKeeper
    from eyas.operate.terminal import terminal

    config = read_config(options)
    share = config.operate.learning_curve_share if options.share is None else options.share
    if not 0 < share <= 1:
        raise ConfigError(f"the share of records for a learning curve is {share:g}; wanted above 0 and at most 1")
    run = RunFolder(options.run)
    require_finished(run, "prepare", [run.prompts(item.name) for item in config.prompts.datasets], for_what="eyas learning-curve")
    with terminal() as screen:
        result = learning_curve(run, config, share=share, report=screen.report)
    PlanKeeper(run, config).refresh()
    print(render_curve(result))
    return 0


def probe_codecs_verb(options: argparse.Namespace, api_key: str) -> int:
    """Measure on the run's first replies what smaller hidden states keep of this target, and print it."""
    from contextlib import nullcontext

    from eyas.operate.codec_probe import probe_codecs
    from eyas.operate.codec_result import render_codecs
    from eyas.operate.hosts import host_of
    from eyas.operate.pipeline import held
    from eyas.operate.plan import PlanKeeper
    from eyas.operate.terminal import terminal

    config = read_config(options)
    run = RunFolder(options.run)
    require_finished(run, "prepare", [run.prompts(item.name) for item in config.prompts.datasets], for_what="eyas probe-codecs")
    # One host has one mode at a time: a run that generates on it must not lose its servers to us.
    with held(run), terminal() as screen:
        host = host_of(run, config, api_key=server_api_key(config, api_key), say=screen.say)
        with nullcontext() if config.hidden.urls else host.serving("extract"):
            result = probe_codecs(run, config, report=screen.report)
    PlanKeeper(run, config).refresh()
    print(render_codecs(result))
    return 0


def adopt_verb(options: argparse.Namespace, api_key: str) -> int:
    """Audit another script's responses and keep what passes; 3 if nothing does."""
    from eyas.generation.adopt import adopt
    from eyas.operate.pipeline import held, open_run
    from eyas.progress import recorder

    config = read_config(options)
    run = RunFolder(options.run)
    require_finished(run, "prepare", [run.prompts(options.dataset)], for_what="eyas adopt")
    with held(run):
        open_run(run.root, config)
        audit = adopt(run, config, options.dataset, options.files, recorder(run.progress))
    print("\n".join(audit.lines()))
    if audit.kept:
        print(f"kept replies are done; this asks for the others alone: eyas generate --run {run.root}")
    return 0 if audit.kept else 3


def probe_server_verb(options: argparse.Namespace, api_key: str) -> int:
    """Sweep each server and write the table, the plot and the advice beside the run."""
    from eyas.operate.terminal import terminal
    from eyas.sglang.sweep import sweep
    from eyas.target.rendering import Renderer
    from eyas.target.spec import load_target
    from eyas.target.tokenizer import load_tokenizer

    config = read_config(options)
    urls = [options.url] if options.url else config.server.urls
    if not urls:
        raise ConfigError("there is no server to measure; give --url, or server.urls in the config")
    spec = load_target(config.target)
    num_tokens = options.prompt_tokens + options.new_tokens
    if min(options.prompt_tokens, options.new_tokens) < 1 or num_tokens > spec.context_length:
        raise ConfigError(
            f"--prompt-tokens {options.prompt_tokens} and --new-tokens {options.new_tokens}: each must be at least 1, "
            f"and both together fit the target's context of {spec.context_length}"
        )
    ids = (
        Renderer(spec, load_tokenizer(spec), config.target).render([{"role": "user", "content": "Tell me a story."}], []).input_ids
    )
    prompt_ids = (ids * (options.prompt_tokens // len(ids) + 1))[: options.prompt_tokens]
    for number, url in enumerate(urls):
        with terminal() as screen:
            work = sweep(
                url,
                config.server,
                prompt_ids,
                vocab_size=spec.vocab_size,
                api_key=server_api_key(config, api_key),
                new_tokens=options.new_tokens,
                report=screen.report,
            )
            result = asyncio.run(work)
        folder = RunFolder(options.run).root / "probe" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        result.write(folder)
        print("\n".join([url, result.table(), *(f"- {line}" for line in result.advice), f"written to {folder}"]))
    return 0


def control_verb(options: argparse.Namespace, api_key: str) -> int:
    """Change what the running session reads every second."""
    from eyas.generation.control import Control, read_control, write_control

    recorded_config(options.run)
    wishes = read_control(options.run)
    update = {
        "paused": (wishes.paused or options.pause) and not options.resume,
        "add_urls": sorted({*wishes.add_urls, *options.add} - set(options.drain)),
        "drain_urls": sorted({*wishes.drain_urls, *options.drain} - set(options.add)),
    }
    try:
        wishes = Control.model_validate(update)
    except ValidationError as error:
        raise ConfigError(f"--add: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
    write_control(options.run, wishes)
    print(
        f"paused: {wishes.paused}; added: {', '.join(wishes.add_urls) or 'none'}; drained: {', '.join(wishes.drain_urls) or 'none'}"
    )
    return 0


def status_verb(options: argparse.Namespace, api_key: str) -> int:
    """Where the run stands."""
    from eyas.operate.screen import render_status
    from eyas.operate.status import read_status

    status = read_status(options.run)
    if options.json:
        print(status.model_dump_json(indent=2))
    else:
        _console().print(render_status(status))
    return 0


def watch_verb(options: argparse.Namespace, api_key: str) -> int:
    """The same, live."""
    from eyas.operate.screen import watch

    watch(options.run, every_s=options.every)
    return 0


def report_verb(options: argparse.Namespace, api_key: str) -> int:
    """Write the report and say where it lies."""
    from eyas.operate.report import write_report

    markdown, html = write_report(RunFolder(options.run))
    print(f"report: {markdown}\n        {html}")
    if options.open:
        _open(html)
    return 0


def show_result(run: RunFolder, *, took_s: float, opens: bool) -> None:
    """What a finished run has come to: phases, curves, figures, folders, and how long this command took with all it started."""
    from eyas.operate.screen import render_result

    _console().print(render_result(run))
    if (run.export / "config.json").is_file():
        print(f"draft: {run.export}   (what SGLang and vLLM load)")
    print(f"report: {run.root / 'report.html'}")
    print(f"in all: {duration(took_s)}, the start of servers included")
    if opens:
        _open(run.root / "report.html")


def _console() -> Console:
    """Standard output for tables: as wide as the terminal, and wide enough for every column where it is a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def _open(html: Path) -> None:
    if not webbrowser.open(html.resolve().as_uri()):
        print("no browser on this machine; copy report.html to one, it needs nothing else")


def _run_phases(options: argparse.Namespace, api_key: str, phases: Sequence[Phase]) -> int:
    from eyas.operate.decision import ask_on_terminal
    from eyas.operate.pipeline import run_pipeline
    from eyas.operate.preflight import preflight
    from eyas.operate.report import write_report
    from eyas.operate.terminal import terminal
    from eyas.target.lightly import leave_torch_out
    from eyas.target.spec import load_target

    began = time.monotonic()
    config = read_config(options)
    key = server_api_key(config, api_key)
    if options.dry_run:
        return _dry_run(options.run, config, key)
    if set(phases) <= set(WITHOUT_TORCH) and config.hidden.source != "transformers":  # which preflight asks torch about
        leave_torch_out(load_target(config.target))
    preflight(options.run, config, api_key=key)
    run = RunFolder(options.run)
    for phase in phases:
        require_earlier(run, phase, [dataset.name for dataset in config.prompts.datasets], running=phases)
    _log_to(run, verbose=options.verbose)
    with terminal() as screen:
        run_pipeline(run, config, phases=phases, report=screen.report, api_key=key, say=screen.say, ask=ask_on_terminal)
    _, html = write_report(run)
    if options.verb == "run":
        show_result(run, took_s=time.monotonic() - began, opens=options.open)
    else:
        print(f"done: {', '.join(phases)}; report: {html}")
    return 0


def _dry_run(root: Path, config: RunConfig, api_key: str) -> int:
    from eyas.operate.plan import check_budget, check_disk, free_bytes
    from eyas.operate.preflight import check_files, check_later_phases, check_sources, check_target, check_values, outlook_of
    from eyas.operate.screen import render_outlook
    from eyas.target.spec import load_target

    check_files(config)
    check_sources(config)
    spec = load_target(config.target)
    check_target(spec, config)
    check_values(spec, config)
    check_later_phases(spec, config, api_key)
    outlook, free = outlook_of(root, config, spec), free_bytes(root)
    _console().print(render_outlook(outlook, free))
    check_budget(outlook, config, spec.hidden_size)
    check_disk(outlook, config, free, str(root))
    return 0


def _log_to(run: RunFolder, *, verbose: bool) -> None:
    run.logs.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(run.logs / "eyas.log", encoding="utf-8")
    to_terminal = logging.StreamHandler()
    to_terminal.setLevel(logging.INFO if verbose else logging.WARNING)
    for handler in (to_file, to_terminal):
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal])
    logging.getLogger("httpx").setLevel(logging.WARNING)
