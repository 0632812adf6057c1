"""The body of each command: call one public function and show its result."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import surgeon
from surgeon._version import __version__
from surgeon.cli.entries import AsJson, Declared, Group, QuietOption, command, shown
from surgeon.cli.failures import Debug, console, listening, print_json, show, sigterm_interrupts
from surgeon.cli.spellings import SPELLINGS, complete_shipped
from surgeon.common.distributed import Ranks, forget_leftovers
from surgeon.common.interrupting import interrupt
from surgeon.errors import BadInput, printable

if TYPE_CHECKING:
    from surgeon.plan.plan import LoadedPlan

app = typer.Typer(
    name="surgeon",
    cls=Group,
    help="Grow a pretrained language model by a plan, and prove that nothing was lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=(
        "Exit codes: 0 done; 1 a bug in surgeon (diff: they differ); 2 bad input or refused; 3 a promise does not"
        " hold (verify, demo); 130 interrupted. Data goes to stdout, progress and errors to stderr."
    ),
    # Use the terminal's full width: click's own limit of 80 columns would fold every option's help.
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 1_000},
)


def _print_version(given: bool) -> None:
    """Print the version and exit, where the option is given."""
    if given:
        print(f"surgeon {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    Debug.on = debug


@command("preview")
def preview(
    plan: Declared,
    base: Declared,
    overrides: Declared = (),
    as_json: AsJson = False,
    quiet: QuietOption = False,
    **given: Any,
) -> None:
    """Show what a plan does to a base, from headers and config alone."""
    short()
    from surgeon.writing.preview_view import preview_view

    with listening(quiet) as listener:
        listener.wait("reading headers")
        shown = surgeon.preview(_plan(plan, overrides), base, **given)
    show(shown, lambda found: preview_view(found, base, notes=not quiet), as_json=as_json)


@command("apply")
def apply(
    plan: Declared,
    base: Declared,
    out: Declared,
    overrides: Declared = (),
    delta: Annotated[
        bool, typer.Option("--delta", help="PLAN is a delta (a folder, or a Hub id): apply it to its base")
    ] = False,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    **given: Any,
) -> None:
    """Grow BASE by PLAN into the new folder OUT; the same command continues an interrupted run.

    `surgeon apply --delta DELTA BASE OUT` applies a delta to its base instead.
    """
    if Ranks.of_environment().size > 1:
        raise BadInput("torchrun: `surgeon apply` runs in one process; `surgeon train` takes several")
    if delta:
        from surgeon.rework.apply_delta import applied_delta_view

        if overrides:
            raise BadInput("--set changes a plan, and --delta applies none; leave one of them out")
        kept = {name: given[name] for name in ("revision", "link", "trust_remote_code") if name in given}
        with listening(quiet) as listener:
            put = surgeon.apply_delta(plan, base, out, **kept, listener=listener)
        show(put, applied_delta_view, as_json=as_json, quiet=quiet)
        return
    from surgeon.writing.apply import applied_view

    with listening(quiet) as listener:
        applied = surgeon.apply(_plan(plan, overrides), base, out, **given, listener=listener)
    show(applied, applied_view, as_json=as_json, quiet=quiet)


shown(
    "verify",
    "verification_view",
    "Prove that OUT keeps what its manifest promises of BASE; exit 3 where a promise does not hold.",
    always=True,
    code=lambda proof: 0 if proof.holds else 3,
)


@command("train")
def train(
    out: Declared,
    config: Declared,
    to: Declared,
    overrides: Declared = (),
    device: Declared = "auto",
    trust_remote_code: Declared = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="write nothing: show tokens by source, a sample, memory and time")
    ] = False,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    **given: Any,
) -> None:
    """Train what surgery added to OUT, and nothing else, into the new folder RUN; repeat the command to continue.

    `what` and `lora` in the config train the base's own tensors, layers or a LoRA instead, of a plain base too.

    Under torchrun (`torchrun --nproc-per-node N --no-python surgeon train …`) N processes share every step's sequences.
    """
    from surgeon.training.config.loading import load_config

    # Report mistakes in the config before the slow imports.
    load_config(config, overrides)

    from surgeon.training.train import rehearsal_view, trained_view

    with sigterm_interrupts(), listening(quiet or not Ranks.of_environment().leads) as listener:
        both: dict[str, Any] = {
            "overrides": overrides,
            "device": device,
            "trust_remote_code": trust_remote_code,
            "listener": listener,
        }
        if dry_run:
            rehearsal = surgeon.rehearse(out, config, to, **both)
        else:
            trained = surgeon.train(out, config, to, **given, **both)
    if dry_run:
        show(rehearsal, rehearsal_view, as_json=as_json)
    elif trained is not None:
        show(trained, trained_view, as_json=as_json, quiet=quiet)
    _leave_ranks()


shown(
    "recall",
    "recalled_view",
    "Have BASE write text like that it was trained on, to be replayed in training; repeat the command to continue.",
)
shown(
    "learn",
    "learned_view",
    """Let BASE learn new text and keep what it knows; the table and ten answers show both, beside the base.

    New layers learn, with text of the base's own replayed; --most trains all of the base, --exact puts new layers
    behind a gate. The same command continues an interrupted one.
    """,
    always=True,
)
shown(
    "evaluate",
    "evaluation_view",
    """Measure loss, perplexity and bits per byte of models on the same held-out text, with confidence intervals.

    With --prompt each model answers too, as a chat where its tokenizer has a template; --data may then be left out.
    """,
    always=True,
)
shown(
    "continual",
    "continued_view",
    """Learn tasks one after the other, with a surgery for each, and measure all tasks after each one.

    The same command continues an interrupted run, between tasks and within one.
    """,
)
shown(
    "compare",
    "compared_view",
    """Compare ways of learning new text without forgetting: runs at several rates, fair frontiers, a page, advice.

    `surgeon compare quick BASE RESULTS --new NEW.txt --original KNOWN.txt` is all it takes. The same command goes on
    where it was cut off.
    """,
    always=True,
)
shown(
    "blend",
    "blended_view",
    "Interpolate RUN with its base, without training (WiSE-FT): DEST knows more of the base and less of what is new.",
    always=True,
)
shown(
    "merge",
    "merged_view",
    """Merge the control blocks of OUT into one layer each, or a PEFT adapter into its base (BASE ADAPTER MERGED).

    Of control blocks, how much the function changes is measured. `surgeon merge BASE ADAPTER MERGED` is `apply` of a
    plan with `merge_adapter`.
    """,
    always=True,
)
shown(
    "revert",
    "reverted_view",
    "Undo the last surgery of OUT, or all but the first N: DEST holds every earlier tensor, byte for byte.",
)
shown(
    "refresh",
    "refreshed_view",
    "Write this version's code into OUT, an output with grafts of an earlier surgeon; nothing else changes.",
)
shown(
    "make_delta",
    "delta_view",
    "Write the part of OUT that the base of its last surgery lacks; `apply --delta` applies it to that base.",
    name="delta",
)
shown(
    "export_slot",
    "exported_view",
    "Write a PMoE slot of OUT as a PEFT LoRA adapter for its base: shared LoRA below the router, the slot above.",
)
shown(
    "write_gguf",
    "gguf_view",
    "Write OUT as a GGUF file for llama.cpp, by llama.cpp's own converter.",
    name="gguf",
)
shown(
    "push",
    "pushed_view",
    "Verify OUT and push it to a repository of the Hub; the same command continues an interrupted push.",
)
shown(
    "diff",
    "difference_view",
    "Compare A with B, tensor by tensor; exit 0 where they are the same, 1 where they differ.",
    code=lambda difference: 0 if difference.identical else 1,
)
shown(
    "transport_report",
    "transport_view",
    "Report entropies of transport maps: how widely inserted layers' neurons correspond to their neighbours'.",
    always=True,
)
shown(
    "routing_report",
    "routing_view",
    "Record what routers and gates of a grafted output choose, by layer and site, on texts of several domains.",
    always=True,
)


@command("report")
def report(
    out: Declared,
    html: Declared = None,
    as_json: AsJson = False,
    quiet: QuietOption = False,
    **given: Any,
) -> None:
    """Write a report on OUT as one page that needs no network; exit 3 on a broken promise."""
    if html is None and not as_json:
        html = Path(f"{out.resolve().name}.html")
    with listening(quiet) as listener:
        written = surgeon.report(out, html=html, **given, listener=listener)
    if as_json:
        print_json(written.to_json())
    elif not quiet:
        print(printable(str(written.html), 2000))
    if written.findings.verification is not None and not written.findings.verification.holds:
        raise typer.Exit(3)


@command("inspect", name="inspect")
def _inspect(checkpoint: Declared, as_json: AsJson = False, **given: Any) -> None:
    """Show a checkpoint's family and sizes, its surgeries and new tensors, and code that it brings; none of it runs."""
    short()
    from surgeon.lab.reports.inspect import inspection_view

    show(surgeon.inspect(checkpoint, **given), inspection_view, as_json=as_json)


