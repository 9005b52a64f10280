"""The command line: `eyas VERB`. Parses, refuses, runs, and turns errors into one line and an exit code.

This is the one place of the library that reads the environment (EYAS_API_KEY) and handles signals. What
the verbs do is in `eyas.operate.verbs`; modules are imported by the verb that needs them, so that
`eyas --help` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from eyas import __version__

INTERRUPTED = 130

EXAMPLES = """\
a first run, on this machine, without a GPU:
  eyas run --config local-smollm2-quick --run runs/first --open
  eyas watch --run runs/first           (in another shell, while it runs)
  eyas report --run runs/first --open   (at any time)

before a long run:
  eyas run --config my.yaml --run runs/big --dry-run

A run that was stopped, killed or has failed continues when the same command is given again.
exit codes: 0 done, 1 failed, 2 bad configuration or input, 3 finished with rejects above the limit, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `eyas`; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    options = parser.parse_args(words)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that spin starve every other process
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` starts us with SIGINT ignored
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # both end the run in the same clean way
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as does a terminal that closes, unless nohup has it ignored
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGINT))
    from eyas.errors import EyasError
    from eyas.operate import verbs

    try:
        verb = getattr(verbs, options.verb.replace("-", "_") + "_verb")
        return int(verb(options, os.environ.get("EYAS_API_KEY", "")))
    except KeyboardInterrupt:
        print(f"\ninterrupted; nothing is lost. To continue: {shlex.join(['eyas', *words])}", file=sys.stderr)
        return INTERRUPTED
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone: `eyas status | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 1
    except OSError as error:  # a disk or a folder that nobody foresaw
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}; mend it, then run this again", file=sys.stderr)
        logging.getLogger(__name__).info("ended by an OSError", exc_info=True)
        return 1
    except Exception as error:  # a file of another shape, or a fault of Eyas: kept whole, told in one line
        log = _keep_traceback(options)
        print(
            f"error: unexpected {type(error).__name__}: {error}; a file of the run is damaged or Eyas is at fault ({log})",
            file=sys.stderr,
        )
        return 1


def _keep_traceback(options: argparse.Namespace) -> str:
    """Where the traceback of the exception being handled now stands: the run's logs, or here where they cannot be written."""
    text = traceback.format_exc()
    log = Path(options.run) / "logs" / "error.log"
    try:
        log.parent.mkdir(exist_ok=True)
        log.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:
        print(text, file=sys.stderr)
        return "traceback above"
    return f"traceback in {log}"


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="eyas",
        description="Train an EAGLE-3 draft model for a language model that you already serve, and measure what it gains.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"eyas {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    run = _phase(verbs, "run", "the whole job: prompts in, a faster model out")
    run.add_argument(
        "--no-prefect", action="store_true", help="run the same library code in this process, without a Prefect server"
    )
    run.add_argument("--ui", action="store_true", help="open the Prefect UI on this run")
    run.add_argument("--open", action="store_true", help="open report.html in the browser at the end, if there is one")
    _phase(verbs, "prepare", "phase 1: collect, clean, split and render prompts")
    _phase(verbs, "generate", "phase 2: the target's own responses, resumable at any moment")
    _phase(verbs, "merge", "phase 3: one training order and the draft's vocabulary")
    _phase(verbs, "extract", "phase 4: the target's hidden states for every token")
    _phase(verbs, "train", "phase 5: train the draft, best checkpoint by held-out accept length")
    _phase(verbs, "export", "write the draft as SGLang and vLLM load it")
    _phase(verbs, "bench", "phase 6: serve with the draft, measure accept length and speed-up")
    _configured(verbs, "deploy", "serve with the draft if the benchmark and a canary allow it; otherwise go back and say why")
    engine = _configured(verbs, "engine", "serve the target with the embedded engine until Ctrl-C")
    engine.add_argument("--draft", type=Path, help="folder of an exported draft to speculate with")
    engine.add_argument("--port", type=int, help="port on loopback; default: server.engine.port, or a free one")
    _configured(verbs, "plan", "bring the plan up to date and print it: phases, forecast, alternatives")
    curve = _configured(verbs, "learning-curve", "train on a part of the replies and say what the rest will buy, with an interval")
    curve.add_argument(
        "--share",
        type=float,
        metavar="X",
        help="of the training records (default: operate.learning_curve_share), above 0, at most 1",
    )
    _configured(
        verbs, "probe-codecs", "measure on 200 replies what smaller hidden states keep of this target; the plan offers them"
    )
    adopt = _configured(verbs, "adopt", "take up responses that another script has written: audit them, keep what is right")
    adopt.add_argument("--dataset", required=True, help="dataset whose prompts they answer")
    adopt.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON Lines with prompt ids, output ids, finish reason")
    probe = _configured(verbs, "probe-server", "measure a running server against concurrency, and say which settings to change")
    probe.add_argument("--url", help="base URL; default: each of server.urls")
    probe.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="length of the prompts (default: 512)")
    probe.add_argument("--new-tokens", type=int, default=256, metavar="N", help="tokens of each reply (default: 256)")
    control = _folder(verbs, "control", "pause or resume a generation that runs; add or drain servers")
    control.add_argument("--pause", action="store_true", help="send nothing new; what is in flight finishes")
    control.add_argument("--resume", action="store_true", help="go on after a pause")
    control.add_argument("--add", action="append", default=[], metavar="URL", help="a server that joins")
    control.add_argument("--drain", action="append", default=[], metavar="URL", help="a server that gets nothing new")
    diagnose = _configured(verbs, "diagnose", "why is my acceptance low? measures the usual causes, the costliest first")
    diagnose.add_argument("--draft", type=Path, metavar="DIR", help="another draft than the run's own, in any known layout")
    diagnose.add_argument("--traffic", type=Path, metavar="FILE", help="JSON Lines with output_ids of your own replies")
    status = _folder(verbs, "status", "where a run stands, from its folder alone; works after a crash")
    status.add_argument("--json", action="store_true", help="as JSON, for programs")
    watch = _folder(verbs, "watch", "live view of a run, from its folder alone; Ctrl-C leaves the run alone")
    watch.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between looks (default: 2)")
    report = _folder(verbs, "report", "write report.md and report.html into the run folder; a half-finished run will do")
    report.add_argument("--open", action="store_true", help="open report.html in the browser, if there is one")
    return parser


def _phase(verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    parser = _configured(verbs, name, text)
    parser.add_argument(
        "--dry-run", action="store_true", help="print records, tokens, disk and hours that are to be expected, and do nothing"
    )
    return parser


def _configured(verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    parser = _folder(verbs, name, text)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML config, or the name of a preset such as local-smollm2-quick; without it, the one recorded in the run folder",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one value of the config, for instance draft.epochs=2 or prompts.datasets.0.quota=100; may be repeated",
    )
    parser.add_argument("--verbose", action="store_true", help="log to the terminal too (the log is in DIR/logs/eyas.log)")
    return parser


def _folder(verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--run", type=_run_folder, metavar="DIR", required=True, help="run folder")
    return parser


def _run_folder(text: str) -> Path:
    if not text or "\0" in text:  # "$RUN" of a variable that is not set would otherwise be the current folder
        raise argparse.ArgumentTypeError("wanted the name of a folder, got none")
    return Path(text)


if __name__ == "__main__":
    sys.exit(main())
