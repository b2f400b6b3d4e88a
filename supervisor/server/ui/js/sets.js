// One switch for the pins and default models: as configured, or one of the named sets.

import { html } from "../vendor/htm-preact.js";
import { call } from "./api.js";
import { listSets, switchSet } from "./operations.js";
import { useWork } from "./parts.js";
import { useRead } from "./read.js";
import { notify } from "./state.js";

const meaning = ({ description, default_models: defaults, pin }) =>
  [description, defaults.length && `comes back: ${defaults.join(", ")}`, pin.length ? `pinned: ${pin.join(", ")}` : "nothing pinned"].filter(Boolean).join("; ");

export function Sets() {
  const [answer, read] = useRead(listSets());
  const [choose, busy] = useWork(async (signal, active) => {
    await call(switchSet(), { body: { active }, signal });
    notify(active === null ? "Pins and default models are as configured." : `${active} is switched on.`);
    await read();
  });
  if (!answer?.data.length) return null;
  const active = answer.data.find((set) => set.active) ?? null;
  const choices = [{ name: "As configured", value: null }, ...answer.data.map((set) => ({ ...set, value: set.name }))];
  return html`<fieldset class="sets" disabled=${busy}>
    <legend>Set</legend>
    ${choices.map(
      (set) => html`<label key=${set.name} title=${set.value === null ? "Pins and default models of the configuration" : meaning(set)}><input type="radio" name="set" checked=${set.value === (active?.name ?? null)} onChange=${() => choose(set.value)} />${set.name}</label>`,
    )}
    ${active && html`<small>${meaning(active)}</small>`}
  </fieldset>`;
}
