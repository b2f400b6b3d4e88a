// Requests in flight and queued, with cancel; below them the last that ended. Repetitions are one line.

import { html, useState } from "../vendor/htm-preact.js";
import { cancel } from "./actions.js";
import { hue } from "./colours.js";
import { asker, duration, milliseconds, time } from "./format.js";
import { Empty } from "./parts.js";
import { askCancel } from "./questions.js";
import { href } from "./route.js";
import { idOf, state } from "./state.js";

const ENDED_SHOWN = 6;
const FOLDED_FROM = 4; // so many alike become one line
const OPEN_MOST = 50; // lines of an opened one

const tone = (request) => (request.state === "queued" ? "busy" : "good");

const Running = ({ request }) => html`<li class=${hue(request.model)}>
  <i class="swatch" />
  <span class="what"><a href=${href("requests", idOf(request))}>${request.model}</a><small>${request.path}${asker(request) && ` · ${asker(request)}`}</small></span>
  <span class=${`badge ${tone(request)}`}>${request.state}</span>
  <span class="num age">${duration(state.at - request.since)}</span>
  <button class="small" aria-label=${`Cancel request ${request.request_id}`} onClick=${() => cancel([request])}>Cancel</button>
</li>`;

function Alike({ requests, open, toggle }) {
  const [first] = requests;
  const what = `${requests.length} ${first.state} for ${first.model}`;
  return html`<li class=${hue(first.model)}>
      <i class="swatch" />
      <span class="what"><button class="fold" aria-expanded=${open} onClick=${toggle}><b class="num">${requests.length}</b> ${first.state} for <b>${first.model}</b></button></span>
      <span class="num age" title="The oldest">${duration(state.at - first.since)}</span>
      <button class="small" aria-label=${`Cancel all ${what}`} onClick=${() => askCancel(requests, what)}>Cancel all</button>
    </li>
    ${open && requests.slice(0, OPEN_MOST).map((request) => html`<${Running} key=${request.id} request=${request} />`)}
    ${open && requests.length > OPEN_MOST && html`<li class="muted">and ${requests.length - OPEN_MOST} more</li>`}`;
}

/** Lists of requests of one model in one state, in the order of their first. */
function alike(requests) {
  const groups = new Map();
  for (const request of requests) {
    const name = `${request.state} ${request.model}`;
    groups.set(name, [...(groups.get(name) ?? []), request]);
  }
  return [...groups];
}

/** The requests that are queued or in flight, for a list of its own or within the page of requests. */
export function InFlight() {
  const [opened, setOpened] = useState([]); // by model, so that they stay open when they begin to run
  const toggled = (model) => (opened.includes(model) ? opened.filter((name) => name !== model) : [...opened, model]);
  return html`<ul class="requests" aria-label="In flight and queued">
    ${alike(state.requests).flatMap(([name, requests]) => {
      if (requests.length < FOLDED_FROM) return requests.map((request) => html`<${Running} key=${request.id} request=${request} />`);
      const { model } = requests[0];
      return [html`<${Alike} key=${name} requests=${requests} open=${opened.includes(model)} toggle=${() => setOpened(toggled(model))} />`];
    })}
  </ul>`;
}

const outcome = (record) => record.error ?? record.status;

/** The newest first; those in a row that ended alike are one, with how many they are. */
function folded(records) {
  const lines = [];
  for (const record of records) {
    const last = lines.at(-1);
    if (last && record.error && last.record.model === record.model && last.record.error === record.error) last.count += 1;
    else if (lines.length === ENDED_SHOWN) break;
    else lines.push({ record, count: 1 });
  }
  return lines;
}

const Ended = ({ record, count }) => html`<li class=${`ended ${hue(record.model)}`}>
  <span class="num muted">${time(record.at)}</span>
  <span class="what"><a href=${href("requests", idOf(record))}>${record.model ?? "–"}</a><small>${record.completion_tokens ? `${record.completion_tokens} tokens` : record.path}</small></span>
  ${count > 1 && html`<span class="badge num" title=${`${count} in a row`}>× ${count}</span>`}
  <span class=${`num ${record.status >= 400 || record.error ? "bad-text" : "muted"}`}>${outcome(record)}</span>
  <span class="num age">${milliseconds(record.total_ms)}</span>
</li>`;

export function Requests() {
  if (state.requests === null) return null;
  const ended = folded([...state.ended.values()].reverse());
  return html`<section class="panel" aria-labelledby="requests-title">
    <div class="title"><h2 id="requests-title">Requests <small>${state.requests.length} now</small></h2><a href=${href("requests")}>All requests</a></div>
    <${InFlight} />
    ${state.requests.length + ended.length === 0 && html`<${Empty}>Nothing in flight.<//>`}
    ${ended.length > 0 && html`<ul class="requests" aria-label="Ended">${ended.map((line) => html`<${Ended} key=${idOf(line.record)} ...${line} />`)}</ul>`}
  </section>`;
}
