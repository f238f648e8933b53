"""Train a policy with reinforcement learning. Without arguments: the demo, about three minutes on a CPU.

  gradtrace train                                   the demo: a tiny transformer learns chains of arithmetic
  gradtrace train --cfg                             print every setting of it, and stop
  gradtrace train trainer.total_steps=40 trainer.seed=1
  gradtrace train recipe=gsm8k model.path=models/SmolLM2-135M-Instruct data.train=[gsm8k/train.jsonl]
  gradtrace train recipe=smollm2_countdown          a real language model on a CPU (docs/real_model.md)
  gradtrace train recipe=archer_math trainer.traces=true    a recipe for a GPU, with entropy and influence traces
  gradtrace train recipe=my.yaml                    a recipe of your own; it may say `defaults: [gsm8k, _self_]`
  gradtrace train algorithm.path=my_losses.py algorithm.policy_loss=mine    a loss of your own (CONTRIBUTING.md)
  gradtrace train resume=runs/demo                  continue a run that was stopped, exactly where it was
  gradtrace train resume=runs/demo trainer.total_steps=200
  gradtrace train engine=verl recipe=gsm8k cluster.num_workers=8    the same recipe on 8 GPUs (see docs/verl.md)

Settings are KEY=VALUE with the key's full path, as in Hydra; a misspelt key is answered with the nearest one.
A run goes to runs/NAME: config.yaml, metrics.jsonl, checkpoints/, traces, and at the end policy/, a plain
transformers folder. Ctrl-C finishes the step and saves; a second one stops at once.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, e.g. recipe=gsm8k rollout.n=16")
    parser.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    parser.epilog = instrument_switches()


def instrument_switches() -> str:
    """What a run can record, ours and installed packages': a line that turns each on."""
    from gradtrace.instruments.registry import instruments

    records = [one.record for one in instruments().values() if one.record is not None]
    lines = [f"  {record.switch:<36} {record.meaning}" for record in records]
    return "\n".join(["instruments (trainer.traces=true turns the usual ones on):", *lines])


def run(args: argparse.Namespace) -> int:
    from gradtrace.config.loader import load_config, to_yaml
    from gradtrace.terminal import large_imports

    with large_imports():  # torch, where the names of losses and advantages are known
        config = load_config(args.overrides)
    if args.cfg:
        if config.engine == "verl":
            from gradtrace.integrations.verl.launch.job import show

            print(show(config), end="")
        else:
            print(to_yaml(config), end="")
        return 0
    if config.engine == "verl":
        print("Preparing a run on verl: configuration, model, prompts.", flush=True)  # imports take seconds
    from gradtrace.terminal import no_foreign_bars

    with large_imports():
        from gradtrace.training.terminal import open_display

        if config.engine == "verl":
            from gradtrace.integrations.verl.launch.job import train
        else:
            from gradtrace.policy.cpu.norm import keep_freed_memory
            from gradtrace.training.run import train

            keep_freed_memory()
    no_foreign_bars()
    try:
        outcome = train(config, open_display())
    except KeyboardInterrupt:
        print("\nStopped at once; the last checkpoint is as it was.")
        return 130
    return 0 if outcome.finished else 130
