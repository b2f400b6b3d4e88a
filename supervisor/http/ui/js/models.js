// The table of models: one row each, which takes the focus (j, k) and the keys l, u, p, Enter.

import { html, useRef, useState } from "../vendor/htm-preact.js";
import { isAsking, load, pin, STOPPED, unload } from "./actions.js";
import { duration, mib } from "./format.js";
import { state } from "./live.js";
import { Empty, hue, Icon } from "./parts.js";
import { go, href } from "./route.js";
import { useShortcuts } from "./shortcuts.js";

export function StateBadge({ model }) {
  const tone = model.state === "ready" ? "good" : model.state === "failed" || model.state === "backoff" ? "bad" : model.state === "stopped" ? "" : "busy";
  return html`<span class=${`badge ${tone}`}>${model.state}</span>`;
}

export function Actions({ model }) {
  const asking = isAsking(model.name);
  const stopped = STOPPED.has(model.state);
  return html`<div class="actions">
    ${stopped
      ? html`<button disabled=${asking} onClick=${() => load(model.name)}>${asking ? "Loading" : "Load"}</button>`
      : html`<button disabled=${asking || model.state === "stopping"} onClick=${() => unload(model.name)}>Unload</button>`}
    <button class=${`quiet square ${model.pin ? "on" : ""}`} aria-pressed=${model.pin} aria-label=${`Pin ${model.name}`} title=${model.pin ? "Pinned: never evicted" : "Pin: never evict it"} onClick=${() => pin(model)}>
      <${Icon} name="pin" />
    </button>
  </div>`;
}

function age(model) {
  if (model.state === "ready" && !model.answering) return "not answering";
  if (model.state === "ready" && model.idleSince !== null) return `idle ${duration(state.at - model.idleSince)}`;
  if (model.eta_s) return `about ${duration(model.eta_s)} left`;
  return model.reason ? duration(state.at - model.since) : "";
}

function Row({ model, focusable }) {
  const { lease_mib: lease, measured_mib: measured, estimate } = model.memory;
  const open = (event) => event.target.closest("button, a") || go("models", model.name);
  return html`<tr class=${`${hue(model.name)} ${model.state}`} data-model=${model.name} tabindex=${focusable ? 0 : -1} onClick=${open} onKeyDown=${(event) => event.key === "Enter" && open(event)}>
    <th scope="row">
      <a href=${href("models", model.name)} tabindex="-1"><i class="swatch" />${model.name}</a>
      ${model.virtual_models.length > 0 && html`<small title="virtual models">${model.virtual_models.join(", ")}</small>`}
    </th>
    <td class="kind">${model.type} <small>${model.runtime}</small></td>
    <td class="state"><${StateBadge} model=${model} /> <small>${age(model)}</small></td>
    <td class="memory num">
      ${model.remote ? html`<span class="muted" title="Others run it: no memory here">remote</span>` : lease === null ? html`<span class="muted" title=${estimate.detail}>~ ${mib(estimate.mib)}</span>` : html`${measured === null ? "" : `${Math.round(measured)} of `}${mib(lease)}${state.devices.length > 1 && html`<small>${model.device}</small>`}`}
    </td>
    <td class="load num">${model.in_flight > 0 && html`<span>${model.in_flight} in flight</span>`}${model.queued > 0 && html`<small>${model.queued} queued</small>`}</td>
    <td class="reason" title=${model.reason}>${model.crash ? model.crash.summary : model.reason || "never loaded"}</td>
    <td class="do"><${Actions} model=${model} /></td>
  </tr>`;
}

/** The row that has the focus, or the first one. */
function focusedName() {
  return document.activeElement?.closest?.("tr[data-model]")?.dataset.model;
}

export function Models() {
  const [filter, setFilter] = useState("");
  const body = useRef(null);
  const search = useRef(null);
  const wanted = filter.trim().toLowerCase();
  const matches = (model) => [model.name, model.type, model.state, model.runtime, ...model.virtual_models].some((text) => text.toLowerCase().includes(wanted));
  const rows = [...state.models.values()].filter(matches);
  const step = (by) => () => {
    const all = [...body.current.rows];
    const at = all.findIndex((row) => row.contains(document.activeElement));
    all[Math.min(all.length - 1, Math.max(0, at + by))]?.focus();
  };
  const onFocused = (action) => () => {
    const model = state.models.get(focusedName());
    if (model && !isAsking(model.name)) action(model);
  };
  useShortcuts({
    j: step(1),
    k: step(-1),
    "/": () => search.current.focus(),
    l: onFocused((model) => STOPPED.has(model.state) && load(model.name)),
    u: onFocused((model) => STOPPED.has(model.state) || unload(model.name)),
    p: onFocused(pin),
  });
  return html`<section class="panel" aria-labelledby="models-title">
    <div class="title">
      <h2 id="models-title">Models</h2>
      <input ref=${search} type="search" placeholder="Filter" aria-label="Filter the models" value=${filter} onInput=${(event) => setFilter(event.target.value)} onKeyDown=${(event) => event.key === "Escape" && (setFilter(""), event.target.blur())} />
    </div>
    <table class="models">
      <thead><tr><th>Model</th><th>Type</th><th>State</th><th class="num">Memory</th><th class="num">Requests</th><th>Reason</th><th><span class="unseen">Actions</span></th></tr></thead>
      <tbody ref=${body}>${rows.map((model, index) => html`<${Row} key=${model.name} model=${model} focusable=${index === 0} />`)}</tbody>
    </table>
    ${rows.length === 0 && html`<${Empty}>${state.models.size ? "No model matches." : "No models yet."}<//>`}
  </section>`;
}
