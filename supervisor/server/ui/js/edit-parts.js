// What the forms and the text of the configuration share: a difference, and why nothing can be saved.

import { html } from "../vendor/htm-preact.js";
import { Snippet } from "./parts.js";

const KEY_COMMAND = "llmux keys add me --scope inference --scope admin --scope configure";
const TONES = { "+": "added", "-": "removed", "@": "place" };

/** A unified difference. */
export const Diff = ({ text }) => html`<pre class="diff" role="group" tabindex="0" aria-label="Difference">${text.split("\n").map((line, index) => html`<span key=${index} class=${TONES[line[0]] ?? ""}>${line}${"\n"}</span>`)}</pre>`;

/** What a difference adds. */
export const addedLines = (text) =>
  text
    .split("\n")
    .filter((line) => line.startsWith("+"))
    .map((line) => line.slice(1))
    .join("\n");

/** Why this page may not look at the configuration, and what to do. */
export const WhyLocked = ({ error }) =>
  error.code === "insufficient_scope"
    ? html`<div class="stack"><p class="hint">To save changes, the page needs a key with the scope <code>configure</code>. On the machine of the daemon:</p><${Snippet} label="command for a key that edits" text=${KEY_COMMAND} /></div>`
    : html`<p class="problem" role="alert">${error.message}</p>`;

/** Somebody else has changed the file: nothing can be saved before the operator has it read again. */
export const isOvertaken = (error) => error?.code === "configuration_changed";

/** What a check leaves of the trouble before it. */
export const afterCheck = (error) => (before) => (isOvertaken(before) ? before : error);

/** Why a change wasn't saved. `onAgain` reads the file again. */
export function WhyNotSaved({ error, onAgain }) {
  const lines = error.detail?.join("\n");
  return html`<div class="stack" role="alert">
    <p class="problem">${error.message}</p>
    ${lines && html`<${Snippet} label="lines to enter" text=${lines} />`}
    ${isOvertaken(error) && onAgain && html`<div class="buttons start"><button type="button" onClick=${onAgain}>Read it again</button></div>`}
  </div>`;
}
