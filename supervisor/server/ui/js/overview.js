// The first page: numbers, memory, models, history, requests, why.

import { html } from "../vendor/htm-preact.js";
import { History } from "./history.js";
import { RecentDecisions } from "./decisions.js";
import { Jobs } from "./jobs.js";
import { state } from "./live.js";
import { Memory } from "./memory.js";
import { Models } from "./models.js";
import { Requests } from "./requests.js";
import { Sets } from "./sets.js";
import { Tasks } from "./tasks.js";

const SPEED_POINTS = 5; // what "now" means for tokens/s: ten seconds

function Numbers() {
  const models = [...state.models.values()];
  const sum = (field) => models.reduce((total, model) => total + model[field], 0);
  const speeds = state.history?.series.tokens_per_s?.slice(-SPEED_POINTS);
  const swaps = state.history?.series.swaps?.reduce((total, value) => total + (value ?? 0), 0);
  const failed = models.filter((model) => model.crash && model.state !== "ready").length;
  const shown = [
    ["loaded", `${models.filter((model) => model.answering).length} / ${models.length}`],
    ["in flight", sum("in_flight")],
    ["queued", sum("queued")],
    ["tokens/s", speeds?.length ? Math.round(speeds.reduce((total, value) => total + (value ?? 0), 0) / speeds.length) : null],
    ["swaps, 30 min", swaps],
    ["in trouble", failed || null],
  ];
  return html`<dl class="numbers">
    ${shown.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => html`<div class=${name === "in trouble" ? "bad-text" : ""}><dt>${name}</dt><dd class="num">${value}</dd></div>`)}
  </dl>`;
}

export const Overview = () => html`
  <h1 class="unseen">Overview</h1>
  <${Numbers} />
  <${Memory} />
  <${Sets} />
  <${Models} />
  <${Jobs} />
  <${Tasks} />
  <${History} />
  <div class="columns"><${Requests} /><${RecentDecisions} /></div>
`;
