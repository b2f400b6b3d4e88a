// One model in full: why it is as it is, its log as it grows, and how it is defined. `tab` is part of the address.

import { html } from "../vendor/htm-preact.js";
import { Decisions, useDecisions } from "./decisions.js";
import { duration, mib, plural } from "./format.js";
import { Log } from "./log.js";
import { Actions, StateBadge } from "./models.js";
import { Dialog, Empty, Warnings } from "./parts.js";
import { href } from "./route.js";
import { Settings } from "./settings.js";
import { state } from "./state.js";

function Why({ model }) {
  const decisions = useDecisions(model.name);
  return html`
    ${model.crash && html`<div class="crash"><p><span class="badge bad">${model.crash.class}</span> ${model.crash.summary}</p>
      ${model.crash.log_tail.length > 0 && html`<pre role="group" tabindex="0" aria-label="Last words of the worker">${model.crash.log_tail.join("\n")}</pre>`}</div>`}
    ${model.waits_for.length > 0 && html`<p>Waits for the memory of ${model.waits_for.map((claim) => (Array.isArray(claim) ? claim[0] : claim)).join(", ")}.</p>`}
    <${Decisions} decisions=${decisions} named=${model.replica_max > 1} />
    ${decisions.length === 0 && html`<${Empty}>Nothing was decided about it yet.<//>`}
  `;
}

const replica = ({ worker, state, device, lease_mib, in_flight, pid, port }) =>
  `${worker}: ${state} on ${device}, ${mib(lease_mib)}, ${in_flight} in flight, pid ${pid}, port ${port}`;

function Facts({ model }) {
  const { memory, worker } = model;
  const facts = [
    ["Runtime", `${model.runtime}, ${model.type}`],
    ["Priority", `${model.priority}${model.pin ? ", pinned" : ""}`],
    ["Estimate", model.remote ? "" : `${mib(memory.estimate.mib)}, ${memory.estimate.source}: ${memory.estimate.detail}`],
    ["Learned", Object.entries(memory.learned).map(([device, size]) => `${mib(size)} on ${device}`).join(", ")],
    ["Raised", Object.entries(memory.raised ?? {}).map(([device, size]) => `${mib(size)} on ${device}: a load with less ran out of memory`).join(", ")],
    ["Lease", memory.lease_mib === null ? "" : `${Object.entries(memory.parts).map(([device, size]) => `${mib(size)} on ${device}`).join(" + ")}, ${mib(memory.measured_mib)} measured`],
    ["Address", worker?.address ? `${worker.address}, as ${worker.upstream_model}, ${plural(worker.connections, "connection")}` : ""],
    ["Worker", worker?.pid && model.replicas.length < 2 ? `pid ${worker.pid}, port ${worker.port}, up ${duration(state.at - model.startedAt)}` : ""],
    ["Replicas", model.replicas?.length > 1 ? model.replicas.map(replica).join("\n") : ""],
    ["Load time", model.load_s === null ? "" : `${model.load_s.toFixed(1)} s`],
    ["Context", model.sizing?.text.replace(/^context /, "") ?? (model.capabilities?.context ? `${model.capabilities.context} tokens` : "")],
    ["Overrides", Object.entries(model.overrides ?? {}).map(([name, value]) => `${name} ${value}`).join(", ")],
    ["Takes", [...(model.capabilities?.modalities ?? []), ...(model.capabilities?.documents ?? [])].join(", ")],
    ["Can", ["tools", "thinking", "multi_turn"].filter((name) => model.capabilities?.[name]).join(", ").replace("multi_turn", "multi-turn")],
    ["Serves", model.capabilities?.endpoints?.join("\n") ?? ""],
  ];
  return html`<dl class="facts">${facts.filter(([, text]) => text).map(([name, text]) => html`<dt>${name}</dt><dd>${text}</dd>`)}</dl>
    ${model.definition && html`<h3>Definition</h3><pre role="group" tabindex="0" aria-label="Definition">${JSON.stringify(model.definition, null, 2)}</pre>`}`;
}

const TABS = [
  ["why", "Why", Why],
  ["log", "Log", Log],
  ["about", "About", Facts],
  ["settings", "Settings", Settings],
];

export function ModelDialog({ name, tab = "why", onClose }) {
  const model = state.models.get(name);
  const [open, , View] = TABS.find(([id]) => id === tab) ?? TABS[0];
  return html`<${Dialog} title=${name} className="drawer" onClose=${onClose}>
    <div class="summary">
      <${StateBadge} model=${model} /><span class="reason">${model.reason || "never loaded"}</span>
      <${Actions} model=${model} />
    </div>
    <${Warnings} texts=${model.warnings} />
    <nav class="tabs" aria-label=${`About ${name}`}>
      ${TABS.map(([id, title]) => html`<a href=${href("models", name, id)} aria-current=${id === open ? "page" : null}>${title}</a>`)}
    </nav>
    <div class=${`tab ${open}`}><${View} key=${name} model=${model} /></div>
  <//>`;
}