@command("families")
def families(base: Declared = None, as_json: AsJson = False, quiet: QuietOption = False, **given: Any) -> None:
    """List the model families; with BASE what is known or found out about it, and which operations it takes."""
    from surgeon.lab.reports.families import families_view

    with listening(quiet) as listener:
        listener.wait("reading headers")
        found = surgeon.families(base, **given)
    show(found, families_view, as_json=as_json)


@command()
def schema(
    training: Annotated[bool, typer.Option("--training", help="the schema of training configs")] = False,
    tasks: Annotated[bool, typer.Option("--tasks", help="the schema of tasks files")] = False,
    study: Annotated[bool, typer.Option("--study", help="the schema of studies")] = False,
) -> None:
    """Print the JSON schema of plans, which editors use to complete YAML."""
    short()
    given = {"--training": training, "--tasks": tasks, "--study": study}
    chosen = [name for name, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise BadInput(f"{' and '.join(chosen)} exclude each other; give one of them")
    if study:
        from surgeon.lab.studies.config.loading import json_schema
    elif tasks:
        from surgeon.lab.courses.config.loading import json_schema
    elif training:
        from surgeon.training.config.loading import json_schema
    else:
        from surgeon.plan.plan import json_schema
    print_json(json_schema())


@command()
def plans(
    name: Annotated[str | None, typer.Argument(help="print this plan", autocompletion=complete_shipped)] = None,
    whole: Annotated[bool, typer.Option("--all", help="list variants and papers' experiments too")] = False,
    as_json: AsJson = False,
) -> None:
    """List the shipped plans, or print a plan to start from."""
    short()
    from surgeon.plan import shipped

    if as_json:
        print_json(shipped.shipped_plans() if name is None else {name: shipped.text_of(name)})
    elif name is None:
        console().print(shipped.plans_view(shipped.described(), whole=whole))
    else:
        print(shipped.text_of(name), end="")


@command()
def chat(
    model: Annotated[str, typer.Argument(help=SPELLINGS["inspect.checkpoint"].help)],
    base: Annotated[str | None, typer.Option(metavar="BASE", help="a model that answers too, before MODEL")] = None,
    system: Annotated[str | None, typer.Option(help="the system's turn, with which every chat begins")] = None,
    tokens: Annotated[int, typer.Option(min=1, help=SPELLINGS["evaluate.answer_tokens"].help)] = 256,
    device: Annotated[str, typer.Option(help=SPELLINGS["device"].help)] = "auto",
    quiet: QuietOption = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help=SPELLINGS["trust_remote_code"].help)
    ] = False,
) -> None:
    """Chat with MODEL, and with its base beside it, by greedy answers.

    Prompts come from the terminal, or a line each from stdin. /new begins again, Ctrl-C stops an answer; an empty line,
    /exit or Ctrl-D ends.
    """
    names = [name for name in (base, model) if name is not None]
    for name in names:
        surgeon.check_model(name, trust_remote_code=trust_remote_code)
    from surgeon.lab.evaluation.chat import Speaker

    with listening(quiet) as listener:
        how: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code, "listener": listener}
        speakers = [Speaker.load(name, system=system or "", tokens=tokens, **how) for name in names]
    for prompt in iter(_typed, ""):
        for speaker in speakers:
            if prompt == "/new":
                speaker.begin()
                continue
            print(f"{printable(speaker.checkpoint.name)}: " if base else "", end="", flush=True)
            try:
                speaker.answer(prompt, lambda text: print(text, end="", flush=True))
            except BadInput as error:
                if not sys.stdin.isatty():
                    raise
                print(f"{error}; /new begins again", file=sys.stderr)
            print()


