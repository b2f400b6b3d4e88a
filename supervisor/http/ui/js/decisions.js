// Why: every decision of the scheduler with its reason, newest first.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { get } from "./api.js";
import { time } from "./format.js";
import { notify, state } from "./live.js";
import { Empty, hue } from "./parts.js";
import { go, href } from "./route.js";

const TONES = { crash: "bad", refuse: "bad", quarantine: "bad", give_up: "bad", unready: "bad", evicted: "busy", drain: "busy", stop: "busy", wait: "busy", ready: "good", resume: "good" };

const tone = (kind) => TONES[kind] ?? "";

export const Decisions = ({ decisions, named = true }) => html`<ol class=${`decisions ${named ? "" : "unnamed"}`}>
  ${decisions.map(
    (decision) => html`<li key=${decision.seq} class=${decision.model ? hue(decision.model) : ""}>
      <time class="num" datetime=${new Date(decision.at * 1000).toISOString()}>${time(decision.at)}</time>
      <span class=${`badge ${tone(decision.kind)}`}>${decision.kind}</span>
      ${named && (decision.model ? html`<a href=${href("models", decision.model)}>${decision.model}</a>` : html`<span class="muted">all</span>`)}
      <span class="text">${decision.reason}</span>
    </li>`,
  )}
</ol>`;

/** One model's decisions; the daemon keeps more of them than the page does. */
export function useDecisions(model) {
  const [older, setOlder] = useState([]);
  useEffect(() => {
    let wanted = true;
    setOlder([]);
    if (model)
      get(`/v1/admin/decisions?limit=200&model=${encodeURIComponent(model)}`)
        .then(({ data }) => wanted && setOlder(data))
        .catch((error) => notify(error.message, "bad"));
    return () => (wanted = false);
  }, [model]);
  if (!model) return state.decisions;
  const all = new Map([...older, ...state.decisions.filter((decision) => decision.model === model)].map((decision) => [decision.seq, decision]));
  return [...all.values()].sort((left, right) => right.seq - left.seq);
}

export function RecentDecisions() {
  return html`<section class="panel" aria-labelledby="why-title">
    <div class="title"><h2 id="why-title">Why</h2><a href=${href("decisions")}>All decisions</a></div>
    <${Decisions} decisions=${state.decisions.slice(0, 8)} />
    ${state.decisions.length === 0 && html`<${Empty}>Nothing was decided yet.<//>`}
  </section>`;
}

export function DecisionsPage({ model }) {
  const decisions = useDecisions(model);
  return html`<section class="panel" aria-labelledby="decisions-title">
    <div class="title">
      <h1 id="decisions-title">Decisions</h1>
      <select aria-label="Model" value=${model ?? ""} onChange=${(event) => go(...["decisions", event.target.value].filter(Boolean))}>
        <option value="">All models</option>
        ${[...state.models.keys()].map((name) => html`<option value=${name}>${name}</option>`)}
      </select>
    </div>
    <${Decisions} decisions=${decisions} />
    ${decisions.length === 0 && html`<${Empty}>Nothing was decided yet.<//>`}
  </section>`;
}
