// Taking a model out of the configuration, with its files where the operator wants that: it lists first the things that go.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { answerOf, call } from "./api.js";
import { WhyLocked, WhyNotSaved } from "./edit-parts.js";
import { mib, plural } from "./format.js";
import { Dialog, Empty, useWork } from "./parts.js";
import { checkEdit, saveEdit } from "./operations.js";
import { go } from "./route.js";
import { ask, notify } from "./state.js";

const close = () => ask(null);

function Remove({ name, etag, again }) {
  const [checked, setChecked] = useState(null);
  const [files, setFiles] = useState(false);
  const [trouble, setTrouble] = useState(null);
  useEffect(() => void answerOf(checkEdit(), { body: { model: name, remove: true } }).then(setChecked, setTrouble), []);
  const [remove, removing] = useWork(async (signal) => {
    try {
      await call(saveEdit(), { body: { model: name, remove: true, files }, signal, headers: { "if-match": etag } });
    } catch (error) {
      if (error.status === 401 || error.name === "AbortError") throw error;
      setTrouble(error);
      return;
    }
    close();
    go("");
    notify(`${name} is taken out.`);
  });
  const stops = checked?.difference?.stops ?? [];
  const found = checked?.files;
  return html`<${Dialog} title=${`Take out ${name}`} className="narrow" onClose=${close}>
    ${trouble ? html`<${trouble.code === "insufficient_scope" ? WhyLocked : WhyNotSaved} error=${trouble} onAgain=${() => (close(), again())} />` : !checked && html`<${Empty}>Asking…<//>`}
    ${checked?.marks.map(({ key, message }) => html`<p class="problem" role="alert">${key && `${key}: `}${message}</p>`)}
    ${checked && checked.marks.length === 0 && html`<p>It leaves the configuration${stops.length ? `, and its worker ends after ${plural(stops[0].in_flight, "running request")}` : ""}. The last version can be taken back on the page Configuration.</p>
      ${found?.names.length > 0 && html`<label class="check"><input type="checkbox" checked=${files} onChange=${(event) => setFiles(event.target.checked)} />Delete its files, too: ${plural(found.names.length, "file")}, ${mib(found.bytes / (1 << 20))}, in ${found.folder}</label>`}
      <div class="buttons"><button class="danger" disabled=${removing} onClick=${remove}>Take out</button></div>`}
  <//>`;
}

/** `etag`: of the file that the page shows; `again()` reads it again. */
export const askToRemove = (name, etag, again) => ask(() => html`<${Remove} name=${name} etag=${etag} again=${again} />`);
