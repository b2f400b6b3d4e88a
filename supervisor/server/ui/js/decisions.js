// Why: every decision of the scheduler with its reason, newest first.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { hue } from "./colours.js";
import { time } from "./format.js";
import { listDecisions } from "./operations.js";
import { Empty, Select } from "./parts.js";
import { useAnswer } from "./read.js";
import { go, href } from "./route.js";
import { baseOf, notify, state } from "./state.js";

const TONES = { crash: "bad", failed: "bad", refuse: "bad", quarantine: "bad", give_up: "bad", unready: "bad", evicted: "busy", drain: "busy", stop: "busy", wait: "busy", ready: "good", resume: "good" };

const tone = (kind) => TONES[kind] ?? "";

/** Decisions in a row that say the same are one line, with how many they are: the newest. */
function folded(decisions) {
  const lines = [];
  for (const decision of decisions) {
    const last = lines.at(-1);
    const isSame = last && ["kind", "model", "reason"].every((field) => last.decision[field] === decision[field]);
    if (isSame) last.seqs.push(decision.seq);
    else lines.push({ decision, seqs: [decision.seq] });
  }
  return lines;
}

/** `chosen`: the number of the decision that a link leads to. */
function Line({ decision, seqs, named, chosen }) {
  const here = seqs.includes(chosen);
  const place = useRef(null);
  useEffect(() => here && place.current.scrollIntoView({ block: "center" }), [here]);
  return html`<li ref=${place} class=${`${decision.model ? hue(decision.model) : ""} ${here ? "here" : ""}`} aria-current=${here ? "true" : null}>
    <time class="num" datetime=${new Date(decision.at * 1000).toISOString()}>${time(decision.at)}</time>
    <span><span class=${`badge ${tone(decision.kind)}`}>${decision.kind}</span></span>
    ${named && (decision.model ? html`<a href=${href("models", baseOf(decision.model))}>${decision.model}</a>` : html`<span class="muted">all</span>`)}
    <span class="text">${decision.reason}${seqs.length > 1 && html` <small class="num">× ${seqs.length}</small>`}</span>
  </li>`;
}

export const Decisions = ({ decisions, named = true, chosen = null, most = Infinity }) => html`<ol class=${`decisions ${named ? "" : "unnamed"}`}>
  ${folded(decisions)
    .slice(0, most)
    .map((line) => html`<${Line} key=${line.seqs.at(-1)} ...${line} named=${named} chosen=${chosen} />`)}
</ol>`;

/** One model's decisions; the daemon keeps more of them than the page does. */
export function useDecisions(model) {
  const [older, setOlder] = useState([]);
  useEffect(() => setOlder([]), [model]);
  useAnswer(model ? listDecisions({ limit: 200, model }) : null, ({ data }) => setOlder(data), (error) => notify(error.message, "bad"));
  if (!model) return state.decisions;
  const all = new Map([...older, ...state.decisions.filter((decision) => decision.model === model)].map((decision) => [decision.seq, decision]));
  return [...all.values()].sort((left, right) => right.seq - left.seq);
}

export function RecentDecisions() {
  return html`<section class="panel" aria-labelledby="why-title">
    <div class="title"><h2 id="why-title">Why</h2><a href=${href("decisions")}>All decisions</a></div>
    <${Decisions} decisions=${state.decisions} most=${8} />
    ${state.decisions.length === 0 && html`<${Empty}>Nothing was decided yet.<//>`}
  </section>`;
}

export function DecisionsPage({ model, chosen }) {
  const decisions = useDecisions(model);
  return html`<section class="panel" aria-labelledby="decisions-title">
    <div class="title">
      <h1 id="decisions-title">Decisions</h1>
      <${Select} label="Model" value=${model ?? ""} options=${[["", "All models"], ...[...state.models.keys()].sort()]} onChange=${(name) => go(...["decisions", name].filter(Boolean))} />
    </div>
    <${Decisions} decisions=${decisions} chosen=${Number(chosen)} />
    ${decisions.length === 0 && html`<${Empty}>Nothing was decided yet.<//>`}
  </section>`;
}