def _typed() -> str:
    """Return the next prompt of the terminal or of stdin; "" where the chat ends. Raises BadInput for other bytes."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""
    except UnicodeDecodeError as error:
        raise BadInput("stdin: not UTF-8 text; give the prompts in that encoding") from error
    return "" if line == "/exit" else line


@command()
def demo(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="new folder; default: surgeon-demo")] = None,
    base: Annotated[str | None, typer.Option(help="a chat model of yours in place of SmolLM2-135M-Instruct")] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of every training, of 512 tokens")] = 10,
    quiet: QuietOption = False,
) -> None:
    """Let a chat model learn French in four ways, and show what each learned and what it kept."""
    from surgeon import report as write_report
    from surgeon.lab.learning.demo import demo_view, run_demo

    with listening(quiet) as listener:
        shown = run_demo(folder or Path("surgeon-demo"), base=base, steps=steps, listener=listener)
        page = write_report(shown.folder / "layers", html=shown.folder / "report.html", listener=listener).html
    console().print(demo_view(shown))
    console().print(f"report: {page}", markup=False)
    if not shown.holds:
        raise typer.Exit(3)


def short() -> None:
    """Run the garbage collector less often: its runs during imports take a fifth of a short command's time."""
    gc.set_threshold(100_000)


def _leave_ranks() -> None:
    """End a finished process of torchrun at once: gloo's threads may outlive the interpreter, which then aborts."""
    if Ranks.of_environment().size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _plan(given: str, overrides: Sequence[str] | None) -> LoadedPlan:
    """Return the named plan, or the plan on stdin (`-`), whose relative paths start in the current folder."""
    overrides = overrides or ()
    if given != "-":
        from surgeon.writing.preview import loaded_plan

        return loaded_plan(given, overrides)
    from surgeon.common.yaml import LARGEST_FILE, decoded

    if sys.stdin.isatty():
        raise BadInput("PLAN -: stdin is the terminal; redirect a plan to it, or give a file")
    source = "<stdin>"
    raw = sys.stdin.buffer.read(LARGEST_FILE + 1)
    if len(raw) > LARGEST_FILE:
        raise BadInput(f"{source}: larger than {LARGEST_FILE:,} bytes; is this a plan?")
    return surgeon.parse_plan(decoded(raw, source), source=source, overrides=overrides)


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    # The console's encoding may lack some characters of the output.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    forget_leftovers()
    app()
