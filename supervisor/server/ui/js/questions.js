// Dialogs that say what an action means for others, before it is done.

import { html } from "../vendor/htm-preact.js";
import { cancel, STOPPED, unload } from "./actions.js";
import { duration, plural } from "./format.js";
import { Dialog } from "./parts.js";
import { ask, notify, state } from "./state.js";

const SHOWN = 4;

const close = () => ask(null);

function decided(action) {
  close();
  action();
}

const Names = ({ requests, verb }) => html`<ul class="names">
  ${requests.slice(0, SHOWN).map((request) => html`<li key=${request.id}>${request.path} <small>${request.key ? `key ${request.key}, ` : ""}${verb} ${duration(state.at - request.since)}</small></li>`)}
  ${requests.length > SHOWN && html`<li class="muted">and ${requests.length - SHOWN} more</li>`}
</ul>`;

const Choice = ({ title, text, danger = false, onClick }) => html`<div class="choice">
  <p>${text}</p>
  <button class=${danger ? "danger" : ""} onClick=${onClick}>${title}</button>
</div>`;

const them = (count) => (count === 1 ? "it" : "them");

function Unload({ name }) {
  const model = state.models.get(name);
  if (!model || STOPPED.has(model.state)) return html`<${Dialog} title=${`Unload ${name}`} className="narrow" onClose=${close}><p>It has no worker any more.</p><//>`;
  const of = (wanted) => (state.requests ?? []).filter((request) => request.model && request.state === wanted && isFor(model, request.model));
  const { in_flight: running, queued } = model;
  const again = [name, ...model.virtual_models].join(" or ");
  const refused = queued ? ` ${plural(queued, "waiting request")} ${queued === 1 ? "gets" : "get"} the error model_unloaded.` : "";
  return html`<${Dialog} title=${`Unload ${name}`} className="narrow" onClose=${close}>
    ${running > 0 && html`<div><p><b>${plural(running, "request")}</b> running on it</p><${Names} requests=${of("running")} verb="since" /></div>`}
    ${queued > 0 && html`<div><p><b>${plural(queued, "request")}</b> waiting for it</p><${Names} requests=${of("queued")} verb="for" /></div>`}
    ${running + queued === 0 && html`<p>Nothing runs on it or waits for it any more.</p>`}
    ${model.state === "ready" && running > 0 && html`<${Choice}
      title="Unload when done"
      text=${`Running requests get up to ${duration(model.drain_s)} more; what is left then is cut off.${queued ? ` The waiting ones stay, and load it again right after.` : ""}`}
      onClick=${() => decided(() => unload(name))}
    />`}
    <${Choice}
      danger
      title=${running ? `Cut ${them(running)} off now` : "Unload now"}
      text=${`${running ? `The running ${running === 1 ? "answer breaks" : "answers break"} off in the middle, with an error.` : "It ends at once."}${refused}`}
      onClick=${() => decided(() => unload(name, { force: true }))}
    />
    <p class="hint">The next request for ${again} loads it again.</p>
  <//>`;
}

const isFor = (model, name) => name === model.name || model.virtual_models.includes(name);

/** Unload a model; where that is felt by anybody, say so first. */
export function askUnload(name) {
  const model = state.models.get(name);
  if (model.in_flight + model.queued > 0) ask(() => html`<${Unload} name=${name} />`);
  else unload(name).then(() => state.models.get(name)?.state === "stopped" && notify(`${name} is unloaded; the next request for it loads it again.`));
}

/** Cancel many requests at once: only after a second click. */
export function askCancel(requests, what) {
  const count = requests.length;
  ask(
    () => html`<${Dialog} title=${`Cancel ${plural(count, "request")}`} className="narrow" onClose=${close}>
      <${Names} requests=${requests} verb="for" />
      <${Choice} danger title=${`Cancel ${count === 1 ? "it" : `all ${count}`}`} text=${`${what}. Their clients get the error request_cancelled at once.`} onClick=${() => decided(() => cancel(requests))} />
    <//>`,
  );
}
