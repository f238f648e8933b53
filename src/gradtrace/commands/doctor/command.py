"""Check the installation, a run, data, or (with --model) whether gradient reaches the layers that would be traced.

examples:
  gradtrace doctor                                     versions, devices, threads
  gradtrace doctor runs/demo                           damaged files, collapsed entropy, constant groups, skipped
                                                       updates, empty traces, what TracIn's scores say about themselves
  gradtrace doctor --model runs/demo/policy            one small forward and backward pass through the model
  gradtrace doctor --model Qwen/Qwen2.5-0.5B --filter down_proj --projection-dim-factor 64
                                                       which layers match, and the memory a batch would need
  gradtrace doctor --model runs/demo/policy hessian_mode=inverse solver=dense max_hessian_dim=4096
                                                       the same with any knob of trainer.influence_trace
  gradtrace doctor --task mbpp                         can each row be judged, and do reference solutions pass? Also
                                                       a file: --task rows.jsonl --reward code
  gradtrace doctor --device cuda                       the first thing to run on a new GPU: are scores there those of
                                                       the CPU in float64, in float32 and bf16, on one and two GPUs?
  gradtrace doctor --device cuda --model Qwen/Qwen2.5-1.5B
                                                       the same, and what sampler, update and trace cost

Exit code 0: everything is in order, or merely notable. 1: something failed or was lost, and its cause is printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from gradtrace import __version__
from gradtrace.commands import add_runs_dir, opened_run
from gradtrace.errors import GradtraceError
from gradtrace.terminal import no_foreign_bars, say, titled_table

if TYPE_CHECKING:
    from gradtrace.runs import Run

PACKAGES = (
    ("torch", "transformers", "numpy", "safetensors", "hydra-core", "pyarrow", "starlette"),
    ("peft", "trl", "verl", "ray", "math-verify", "pandas", "wandb", "tensorboard", "trackio"),
)
SHOWN_LAYERS = 12
PREFIX = "trainer.influence_trace."
SHOWN_ROWS = 20
RESPONSES, TOKENS = 64, 512
"""Responses and tokens of each that memory is estimated for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="RUN|KEY=VALUE",
        help="a run folder, or a name in --runs-dir; with --model: knobs of trainer.influence_trace (max_modules=8)",
    )
    add_runs_dir(parser)
    add("--model", help="a transformers model: a folder, or a name on the hub")
    add(
        "--filter",
        action="append",
        default=[],
        help="module_name_filter: a regular expression; may be repeated",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="check scores, and with --model speed and memory, on this device; minutes, with a table to paste",
    )
    add("--task", metavar="NAME|SOURCE", help="check the rows of data/NAME, or of a file or folder, with their reward")
    add("--reward", help="with --task: name of the reward that judges the rows (default: that of their data set)")
    add("--projection-dim-factor", type=int, help="0 = exact (default: 32)")
    add("--responses", type=int, help=f"for the memory estimate (default: {RESPONSES})")
    add("--tokens", type=int, help=f"tokens per response, for the estimate (default: {TOKENS})")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console()
    knobs = [word for word in args.words if "=" in word]
    runs = [word for word in args.words if "=" not in word]
    if args.task is not None:
        if args.words or args.model or args.device or args.filter:
            raise GradtraceError("doctor --task takes --reward at most: it checks the rows of a data set.")
        return _check_task(console, args.task, args.reward)
    if args.reward:
        raise GradtraceError("--reward goes with --task: it names what judges the rows of a data set.")
    if args.device is not None:
        others = (args.projection_dim_factor, args.responses, args.tokens)
        if runs or knobs or args.filter or any(value is not None for value in others):
            raise GradtraceError("doctor --device takes --model at most: it checks the default trace.")
        return _check_device(console, args.device, args.model)
    if len(runs) > 1 or (runs and args.model) or (knobs and args.model is None):
        raise GradtraceError(
            "doctor looks at one run (`gradtrace doctor RUN`), or at a model with knobs of the trace "
            "(`gradtrace doctor --model MODEL max_modules=8`)."
        )
    if runs:
        args.run_dir = runs[0]
        return _check_run(console, opened_run(args))
    _show_installation(console)
    if args.model is None:
        return 0
    return _check_model(console, args, trace_config(knobs, args.filter, args.projection_dim_factor))


