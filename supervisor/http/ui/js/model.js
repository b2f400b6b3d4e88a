// One model in full: why it is as it is, its log as it grows, and how it is defined. `tab` is part of the address.

import { html, useState } from "../vendor/htm-preact.js";
import { load } from "./actions.js";
import { Decisions, useDecisions } from "./decisions.js";
import { duration, mib, plural } from "./format.js";
import { Log } from "./log.js";
import { Actions, StateBadge } from "./models.js";
import { Dialog, Empty, Warnings } from "./parts.js";
import { href } from "./route.js";
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

function Constraint({ name, rule, value, configured, onInput }) {
  const choices = rule.type === "boolean" ? [true, false] : rule.enum;
  const attributes = { id: `override-${name}`, value: value ?? "", onInput: (event) => onInput(event.target.value) };
  const isNumber = rule.type === "integer" || rule.type === "number";
  return html`<label for=${attributes.id}>${name}
    ${choices
      ? html`<select ...${attributes}><option value="">${configured ?? "unchanged"}</option>${choices.map((choice) => html`<option>${String(choice)}</option>`)}</select>`
      : html`<input ...${attributes} type=${isNumber ? "number" : "text"} step=${rule.type === "integer" ? 1 : "any"} min=${rule.minimum} max=${rule.maximum} placeholder=${configured ?? "unchanged"} />`}
  </label>`;
}

/** A text of the form as the API takes it: numbers and booleans as such. */
function parsed(text, rule) {
  if (rule.type === "boolean") return text === "true";
  return rule.type === "string" || Number.isNaN(Number(text)) ? text : Number(text);
}

function LoadForm({ model }) {
  const rules = Object.entries(model.load_constraints ?? {});
  const [values, setValues] = useState(() => Object.fromEntries(Object.entries(model.overrides).map(([name, value]) => [name, String(value)])));
  const submit = (event) => {
    event.preventDefault();
    const set = rules.filter(([name]) => values[name]).map(([name, rule]) => [name, parsed(values[name], rule)]);
    load(model.name, Object.fromEntries(set));
  };
  if (rules.length === 0) return html`<${Empty}>This runtime has nothing to set for a load.<//>`;
  return html`<form class="overrides" onSubmit=${submit}>
    <p class="hint">Until it is unloaded; the configuration stays as it is.</p>
    <div class="fields">${rules.map(([name, rule]) => html`<${Constraint} key=${name} name=${name} value=${values[name]} rule=${rule} configured=${model.definition?.[name]?.toString()} onInput=${(value) => setValues({ ...values, [name]: value })} />`)}</div>
    <button class="primary" type="submit">Load with these</button>
  </form>`;
}

const TABS = [
  ["why", "Why", Why],
  ["log", "Log", Log],
  ["about", "About", Facts],
  ["load", "Load with…", LoadForm],
];

export function ModelDialog({ name, tab = "why", onClose }) {
  const model = state.models.get(name);
  const shown = TABS.filter(([id]) => id !== "load" || model.load_constraints);
  const [open, , View] = shown.find(([id]) => id === tab) ?? shown[0];
  return html`<${Dialog} title=${name} className="drawer" onClose=${onClose}>
    <div class="summary">
      <${StateBadge} model=${model} /><span class="reason">${model.reason || "never loaded"}</span>
      <${Actions} model=${model} />
    </div>
    <${Warnings} texts=${model.warnings} />
    <nav class="tabs" aria-label=${`About ${name}`}>
      ${shown.map(([id, title]) => html`<a href=${href("models", name, id)} aria-current=${id === open ? "page" : null}>${title}</a>`)}
    </nav>
    <div class=${`tab ${open}`}><${View} model=${model} /></div>
  <//>`;
}
