"""Say what the next update of a checkpoint will do to entropy, measure it, and say which responses do it.

  gradtrace probe runs/demo/checkpoints/step_000020
  gradtrace probe runs/demo/checkpoints/step_000020 evaluation_prompts=512 eta=[0.1,1,10]
  gradtrace probe runs/demo/checkpoints/step_000020 --config probe.yaml
  gradtrace probe runs/demo/policy optimizer=adamw lr=1e-4         a plain model: say whose update
  gradtrace probe models/SmolLM2-135M-Instruct optimizer=sgd lr=1e-3 recipe=grpo_gsm8k data.train=[train.jsonl]

Two batches are sampled: E, from held-out prompts, that entropy is measured on, and U, the next training prompts, that
the update is made of. The update is the real one of the checkpoint's optimizer: its moments, bias corrections, ε, decay
and clipping. It is applied in steps of η × lr and taken back. KEY=VALUE sets a key of the probe (below) or of the
run (rollout.max_new_tokens=64); a file for --config holds the probe's keys, and overrides of the run under `run`.

Results go to RUN/probes/step_N: report.json, report.html, pictures, and a trace for `gradtrace view`. A probe that was
interrupted goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from pathlib import Path

from gradtrace.terminal import command, no_foreign_bars, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        help="RUN (its latest), RUN/checkpoints/step_N (verl: global_step_N), or a plain transformers folder",
    )
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the probe or of its run")
    add("--config", type=Path, help="a YAML file with settings of the probe")
    add("--output", type=Path, help="where results go (default: RUN/probes/step_N)")
    parser.epilog = "keys of the probe:\n" + "\n".join(key_lines())


def key_lines() -> list[str]:
    """`key = default`, and what it means."""
    from gradtrace.commands.probe.config import ProbeConfig

    source, defaults = inspect.getsource(ProbeConfig), ProbeConfig()
    lines = []
    for field in dataclasses.fields(ProbeConfig):
        default = getattr(defaults, field.name)
        text = source.split(f"    {field.name}:", 1)[1].split('"""')[1]
        lines.append(f"  {field.name} = {default!r}\n      " + " ".join(text.split()))
    return lines


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from gradtrace.commands.probe.config import load_probe_config
    from gradtrace.commands.probe.page import summary_table, sweep_table
    from gradtrace.commands.probe.session import run_probe

    no_foreign_bars()
    config, run_overrides = load_probe_config(args.config, args.overrides)
    console = Console()
    try:
        results = run_probe(args.checkpoint, config, run_overrides, args.output, console)
    except KeyboardInterrupt:
        console.print("Interrupted. The same command goes on where it was.")
        return 130
    folder = results.write()
    record = results.record()
    console.print(sweep_table(record))
    console.print(summary_table(record))
    say(console, f"Report: {folder / 'report.html'}\nTokens: {command()} view {folder}")
    return 0