def trace_config(knobs: list[str], patterns: list[str], factor: int | None) -> Any:
    """The settings of an influence trace with these knobs, each by its name or by its whole path in a run."""
    from omegaconf import OmegaConf

    from gradtrace.config.keys import check_key, schema_keys, typed
    from gradtrace.instruments.influence import InfluenceTraceConfig

    words = [knob.removeprefix(PREFIX) for knob in knobs]
    for word in words:
        check_key(word.split("=")[0], list(schema_keys(InfluenceTraceConfig)), word, prefix=PREFIX)
    given: dict[str, Any] = {"module_name_filter": patterns} if patterns else {}
    given |= {} if factor is None else {"projection_dim_factor": factor}
    return typed(InfluenceTraceConfig, given, OmegaConf.from_dotlist(words), prefix=PREFIX)


def _show_installation(console: Any) -> None:
    import torch

    from gradtrace.tasks.sandbox import missing_isolation

    title = f"gradtrace {__version__} on Python {platform.python_version()}"
    missing = ("[red]missing[/red]", "[dim]not installed (optional)[/dim]")
    rows = [(name, _version(name) or mark) for names, mark in zip(PACKAGES, missing, strict=True) for name in names]
    console.print(titled_table(title, "package", "version", rows=rows, left=2))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            console.print(f"device   cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        console.print("device   CPU only (no CUDA device is visible to torch)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    why_not = missing_isolation() if sys.platform == "linux" else "only Linux has the namespaces it needs"
    sandbox = f"none for code rewards: {why_not}" if why_not else "isolates programs (reward.name=code)"
    console.print(f"sandbox  {sandbox}")
    console.print(f"threads  torch uses {torch.get_num_threads()} of {cores} cores")


def _check_device(console: Any, name: str, model: str | None) -> int:
    from gradtrace.commands.doctor.device import check_device

    no_foreign_bars()
    with console.status("") as status:
        report = check_device(name, model, lambda text: status.update(f"{text} …"))
    title = f"gradtrace doctor --device {name}"
    console.print(titled_table(title, "what", "found", "expected", rows=report.rows, left=3), highlight=False)
    for remark in report.remarks:
        say(console, remark, mark="[yellow]notable[/yellow]")
    if not report.remarks:
        found = "scores are as expected; --model MODEL measures speed and memory, too"
        found = found if model is None else "scores, speed and memory are as expected"
        say(console, found, mark="[green]in order[/green]")
    return int(report.failed)


def _check_task(console: Any, name: str, reward_name: str | None) -> int:
    from gradtrace.commands.doctor.rows import check_rows

    with console.status(f"checking the rows of {name} …"):
        report = check_rows(name, reward_name)
    say(console, f"rows     {report.judged} of {report.rows} rows of {report.source} can be judged: {report.reward}")
    if report.references:
        say(console, f"code     {report.references} reference solutions were run, {report.passed} pass")
    for problem in report.problems[:SHOWN_ROWS]:
        say(console, problem, mark="[red]problem[/red]")
    if len(report.problems) > SHOWN_ROWS:
        say(console, f"… and {len(report.problems) - SHOWN_ROWS} more")
    for remark in report.remarks:
        say(console, remark, mark="[yellow]notable[/yellow]")
    if not report.problems:
        console.print("[green]healthy[/green]  no row is wrong")
    return int(bool(report.problems))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_run(console: Any, run: Run) -> int:
    from gradtrace.commands.doctor.health import examine
    from gradtrace.viewer.catalog import state_of

    with console.status(f"reading {run.path} …"):
        findings = examine(run)
        steps = {kind: len(run.steps(kind)) for kind in run.kinds()}
        last = max(run.metrics_by_step(), default=0)
    traces = ", ".join(f"{kind} {count}" for kind, count in steps.items()) or "none"
    say(console, f"run      {run.name}: {state_of(run)}, last step {last}; traced steps: {traces}")
    for line in captures(run):
        say(console, f"captures {line}")
    for finding in findings:
        word = "[red]problem[/red]" if finding.is_problem else "[yellow]notable[/yellow]"
        say(console, finding.what, mark=word)
    if not findings:
        console.print("[green]healthy[/green]  nothing is wrong and nothing is notable")
    return int(any(finding.is_problem for finding in findings))


def captures(run: Run) -> list[str]:
    """How often the hooks of each module captured something in the last traced step, modules of one count together."""
    for step in run.readable_steps("influence_trace", run.steps("influence_trace")[-1:]):
        counted: dict[str, list[str]] = {}
        for module, (forward, backward) in step.meta.get("captures", {}).items():
            counted.setdefault(f"{forward} forward, {backward} backward", []).append(module)
        return [
            f"{count} in each of {len(names)} modules (step {step.step}): {', '.join(names[:SHOWN_LAYERS])}"
            + (" …" if len(names) > SHOWN_LAYERS else "")
            for count, names in counted.items()
        ]
    return []


def _check_model(console: Any, args: argparse.Namespace, config: Any) -> int:
    from gradtrace.runs import open_run

    no_foreign_bars()
    overrides = ["model.device=cpu", "model.attention=auto"]
    model = open_run(args.model, overrides).policy(trainable=True, precision="float32").model
    check = _check_whole_model if config.is_parts else _check_layers
    return check(console, args, model, config)


def _check_whole_model(console: Any, args: argparse.Namespace, model: Any, config: Any) -> int:
    """The default score moves the weights along the coming step: all of them must have a gradient, and a copy."""
    with console.status("one small forward and backward pass …"):
        _small_loss(model).backward()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    without = [name for name, p in trainable.items() if p.grad is None or not bool(p.grad.isfinite().all())]
    if without or not trainable:
        names = f"{', '.join(without[:SHOWN_LAYERS])}{' …' if len(without) > SHOWN_LAYERS else ''}" or "nothing trains"
        say(console, f"no finite gradient reaches {len(without)} weights: {names}", mark="[red]problem[/red]")
        return 1
    weights = sum(p.numel() * p.element_size() for p in trainable.values())
    responses, tokens = args.responses or RESPONSES, args.tokens or TOKENS
    stored = responses * tokens * 4 * (1 + (responses if config.pairwise else 0))
    say(
        console,
        f"memory   {_size(weights)} for a copy of the trained weights while they are moved, and for {responses} "
        f"responses × {tokens} tokens at most {_size(stored)} of scores",
    )
    console.print(f"[green]healthy[/green]  gradient reaches all {len(trainable)} trained weights")
    return 0


def _check_layers(console: Any, args: argparse.Namespace, model: Any, config: Any) -> int:
    """Scores from captured factors need hooks that see gradient in every selected layer."""
    from gradtrace.attribution.factors.layers import select_blocks
    from gradtrace.attribution.factors.one_pass import estimate_memory
    from gradtrace.commands.doctor.gradient_flow import check_gradient_flow

    with console.status("one small forward and backward pass …"):
        report = check_gradient_flow(model, lambda: _small_loss(model), config)
    if report.layers:
        headings = ("layer", "weight", "traced as", "captures", "rows", "|output gradient|")
        table = titled_table(f"gradient flow of {args.model}", *headings)
        for layer in report.layers[:SHOWN_LAYERS]:
            state = f"{layer.rows}" if layer.rows else "[red]0[/red]"
            table.add_row(
                layer.name,
                "{} × {}".format(*layer.shape),
                "{} × {}".format(*layer.projected),
                "{} fw, {} bw".format(*layer.captures),
                state,
                f"{layer.gradient_norm:.2e}",
            )
        if len(report.layers) > SHOWN_LAYERS:
            table.add_row(f"… and {len(report.layers) - SHOWN_LAYERS} more", "", "", "", "", "")
        console.print(table)
    for problem in report.problems:
        say(console, problem, mark="[red]problem[/red]")
    if not report.healthy:
        return 1
    responses, tokens = args.responses or RESPONSES, args.tokens or TOKENS
    blocks = select_blocks(model, config)
    memory = estimate_memory(blocks, config, responses, responses * tokens, whole_groups=False)
    say(
        console,
        f"memory   {responses} responses × {tokens} tokens: {_size(memory.stored_factors)} of stored factors"
        f" (none where micro-batches hold whole groups), {_size(memory.scores)} of scores,"
        f" {_size(memory.directions)} of directions for loss terms, {_size(memory.projections)} of projections,"
        f" {_size(memory.working)} while scoring; at most {_size(memory.total)}",
    )
    console.print(f"[green]healthy[/green]  all {len(report.layers)} selected layers can be traced")
    return 0


def _small_loss(model: Any) -> Any:
    """The mean log-prob loss of a few random tokens: enough to see where gradient goes."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (2, 16), generator=generator)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def _size(number: int) -> str:
    value = float(number)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
