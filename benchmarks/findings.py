"""The fault bench: are planted faults found, rightly named, soon, and is a clean run left in peace?

Short runs of the demo into which a fault with a known truth is planted (`_findings_faults.py`), several seeds of each,
and clean runs. Reported: recall (found by a detector that names it rightly), the planted culprit among the first three
that are named, steps until found, false alarms per 100 clean steps, and how well gradients tell hacked responses from
honest ones (AUROC) beside statistics that need no gradient. Thresholds were tuned on other seeds. Two of the faults are
planted into runs of SmolLM2-135M as well (`_findings_smollm2.py`); these have a table of their own. Runs stay in
--folder and are not made again. `--write-docs` rewrites the table of docs/findings.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import _findings_smollm2 as smollm2
from benchmarks._findings_faults import FAULTS, GAE, Fault
from benchmarks._findings_page import write_table
from benchmarks.common import emit, parse_arguments, study_arguments, wilson
from gradtrace import open_run
from gradtrace.batch import RolloutBatch
from gradtrace.config.loader import load_config
from gradtrace.instruments.findings.text import repeated_share
from gradtrace.intervals import Interval
from gradtrace.metrics import Timer
from gradtrace.trace.run_files import RunFiles
from gradtrace.training.components import build_components
from gradtrace.training.host import open_instruments
from gradtrace.training.loop import Trainer
from gradtrace.training.terminal import SilentDisplay

STEPS = 18
SETTINGS = (
    *("data.train_batch_size=12", "rollout.n=6", "rollout.max_new_tokens=26", "actor.mini_batch_size=3"),
    *(
        "trainer.influence_trace.enable=false",
        "trainer.entropy_trace.enable=false",
        "trainer.blame.enable=true",
        "trainer.blame.write_every=1",
    ),
    *("trainer.validation.every=3", "trainer.validation.prompts=48", "trainer.validation.n=2"),
    *("trainer.validation.pass_k=[1]", "trainer.checkpoint.every=0", "trainer.cpu_threads=1"),
)
SEEDS, CLEAN_RUNS, FIRST_CLEAN = range(40, 45), 40, 5000
"""Seeds that nobody looked at while thresholds were chosen."""
CLEAN = "clean"
ALL_FAULTS = {**FAULTS, CLEAN: Fault(()), **smollm2.SMOLLM2_FAULTS}


def settings_of(kind: str, seed: int) -> list[str]:
    """Of a run with that fault; a fifth of the clean runs has a critic."""
    own = smollm2.settings() if kind in smollm2.SMOLLM2_FAULTS else SETTINGS
    clean_with_critic = kind == CLEAN and seed % 5 == 4
    return [*own, *ALL_FAULTS[kind].overrides, *(GAE if clean_with_critic else ()), f"trainer.seed={seed}"]


def make_runs(kinds: list[str], seed: int, folder: Path, steps: int) -> None:
    """A run with each of these faults, or none; what was found in it goes to its file. Several kinds must have the same
    settings: the steps before a fault begins are the same then and are made once, and a process for each goes on."""
    places = [f"trainer.runs_dir={folder.parent}", f"trainer.total_steps={steps}"]
    parts = build_components(load_config([*settings_of(kinds[0], seed), *places]))
    run_dir, process = Path(tempfile.mkdtemp(dir=folder)), os.getpid()
    try:
        with RunFiles(run_dir) as files:
            # Nobody reads the traces of these runs, and a thread that writes them would not live on in a child.
            watching = open_instruments(parts, files, lambda text: None, writes=False)
            findings = watching.watch(files.path)
            trainer = Trainer(parts, files, SilentDisplay(), watching, findings=findings)
            trainer.save = lambda step: run_dir  # type: ignore[method-assign]
            trainer.export = lambda: None  # type: ignore[method-assign]
            planted = Planted(trainer, kinds)
            trainer.fit()
        result_file(folder, planted.kind, seed, steps).write_text(json.dumps(planted.result(run_dir, seed, steps)))
    finally:
        if os.getpid() == process:
            shutil.rmtree(run_dir)
    if os.getpid() != process:
        os._exit(0)


def result_file(folder: Path, kind: str, seed: int, steps: int) -> Path:
    return folder / f"{kind.replace(' ', '_')}_{seed}_{steps}.json"


class Planted:
    """Lets a fault into the steps of a trainer. Of several kinds, the process splits where they begin."""

    def __init__(self, trainer: Trainer, kinds: list[str]) -> None:
        self.trainer, self.kinds, self.kind = trainer, kinds, kinds[0]
        self.step, self.began = 0, time.perf_counter()
        self.hacked: list[dict[str, float]] = []
        """AUROCs where rewards are hacked."""
        self._collect = trainer.experience.collect
        trainer.experience.collect = self.collect  # type: ignore[method-assign]
        assert trainer.findings is not None
        self._see = trainer.findings.see
        if kinds == ["loophole"]:
            trainer.findings.see = self.see_and_compare  # type: ignore[method-assign]

    def collect(self, generator: torch.Generator, timer: Timer) -> tuple[RolloutBatch, dict[str, float]]:
        self.step += 1
        if begins := self.step == ALL_FAULTS[self.kind].first_step:
            self._branch()
        fault = ALL_FAULTS[self.kind]
        if begins and fault.begin is not None:
            fault.begin(self.trainer)
        batch, metrics = self._collect(generator, timer)
        if fault.spoil is not None and (begins or (self.step > fault.first_step and not fault.once)):
            batch = fault.spoil(self.trainer, batch)
        return batch, metrics

    def _branch(self) -> None:
        """One kind goes on in each child, one child after the other, and the last kind in this process. All write to
        the same files: what an earlier one found is dropped, its metrics are overwritten line by line."""
        for kind in self.kinds[:-1]:
            self.kind = kind
            child = os.fork()
            if not child:
                break
            if os.waitpid(child, 0)[1]:
                sys.exit(f"benchmark: the run with {self.kind} failed; its error is above")
        else:
            self.kind = self.kinds[-1]
        self.began = time.perf_counter()
        findings = self.trainer.findings
        assert findings is not None and findings._file is not None
        findings._file.keep(lambda record: int(record["step"]) < self.step)

    def see_and_compare(self, step: int, batch: RolloutBatch, metrics: Any) -> dict[str, float]:
        own = self._see(step, batch, metrics)
        if found := compare_scores(self.trainer, batch):
            self.hacked.append({"step": step, **found})
        return own

    def result(self, run_dir: Path, seed: int, steps: int) -> dict[str, Any]:
        """What was found in the run that has ended."""
        run = open_run(run_dir)
        untold = ("timing", "perf", "findings/")
        return {
            "kind": self.kind,
            "seed": seed,
            "steps": steps,
            "findings": run.findings(),
            "hacking": self.hacked,
            "seconds": round(time.perf_counter() - self.began, 1),
            "metrics": [{k: v for k, v in row.items() if not k.startswith(untold)} for row in run.metrics()[0]],
        }


# ---------------------------------------------------------------- reward hacking against statistics


def compare_scores(trainer: Trainer, batch: RolloutBatch) -> dict[str, float]:
    """AUROC of telling hacked from honest accepted responses, by gradients and by statistics; empty without both."""
    assert trainer.findings is not None and batch.texts is not None
    found = trainer.findings.gradients.last
    if found is None or not found.is_settled:
        return {}
    rows, scores = found.rows, found.score
    honest = [batch.texts[row] == batch.items[int(batch.group[row])]["expected"] for row in rows.tolist()]
    label = ~np.array(honest, dtype=bool)
    if min(label.sum(), (~label).sum()) < 3:
        return {}
    lengths, log_probs = (
        batch.response_lengths.float(),
        (batch.need("old_log_probs") * batch.response_mask).sum(1),
    )
    areas = {
        "gradient": auroc(scores.numpy(), label),
        "length": either(lengths[rows].numpy(), label),
        "repetition": either(repeated_share(batch)[rows].numpy(), label),
        "reward of the group": either(group_mean(batch)[rows].numpy(), label),
        "surprisal": either((-log_probs / lengths.clamp(min=1))[rows].numpy(), label),
        "embedding clusters": either(embedding_oddness(trainer, batch, rows), label),
    }
    return {**areas, "hacked": float(label.sum()), "honest": float((~label).sum())}


def group_mean(batch: RolloutBatch) -> torch.Tensor:
    sums = torch.zeros(len(batch.prompts)).index_add(0, batch.group, batch.need("rewards"))
    return (sums / torch.bincount(batch.group, minlength=len(batch.prompts)).clamp(min=1))[batch.group]


@torch.no_grad()
def embedding_oddness(trainer: Trainer, batch: RolloutBatch, rows: torch.Tensor) -> np.ndarray:
    """Likeness across prompts of mean last hidden states, the three nearest: what needs a model and no gradient."""
    states = []
    for row in rows.tolist():
        prompt = batch.prompts[int(batch.group[row])]
        ids = batch.responses[row][batch.response_mask[row]].tolist()
        model: Any = trainer.components.policy.model
        hidden = model.model(torch.tensor([[*prompt, *ids]])).last_hidden_state[0, len(prompt) :]
        states.append(hidden.mean(0))
    vectors = torch.stack(states)
    vectors = torch.nn.functional.normalize(vectors - vectors.mean(0), dim=1)
    group = batch.group[rows]
    cosine = (vectors @ vectors.T).masked_fill(group[:, None] == group, -torch.inf)
    nearest = cosine.topk(min(3, len(rows) - 1), dim=1).values
    return torch.where(nearest.isfinite(), nearest, 0.0).mean(1).numpy()


def auroc(scores: np.ndarray, label: np.ndarray) -> float:
    """Probability that a positive has the larger score; ties count half."""
    positive, negative = scores[label][:, None], scores[~label][None]
    return float((positive > negative).mean() + 0.5 * (positive == negative).mean())


def either(scores: np.ndarray, label: np.ndarray) -> float:
    """A baseline may use its score in whichever direction is better in this very step, which favours it."""
    found = auroc(scores, label)
    return max(found, 1.0 - found)


# ---------------------------------------------------------------- what it comes to


def judged(result: dict[str, Any]) -> dict[str, Any]:
    """Whether the fault was found, named rightly, when, and with the planted culprit."""
    fault = ALL_FAULTS[result["kind"]]
    since = [f for f in result["findings"] if f["step"] >= fault.first_step]
    right = [f for f in since if f["detector"] in fault.expected]
    named = None
    if fault.is_culprit is not None:
        named = any(fault.is_culprit(c) for f in right for c in f["culprits"][:3])
    return {
        "found": bool(right),
        "any": bool(since),
        "delay": right[0]["step"] - fault.first_step if right else None,
        "culprit": named,
        "by": sorted({f["detector"] for f in right}),
    }


def kinds_of(results: list[dict[str, Any]], faults: Iterable[str]) -> dict[str, Any]:
    """Of each of these faults that was run: how often, when, by whom and with which culprit it was found."""
    kinds = {}
    for kind in faults:
        own = [judged(r) for r in results if r["kind"] == kind]
        if own:
            delays = [o["delay"] for o in own if o["delay"] is not None]
            culprits = [o["culprit"] for o in own if o["culprit"] is not None]
            kinds[kind] = {
                "runs": len(own),
                "found": sum(o["found"] for o in own),
                "culprit": sum(culprits) if culprits else None,
                "median_delay": float(np.median(delays)) if delays else None,
                "by": sorted({name for o in own for name in o["by"]}),
            }
    return kinds


def alarms_of(clean: list[dict[str, Any]]) -> dict[str, Any]:
    """False alarms of these runs, as far as they are clean: all of a run without a fault, else the steps before it."""
    until = [r["steps"] if r["kind"] == CLEAN else ALL_FAULTS[r["kind"]].first_step - 1 for r in clean]
    alarms = [f["detector"] for r, last in zip(clean, until, strict=True) for f in r["findings"] if f["step"] <= last]
    steps = sum(until)
    return {
        "clean_runs": len(clean),
        "clean_steps": steps,
        "alarms": {name: alarms.count(name) for name in sorted(set(alarms))},
        "alarms_per_100": 100 * len(alarms) / steps if steps else None,
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = kinds_of(results, FAULTS)
    with_culprit = [k for k in kinds.values() if k["culprit"] is not None]
    hacking = [row for r in results for row in r["hacking"]]
    names = [name for name in (hacking[0] if hacking else {}) if name not in ("step", "hacked", "honest")]
    return {
        "kinds": kinds,
        "runs": sum(k["runs"] for k in kinds.values()),
        "found": sum(k["found"] for k in kinds.values()),
        "culprit_runs": sum(k["runs"] for k in with_culprit),
        "culprit": sum(k["culprit"] for k in with_culprit),
        **alarms_of([r for r in results if r["kind"] == CLEAN]),
        "auroc": {name: spread([row[name] for row in hacking], results) for name in names},
        "auroc_steps": len(hacking),
        "smollm2": smollm2_summary(results),
    }


def smollm2_summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What was found in the runs of SmolLM2; empty where there is none."""
    own = [r for r in results if r["kind"] in smollm2.SMOLLM2_FAULTS]
    once = list({r["seed"]: r for r in own}.values())  # runs of one seed are the same until the fault begins
    return {"kinds": kinds_of(own, smollm2.SMOLLM2_FAULTS), **alarms_of(once)} if own else {}


