// The page of requests: those in flight, and the last thousand that ended, as the daemon keeps them.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { Clients } from "./clients.js";
import { hue } from "./colours.js";
import { asker, milliseconds, time } from "./format.js";
import { fetchEnded } from "./live.js";
import { Empty, Select } from "./parts.js";
import { InFlight } from "./requests.js";
import { href } from "./route.js";
import { changed, ENDED_KEPT, idOf, notify, state } from "./state.js";

const STEP = 200; // rows at once

export const hasFailed = ({ error, status }) => error !== null || status < 200 || status >= 400;

/** A cell with a number, by which it is left out on a narrow page where it has none. */
const Figure = ({ name, label, value, children }) => html`<td class=${`num ${name} ${value == null ? "none" : ""}`} data-label=${label}>${value == null ? "–" : children}</td>`;

function Row({ record }) {
  const open = ({ target, currentTarget }) => target.closest("a") || currentTarget.querySelector("a").click();
  const failed = hasFailed(record);
  const { queue_ms: wait, first_token_ms: first, completion_tokens: tokens, prompt_tokens: prompt, tokens_per_s: speed, total_ms: total } = record;
  return html`<tr class=${hue(record.model)} onClick=${open}>
    <td class="at num">${time(record.at)}</td>
    <th scope="row"><a href=${href("requests", idOf(record))}><i class="swatch" />${record.model ?? "no model"}</a><small>${record.path}</small></th>
    <td class="key" title=${asker(record)}>${asker(record) || "–"}</td>
    <${Figure} name="wait" label="wait" value=${wait}>${milliseconds(wait)}<//>
    <${Figure} name="first" label="first token" value=${first}>${milliseconds(first)}<//>
    <${Figure} name="tokens" label="tokens" value=${tokens}>${tokens} <small title="tokens of the prompt">/ ${prompt ?? "?"}</small><//>
    <${Figure} name="speed" label="tokens/s" value=${speed}>${speed?.toFixed(1)}<//>
    <${Figure} name="total" label="total" value=${total}>${milliseconds(total)}<//>
    <td class=${`outcome ${failed ? "bad-text" : "muted"}`} title=${record.error_message ?? ""}>${failed ? `${record.status || ""} ${record.error ?? ""}` : record.status}</td>
  </tr>`;
}

const searched = (record) => [idOf(record), record.request_id, record.path, record.model, record.worker, record.key, record.tenant, record.error, record.error_message, record.status].join(" ").toLowerCase();

const different = (records, field) => [...new Set(records.map((record) => record[field]).filter(Boolean))].sort();

export function RequestsPage() {
  const [model, setModel] = useState("");
  const [key, setKey] = useState("");
  const [failed, setFailed] = useState(false);
  const [text, setText] = useState("");
  const [most, setMost] = useState(STEP);
  useEffect(() => {
    if (state.link === "live" || state.link === "polling") fetchEnded(ENDED_KEPT).then(changed, (error) => notify(error.message, "bad"));
  }, [state.link]);
  const all = [...state.ended.values()].reverse();
  const wanted = text.trim().toLowerCase();
  const found = all.filter((record) => (!model || record.model === model) && (!key || record.key === key) && (!failed || hasFailed(record)) && (!wanted || searched(record).includes(wanted)));
  return html`
    ${state.requests?.length > 0 && html`<section class="panel" aria-labelledby="now-title"><h2 id="now-title">Now <small>${state.requests.length}</small></h2><${InFlight} /></section>`}
    <section class="panel" aria-labelledby="ended-title">
      <div class="title">
        <h1 id="ended-title">Requests <small>${found.length === all.length ? `the last ${all.length}` : `${found.length} of ${all.length}`}</small></h1>
      </div>
      <div class="filters">
        <${Select} label="Model" value=${model} options=${[["", "All"], ...different(all, "model")]} onChange=${setModel} />
        <${Select} label="Key" value=${key} options=${[["", "All"], ...different(all, "key")]} onChange=${setKey} />
        <label class="search">Text<input type="search" placeholder="Id, path, error…" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
        <label class="check"><input type="checkbox" checked=${failed} onChange=${(event) => setFailed(event.target.checked)} />Failed only</label>
      </div>
      ${found.length > 0 && html`<table class="ended-table">
        <thead><tr><th>Time</th><th>Model</th><th>Client</th><th class="num">Wait</th><th class="num">First token</th><th class="num">Tokens</th><th class="num">Tokens/s</th><th class="num">Total</th><th>Result</th></tr></thead>
        <tbody>${found.slice(0, most).map((record) => html`<${Row} key=${idOf(record)} record=${record} />`)}</tbody>
      </table>`}
      ${found.length > most && html`<div class="buttons"><button onClick=${() => setMost(most + STEP)}>Show ${Math.min(STEP, found.length - most)} more</button></div>`}
      ${found.length === 0 && html`<${Empty}>${all.length ? "No request matches." : "No request has ended yet."}<//>`}
      <p class="hint">The daemon keeps the last ${ENDED_KEPT}, also over a restart, without their prompts and answers unless a model has <code>keep_bodies</code>; its log has all of them.</p>
    </section>
    <${Clients} />`;
}
