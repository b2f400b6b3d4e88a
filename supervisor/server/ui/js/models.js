// The table of models: one row each, whose name takes the focus (Tab, j, k) and the keys l, u, p, Enter.

import { html, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js";
import { askToAdd } from "./adding.js";
import { isAsking, load, pin, STOPPED } from "./actions.js";
import { hue } from "./colours.js";
import { duration, mib } from "./format.js";
import { state } from "./live.js";
import { Empty, Icon } from "./parts.js";
import { askUnload } from "./questions.js";
import { go, href } from "./route.js";
import { useShortcuts } from "./shortcuts.js";

const UNGROUPED = 12; // so many models need no headings
const UNFOLDED = 30; // of more than that only the active ones are shown at first
const WARNED = 3; // so many warnings are shown at first

export function StateBadge({ model }) {
  const tone = model.state === "ready" ? "good" : model.state === "failed" || model.state === "backoff" ? "bad" : model.state === "stopped" ? "" : "busy";
  const same = model.replicas?.filter(({ state }) => state === model.state).length;
  return html`<span class=${`badge ${tone}`}>${model.state}${same > 1 && ` ×${same}`}</span>`;
}

export function Actions({ model }) {
  const asking = isAsking(model.name);
  const stopped = STOPPED.has(model.state);
  const unloading = model.state === "stopping" || (asking && model.state !== "draining"); // a drain may be cut short
  return html`<div class="actions">
    ${stopped
      ? html`<button disabled=${asking} onClick=${() => load(model.name)}>${asking ? "Loading" : "Load"}</button>`
      : html`<button disabled=${unloading} onClick=${() => askUnload(model.name)}>Unload</button>`}
    <button class=${`quiet square ${model.pin ? "on" : ""}`} aria-pressed=${model.pin} aria-label=${`Pin ${model.name}`} title=${model.pin ? "Pinned: never evicted" : "Pin: never evict it"} onClick=${() => pin(model)}>
      <${Icon} name="pin" />
    </button>
    <button class="quiet square" aria-label=${`Settings of ${model.name}`} title="Settings" onClick=${() => go("models", model.name, "settings")}><${Icon} name="gear" /></button>
  </div>`;
}

function age(model) {
  if (model.state === "ready" && !model.answering) return "not answering";
  if (model.state === "ready" && model.idleSince !== null) return `idle ${duration(state.at - model.idleSince)}`;
  if (model.eta_s) return `about ${duration(model.eta_s)} left`;
  return model.reason ? duration(state.at - model.since) : "";
}

function Row({ model }) {
  const { lease_mib: lease, measured_mib: measured, estimate } = model.memory;
  const open = ({ target, currentTarget }) => target.closest("button, a") || currentTarget.querySelector("a").click();
  return html`<tr class=${`${hue(model.name)} ${model.state}`} data-model=${model.name} onClick=${open}>
    <th scope="row">
      <a href=${href("models", model.name)}><i class="swatch" />${model.name}</a>
      ${model.virtual_models.length > 0 && html`<small title="virtual models">${model.virtual_models.join(", ")}</small>`}
    </th>
    <td class="kind">${model.type} <small>${model.runtime}</small></td>
    <td class="state"><${StateBadge} model=${model} /> <small>${age(model)}</small></td>
    <td class="memory num">
      ${model.remote ? html`<span class="muted" title="Others run it: no memory here">remote</span>` : lease === null ? html`<span class="muted" title=${estimate.detail}>~ ${mib(estimate.mib)}</span>` : html`${measured === null ? "" : `${Math.round(measured)} of `}${mib(lease)}${state.devices.length > 1 && html`<small>${model.device}</small>`}`}
      ${model.warnings.length > 0 && html`<a class="badge busy" href=${href("models", model.name, "about")} title=${model.warnings.join("\n")}>warning</a>`}
    </td>
    <td class="load num">${model.in_flight > 0 && html`<span>${model.in_flight} in flight</span>`}${model.queued > 0 && html`<small>${model.queued} queued</small>`}</td>
    <td class="reason" title=${model.reason}>${model.crash ? model.crash.summary : model.reason || "never loaded"}</td>
    <td class="do"><${Actions} model=${model} /></td>
  </tr>`;
}

/** Where a model stands in the table: those that hold memory or are about to, those in trouble, then the rest by type. */
function groupOf(model) {
  if (model.state === "failed" || model.state === "backoff") return "In trouble";
  return STOPPED.has(model.state) && !model.queued ? model.type : "Loaded";
}

const ACTIVE = ["Loaded", "In trouble"];
const FIRST = [...ACTIVE, "llm"];
const rank = (group) => (FIRST.includes(group) ? FIRST.indexOf(group) : FIRST.length);
const byName = new Intl.Collator(undefined, { numeric: true }).compare;

/** `[group, models]` in the order in which they are shown. */
function grouped(models) {
  const groups = new Map();
  for (const model of models) {
    const group = groupOf(model);
    groups.set(group, [...(groups.get(group) ?? []), model]);
  }
  for (const members of groups.values()) members.sort((left, right) => byName(left.name, right.name));
  return [...groups].sort(([left], [right]) => rank(left) - rank(right) || byName(left, right));
}

/** The warnings about all models' memory, also of models in a folded group. */
function AllWarnings() {
  const [all, setAll] = useState(false);
  const warnings = [...state.models.values()].flatMap(({ name, warnings }) => warnings.map((text) => [name, text]));
  if (warnings.length === 0) return null;
  return html`<ul class="warnings" aria-label="Memory warnings">
    ${warnings.slice(0, all ? Infinity : WARNED).map(([name, text]) => html`<li key=${`${name} ${text}`}><a href=${href("models", name, "about")}>${name}</a>: ${text}</li>`)}
    ${warnings.length > WARNED && html`<li><button class="small" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Fewer" : `${warnings.length - WARNED} more`}</button></li>`}
  </ul>`;
}

const GroupRow = ({ group, count, open, onToggle }) => html`<tr class="group">
  <th colspan="7" scope="rowgroup"><button class="quiet" aria-expanded=${open} onClick=${onToggle}>${group} <small>${count}</small></button></th>
</tr>`;

/** Rows that move are taken out of the page and put in again, which takes the focus from them: give it back. */
function useKeptFocus() {
  const focused = document.activeElement;
  useLayoutEffect(() => {
    if (focused?.isConnected && document.activeElement === document.body) focused.focus({ preventScroll: true });
  });
}

const focusedRow = () => document.activeElement?.closest?.("tr[data-model]");

export function Models() {
  const [filter, setFilter] = useState("");
  const [toggled, setToggled] = useState(new Set()); // the groups that are not as they are at first
  const body = useRef(null);
  const search = useRef(null);
  useKeptFocus();
  const wanted = filter.trim().toLowerCase();
  const matches = (model) => [model.name, model.type, model.state, model.runtime, ...model.virtual_models].some((text) => text.toLowerCase().includes(wanted));
  const groups = grouped([...state.models.values()].filter(matches));
  const headed = state.models.size > UNGROUPED;
  const isOpen = (group) => wanted !== "" || !headed || toggled.has(group) !== (state.models.size <= UNFOLDED || ACTIVE.includes(group));
  const toggle = (group) => () => setToggled(new Set(toggled.has(group) ? [...toggled].filter((name) => name !== group) : [...toggled, group]));
  const step = (by) => () => {
    const all = [...body.current.querySelectorAll("tr[data-model]")];
    const at = all.indexOf(focusedRow());
    all[Math.min(all.length - 1, Math.max(0, at + by))]?.querySelector("a").focus();
  };
  const onFocused = (action) => () => {
    const model = state.models.get(focusedRow()?.dataset.model);
    if (model && !isAsking(model.name)) action(model);
  };
  useShortcuts({
    j: step(1),
    k: step(-1),
    "/": () => search.current.focus(),
    l: onFocused((model) => STOPPED.has(model.state) && load(model.name)),
    u: onFocused((model) => STOPPED.has(model.state) || askUnload(model.name)),
    p: onFocused(pin),
  });
  const rows = groups.flatMap(([group, models]) => [
    headed && html`<${GroupRow} key=${`group ${group}`} group=${group} count=${models.length} open=${isOpen(group)} onToggle=${toggle(group)} />`,
    ...(isOpen(group) ? models.map((model) => html`<${Row} key=${`model ${model.name}`} model=${model} />`) : []),
  ]);
  return html`<section class="panel" aria-labelledby="models-title">
    <div class="title">
      <h2 id="models-title">Models <small>${state.models.size}</small></h2>
      <button class="apart" onClick=${askToAdd}>Add a model</button>
      <input ref=${search} type="search" placeholder="Filter" aria-label="Filter the models" value=${filter} onInput=${(event) => setFilter(event.target.value)} onKeyDown=${(event) => event.key === "Escape" && (setFilter(""), event.target.blur())} />
    </div>
    <${AllWarnings} />
    <table class="models">
      <thead><tr><th>Model</th><th>Type</th><th>State</th><th class="num">Memory</th><th class="num">Requests</th><th>Reason</th><th><span class="unseen">Actions</span></th></tr></thead>
      <tbody ref=${body}>${rows}</tbody>
    </table>
    ${groups.length === 0 && html`<${Empty}>${state.models.size ? "No model matches." : "No models yet."}<//>`}
  </section>`;
}
