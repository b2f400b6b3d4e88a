// Adding a model: paste its name or address, see its files and which of them fit, fetch it, and use it.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { load } from "./actions.js";
import { answerOf, call } from "./api.js";
import { WhyLocked, WhyNotSaved } from "./edit-parts.js";
import { duration, mib, plural } from "./format.js";
import { Dialog, useWork } from "./parts.js";
import { addModel, cancelAddition, listAdditions, lookUpModel } from "./operations.js";
import { href } from "./route.js";
import { ask, notify, state } from "./state.js";

const AGAIN_MS = 1000;

const size = (bytes) => mib(bytes / (1 << 20));
const isOver = ({ state: at }) => at !== "queued" && at !== "running";
const close = () => ask(null);

/** The models that are being added and those that were, read again while one is under way. `[additions, error, read]` */
function useAdditions() {
  const [additions, setAdditions] = useState([]);
  const [error, setError] = useState(null);
  const read = () => answerOf(listAdditions()).then(({ data }) => (setAdditions(data), setError(null)), setError);
  const isBusy = additions.some((addition) => !isOver(addition));
  useEffect(() => void read(), [state.link]);
  useEffect(() => {
    if (!isBusy) return;
    const timer = setInterval(read, AGAIN_MS);
    return () => clearInterval(timer);
  }, [isBusy]);
  return [additions, error, read];
}

function progressText({ state: at, done_bytes: done, total_bytes: total, eta_s: eta, stage }) {
  if (at === "queued") return "waits for its turn";
  if (!total || done >= total) return stage || "looking";
  return `${size(done)} of ${size(total)}${eta === null ? "" : `, about ${duration(eta)} left`}`;
}

function Row({ addition, read }) {
  const { id, what, name, names, state: at, error, done_bytes: done, total_bytes: total } = addition;
  const cancel = () => call(cancelAddition(id)).then(read, (failed) => notify(failed.message, "bad"));
  return html`<li class=${at}>
    <p><b>${name ?? names[0] ?? what}</b> <small>${isOver(addition) ? at : progressText(addition)}</small></p>
    ${at === "running" && html`<progress max=${total || 1} value=${total ? done : null} aria-label=${`Progress of ${what}`} />`}
    ${error && html`<p class="problem">${error}</p>`}
    <div class="buttons start">
      ${!isOver(addition) && html`<button class="small" onClick=${cancel}>Cancel</button>`}
      ${at === "done" && names.map((added) => html`<button class="small" onClick=${() => (close(), load(added))}>Load ${added}</button>`)}
      ${at === "done" && html`<a href=${href("playground")} onClick=${close}>Try it in the playground</a>`}
    </div>
  </li>`;
}

/** A choice of quantisations, each with what it takes. */
const Variants = ({ found, chosen, onChosen }) => html`<div class="scrolls"><table class="listing">
  <thead><tr><td></td><th>Quantisation</th><th class="num">Size</th><th class="num">Takes</th><th>${found.device ? `Fits on ${found.device}` : "Fits"}</th></tr></thead>
  <tbody>${found.variants.map(
    ({ quantisation, reference, size_bytes: bytes, need_mib: need, fits }) => html`<tr key=${reference}>
      <td><input type="radio" name="variant" id=${`variant-${quantisation}`} checked=${reference === chosen} disabled=${!fits} onChange=${() => onChosen(reference)} /></td>
      <th scope="row"><label for=${`variant-${quantisation}`}>${quantisation}</label></th>
      <td class="num">${size(bytes)}</td><td class="num">${mib(need)}</td><td>${fits ? "yes" : "no"}</td>
    </tr>`,
  )}</tbody>
</table></div>`;

function Adding() {
  const [additions, refused, read] = useAdditions();
  const [what, setWhat] = useState("");
  const [name, setName] = useState("");
  const [found, setFound] = useState(null); // what the last look found
  const [chosen, setChosen] = useState("");
  const [trouble, setTrouble] = useState(null);
  const failed = (error) => {
    if (error.status === 401 || error.name === "AbortError") throw error;
    setTrouble(error);
  };
  const [look, looking, stop] = useWork(async (signal) => {
    setFound(null);
    setTrouble(null);
    const lookedUp = await answerOf(lookUpModel(), { body: { what }, signal }).catch(failed);
    if (!lookedUp) return;
    setFound(lookedUp);
    setChosen(lookedUp.variants.find(({ taken }) => taken)?.reference ?? what);
  });
  const [add, adding] = useWork(async (signal) => {
    setTrouble(null);
    const begun = await answerOf(addModel(), { body: { what: chosen, name: name.trim() || null }, signal }).catch(failed);
    if (!begun) return;
    setFound(null);
    setWhat("");
    setName("");
    await read();
  });
  if (refused) return html`<${Dialog} title="Add a model" onClose=${close}><${WhyLocked} error=${refused} /><//>`;
  return html`<${Dialog} title="Add a model" onClose=${close}>
    <form class="stack" onSubmit=${(event) => (event.preventDefault(), looking ? stop() : look())}>
      <label>A name of the hub, the address of its page, or a path on the machine of the daemon
        <input value=${what} required autofocus autocomplete="off" spellcheck="false" placeholder="ORG/REPO-GGUF" onInput=${(event) => (setWhat(event.target.value), setFound(null))} />
      </label>
      <div class="buttons">${looking && html`<span class="waiting" role="status">Looking what there is…</span>`}<button type="submit" class=${found ? "" : "primary"}>${looking ? "Stop" : "Look"}</button></div>
    </form>
    ${trouble && html`<${WhyNotSaved} error=${trouble} />`}
    ${found && html`<form class="stack" onSubmit=${(event) => (event.preventDefault(), add())}>
      ${!found.is_new && html`<p class="hint" role="status">It is configured already, as ${found.names.join(", ")}.</p>`}
      ${found.variants.length > 0 && html`<${Variants} found=${found} chosen=${chosen} onChosen=${setChosen} />`}
      ${found.why && html`<p class="hint">${found.why}</p>`}
      ${found.variants.length === 0 && found.is_new && html`<p>${plural(found.names.length, "model")}: ${found.names.join(", ")}</p>`}
      ${found.problems.map((problem) => html`<p class="problem">${problem}</p>`)}
      ${found.is_new && found.names.length === 1 && html`<label>Name for clients <input value=${name} autocomplete="off" spellcheck="false" placeholder=${found.names[0]} onInput=${(event) => setName(event.target.value)} /></label>`}
      ${found.is_new && html`<div class="buttons"><button class="primary" type="submit" disabled=${adding}>Add</button></div>`}
    </form>`}
    ${additions.length > 0 && html`<section aria-label="Additions"><h3>Additions</h3><ul class="additions">${additions.map((addition) => html`<${Row} key=${addition.id} addition=${addition} read=${read} />`)}</ul></section>`}
  <//>`;
}

export const askToAdd = () => ask(() => html`<${Adding} />`);
