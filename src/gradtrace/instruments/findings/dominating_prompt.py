"""One prompt that fills the batch, or whose responses make most of the gradient step after step."""

from __future__ import annotations

from collections import Counter

from gradtrace.instruments.findings.base import Finding, Moment, named, sure

COPIES, GRADIENT = "batch/prompt_copies", "batch/prompt_gradient"


def detect(moment: Moment) -> Finding | None:
    batch, knobs = moment.batch, moment.knobs
    copies = moment.metrics.get(COPIES, 0.0)
    counts = Counter(map(tuple, batch.prompts))
    if len(batch.prompts) >= 4 and copies > knobs.prompt_copies:
        text, count = counts.most_common(1)[0]
        culprits = [moment.prompt(batch.prompts.index(list(text)), count / len(batch.prompts))]
        return Finding(
            f"{count} of the {len(batch.prompts)} prompts of this step are one and the same ({copies:.0%} of "
            f"all are copies): {named(culprits)}.",
            sure(copies, knobs.prompt_copies),
            {"copies": copies},
            culprits,
        )
    share = moment.metrics.get(GRADIENT, 0.0)
    recent = [*moment.before(GRADIENT)[-2:], share]
    if moment.blame is None or len(recent) < 3 or min(recent) < knobs.prompt_gradient:
        return None
    of_groups = moment.blame.of_the_step().group_share(batch)
    culprits = [moment.prompt(int(g), float(of_groups[g])) for g in of_groups.argsort(descending=True)[:3]]
    return Finding(
        f"A single prompt makes {share:.0%} of the gradient, in the third step running: {named(culprits)}.",
        sure(share, knobs.prompt_gradient),
        {"share": share},
        culprits,
    )
