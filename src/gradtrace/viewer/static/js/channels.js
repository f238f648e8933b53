// The things a heat map can show, and what to say about each.

/** Columns of influence scores: one of them is shown as "Influence". */
export const SCORE_NAMES = {
  influence: "influence",
  influence_own: "on own prompt",
  influence_loss_term: "loss term",
  influence_position: "position",
};
/** {score: its name} of these. */
export function scoreNames(scores) {
  return Object.fromEntries(scores.map((each) => [each, SCORE_NAMES[each]]));
}
const SCORE_HINTS = {
  influence: "influence: by the gradient of the whole mini-batch.",
  influence_own: "on own prompt: by the gradient of the token’s own group.",
  influence_loss_term: "loss term: this token’s own term of the objective only.",
  influence_position: "position: everything that flows through this token’s position, later tokens’ losses included.",
};
export function scoreHint(scores) {
  return scores.map((each) => SCORE_HINTS[each]).join(" ");
}

/**
 * What the page adds to the columns of the step table: its own colours (influence by the chosen score, ΔV, which comes
 * while one watches, and the advantage of a response), and better words. meaning: what the colours mean; signs: what
 * positive and negative say; missing: why a group may lack it.
 */
const WORDS = {
  entropy: {
    ramp: "e",
    meaning: "How undecided the model was when it chose this token. Stronger colour: more undecided.",
    missing: "This run’s files hold no entropies: rollouts that were imported may have none.",
  },
  influence: {
    title: "Influence",
    signed: true,
    adds_up: true,
    unit: "nats",
    missing: "No influence was stored for this group; above stands why.",
  },
  influence_own: {
    signs: ["by the gradient of its own group, training on this token raised the group’s objective.", "it lowered it."],
    meaning: "",
    missing: "Stored for measured groups only: trainer.influence_trace.measure=all measures every group.",
  },
  log_prob_change: {
    signs: ["the optimizer step made the token likelier.", "less likely. Measured, momentum included."],
    meaning: "",
    missing: "Stored for measured groups only: trainer.influence_trace.measure=all measures every group.",
  },
  delta_v: {
    title: "ΔV",
    signed: true,
    adds_up: true,
    unit: "change of the expected reward",
    signs: [
      "the token made a high reward likelier.",
      "less likely. V after the token minus V before it, by sampled continuations.",
    ],
    missing: "Not measured here: gradtrace counterfactual RUN --step S --group G measures it.",
  },
  log_prob: {
    meaning: "How unlikely the token was that was sampled. Stronger colour: less likely.",
    missing: "This run’s files hold no log-probs: rollouts that were imported may have none.",
  },
  mismatch: {
    unit: "nats: ln of the trainer’s over the sampler’s probability",
    meaning: "",
    signs: [
      "the trainer finds the token likelier than the sampler that drew it.",
      "less likely. Zero where both compute the same policy.",
    ],
    missing: "This run’s files hold no ratio: it is written where the sampler reports log-probs of its own.",
  },
  advantage: {
    title: "Advantage",
    signed: true,
    unit: "of the whole response",
    signs: [
      "training raises the probability of this response.",
      "it lowers it. The parts of a reward are not stored for each response: the run page charts their means (reward_part/…).",
    ],
    missing: "This run’s files hold no advantages.",
  },
  no_step: {
    unit: "where training takes no step",
    meaning: "Coloured tokens take no step: they were clipped.",
    missing: "This run’s files hold no clip mask: influence traces have it.",
  },
  reference_gap: {
    unit: "nats, log-prob minus the reference’s",
    meaning: "Positive, bar above: the policy likes the token more than the reference does. Negative: less.",
    missing:
      "This step’s files hold no distance to a reference: blame has it (trainer.blame.enable) where training knows a reference.",
  },
  token_grad_share: {
    unit: "of ‖g‖² of its optimizer step",
    meaning:
      "Positive, bar above: the token’s own term points along the step’s gradient. Negative: against it. All shares of a step add up to 1.",
    missing: "This step has no blame: trainer.blame.enable=true writes it every trainer.blame.write_every steps.",
  },
};
/**
 * What a heat map can show, by name: {title, unit, signed, adds_up, ramp, meaning, signs, missing}.
 * @type {Record<string, any>}
 */
export const CHANNELS = { ...WORDS };

/** Take in the columns that the server calls colours; one that this page has no words for explains itself. */
export function learnChannels(colours) {
  for (const [name, { meaning, written_by, ...colour }] of Object.entries(colours)) {
    if (name in SCORE_NAMES && name !== "influence_own") continue; // one colour, by the chosen score
    const signs = colour.signed ? " Positive: bar above. Negative: bar below." : "";
    const by = written_by ? `: ${written_by} writes it` : "";
    const own = { meaning: `${capitalised(meaning)}.${signs}`, missing: `This step’s files do not hold it${by}.` };
    CHANNELS[name] = { ramp: "l", ...colour, ...own, ...WORDS[name] };
  }
}

function capitalised(words) {
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** The colours of a group that are neither the page's own nor known to it: they stand in the numbers of a token. */
export function furtherChannels(group) {
  return Object.keys(CHANNELS).filter((name) => !(name in WORDS) && group.values(name) !== null);
}
