// Requests in flight and queued, with cancel; below them the last that ended, as far as this page saw them.

import { html } from "../vendor/htm-preact.js";
import { cancel } from "./actions.js";
import { duration, milliseconds, time } from "./format.js";
import { state } from "./live.js";
import { Empty, hue } from "./parts.js";

const ENDED_SHOWN = 6;

const Running = ({ request }) => html`<li class=${hue(request.model)}>
  <i class="swatch" />
  <span class="what"><b>${request.model}</b><small>${request.path}${request.key ? ` · ${request.key}` : ""}</small></span>
  <span class=${`badge ${request.state === "queued" ? "busy" : "good"}`}>${request.state}</span>
  <span class="num age">${duration(state.at - request.since)}</span>
  <button class="small" aria-label=${`Cancel request ${request.request_id}`} onClick=${() => cancel(request)}>Cancel</button>
</li>`;

const Ended = ({ record }) => html`<li class=${`ended ${hue(record.model)}`}>
  <span class="num muted">${time(record.at)}</span>
  <span class="what">${record.model ?? "–"}<small>${record.completion_tokens ? `${record.completion_tokens} tokens` : record.path}</small></span>
  <span class=${`num ${record.status >= 400 || record.error ? "bad-text" : "muted"}`}>${record.error ?? record.status}</span>
  <span class="num age">${milliseconds(record.total_ms)}</span>
</li>`;

export function Requests() {
  if (state.requests === null) return null;
  return html`<section class="panel" aria-labelledby="requests-title">
    <h2 id="requests-title">Requests <small>${state.requests.length} now</small></h2>
    <ul class="requests" aria-label="In flight and queued">${state.requests.map((request) => html`<${Running} key=${request.id} request=${request} />`)}</ul>
    ${state.requests.length + state.finished.length === 0 && html`<${Empty}>Nothing in flight.<//>`}
    ${state.finished.length > 0 && html`<ul class="requests" aria-label="Ended">${state.finished.slice(0, ENDED_SHOWN).map((record) => html`<${Ended} key=${record.request_id} record=${record} />`)}</ul>`}
  </section>`;
}