def spread(values: list[float], results: list[dict[str, Any]]) -> list[float]:
    """Mean, and a 95 % bootstrap interval over steps."""
    generator = np.random.default_rng(0)
    means = [np.mean(generator.choice(values, len(values))) for _ in range(1000)]
    return [round(float(v), 3) for v in (np.mean(values), *np.quantile(means, (0.025, 0.975)))]


def add_options(parser: argparse.ArgumentParser) -> None:
    study_arguments(parser, "findings", "docs/findings.md")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="of faulty runs")
    parser.add_argument("--clean", type=int, default=CLEAN_RUNS, help="number of clean runs")
    parser.add_argument("--first-clean", type=int, default=FIRST_CLEAN, help="seed of the first clean run")
    parser.add_argument("--only", nargs="*", help="these kinds of faults (and `clean`)")


def planned(args: argparse.Namespace) -> list[tuple[str, int]]:
    """(kind, seed) of every run."""
    seeds, clean = ([0], 1) if args.quick else (args.seeds, args.clean)
    few = ("untrained token", "end token not trained", "duplicated prompts")
    plan = []
    for place, seed in enumerate(seeds):  # clean runs in between, so that a part of it is a fair part
        own = range(place * clean // len(seeds), (place + 1) * clean // len(seeds))
        plan += [(kind, seed) for kind in (few if args.quick else FAULTS)]
        plan += [(CLEAN, args.first_clean + number) for number in own]
    if not args.quick:
        plan += [(kind, seed) for seed in smollm2.SEEDS for kind in smollm2.SMOLLM2_FAULTS]
    return [(kind, seed) for kind, seed in plan if not args.only or kind in args.only]


def together(plan: list[tuple[str, int]]) -> list[tuple[list[str], int]]:
    """The plan's runs, those that are the same until their faults begin in one entry."""
    found: dict[tuple[str, ...], tuple[list[str], int]] = {}
    for kind, seed in plan:
        fault = ALL_FAULTS[kind]
        alone = (kind,) if kind == CLEAN or fault.first_step == 1 else ()
        found.setdefault((*settings_of(kind, seed), *alone), ([], seed))[0].append(kind)
    return list(found.values())


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(__doc__, arguments, add_options)
    args.folder.mkdir(parents=True, exist_ok=True)
    plan = planned(args)
    began, results, left = time.perf_counter(), [], 0
    for kinds, seed in together(plan):
        steps = 8 if args.quick else smollm2.STEPS if kinds[0] in smollm2.SMOLLM2_FAULTS else STEPS
        made = {kind: result_file(args.folder, kind, seed, steps) for kind in kinds}
        missing = [kind for kind, file in made.items() if not file.is_file()]
        if missing and time.perf_counter() - began > 60 * args.minutes:
            left += len(missing)
        elif missing:
            make_runs(missing, seed, args.folder, steps)
        for kind, file in made.items():
            if file.is_file():
                results.append(json.loads(file.read_text()))
                said = [(f["step"], f["detector"]) for f in results[-1]["findings"]]
                print(f"{kind}, seed {seed}: {results[-1]['seconds']} s, {said}", flush=True)
    if left:
        print(f"{left} of {len(plan)} runs are left: run it again", flush=True)
    found = summary(results)
    if args.write_docs and not left:
        write_table(found)
    emit("findings", ratios_of(found), found)


def ratios_of(found: dict[str, Any]) -> dict[str, Interval]:
    """The shares with Wilson's intervals, and the AUROC with its bootstrap."""

    def share(part: int, whole: int, scale: int = 1) -> Interval:
        low, high = wilson(part, whole)
        return Interval(scale * part / max(1, whole), scale * low, scale * high, whole)

    ratios = {
        "findings_recall": share(found["found"], found["runs"]),
        "findings_culprit": share(found["culprit"], found["culprit_runs"]),
    }
    if found["alarms_per_100"] is not None:
        alarms = share(sum(found["alarms"].values()), found["clean_steps"], scale=100)
        ratios["findings_false_alarms_per_100_steps"] = alarms
    if "gradient" in found["auroc"]:
        mean, low, high = found["auroc"]["gradient"]
        ratios["findings_hacking_auroc"] = Interval(mean, low, high, found["auroc_steps"])
    return ratios


if __name__ == "__main__":
    main()
