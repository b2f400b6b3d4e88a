// Asks for the API key, once: when the daemon has keys configured and this browser has none that it takes.

import { html, useState } from "../vendor/htm-preact.js";
import { key } from "./api.js";
import { start, state } from "./live.js";
import { Dialog } from "./parts.js";

export function KeyDialog() {
  const [value, setValue] = useState("");
  const [remember, setRemember] = useState(key.isRemembered());
  const submit = (event) => {
    event.preventDefault();
    key.set(value.trim(), remember);
    start();
  };
  return html`<${Dialog} title="API key" className="narrow">
    <form class="stack" onSubmit=${submit}>
      <p>This daemon has keys. The dashboard needs one with the scope <code>admin</code>, and <code>inference</code> for the playground.</p>
      ${state.trouble && html`<p class="problem" role="alert">${state.trouble}</p>`}
      <label>Key
        <input type="password" autocomplete="current-password" spellcheck="false" required autofocus value=${value} onInput=${(event) => setValue(event.target.value)} />
      </label>
      <label class="check"><input type="checkbox" checked=${remember} onChange=${(event) => setRemember(event.target.checked)} />Remember it in this browser</label>
      <p class="hint">Otherwise it is forgotten with this tab. A new one: <code>llmux keys add NAME --scope admin --scope inference</code></p>
      <div class="buttons"><button class="primary" type="submit">Continue</button></div>
    </form>
  <//>`;
}
