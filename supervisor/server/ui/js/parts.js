// Small pieces that several views share.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { notify } from "./state.js";

const ICONS = {
  pin: "M10 2l4 4-2.5 1L9 10.5 8.5 13 3 7.5 5.5 7 9 4.5z M5.5 10.5L2 14",
  gear: "M8 5.8a2.2 2.2 0 1 0 0 4.4 2.2 2.2 0 0 0 0-4.4 M8 1.5v2 M8 12.5v2 M1.5 8h2 M12.5 8h2 M3.4 3.4l1.4 1.4 M11.2 11.2l1.4 1.4 M3.4 12.6l1.4-1.4 M11.2 4.8l1.4-1.4",
  copy: "M5.5 5.5V2.5h8v8h-3 M2.5 5.5h8v8h-8z",
  close: "M3.5 3.5l9 9 M12.5 3.5l-9 9",
  image: "M2.5 3h11v10h-11z M2.5 11l3.5-3.5 2.5 2.5 2-2 3 3 M10.5 6h.01",
  stop: "M4 4h8v8H4z",
  mic: "M8 2a2 2 0 0 1 2 2v3.5a2 2 0 0 1-4 0V4a2 2 0 0 1 2-2z M3.5 7.5a4.5 4.5 0 0 0 9 0 M8 12v2.5",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6z M8 1v1.5 M8 13.5V15 M1 8h1.5 M13.5 8H15 M3 3l1 1 M12 12l1 1 M3 13l1-1 M12 4l1-1",
  moon: "M13.5 9.5A6 6 0 0 1 6.5 2.5a6 6 0 1 0 7 7z",
  auto: "M8 2a6 6 0 1 0 0 12z M8 2a6 6 0 0 1 0 12",
  help: "M5.5 6a2.5 2.5 0 1 1 3.5 2.3c-.7.3-1 .8-1 1.700 M8 12.5h.01",
};

export const Icon = ({ name }) =>
  html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;

let dialogCount = 0;

/** A modal dialog that closes by Escape, by its cross and by a click beside it; without `onClose` it stays. Focus returns to
 * where it was. */
export function Dialog({ title, className = "", onClose, children }) {
  const element = useRef(null);
  const id = useRef(null);
  id.current ??= `dialog-${++dialogCount}`;
  useEffect(() => {
    const dialog = element.current;
    dialog.showModal();
    return () => {
      dialog.close(); // gives the focus back, as long as it is still there
      const focused = document.activeElement;
      if (focused === document.body || dialog.contains(focused)) document.getElementById("main").focus();
    };
  }, []);
  // A browser lets a page refuse Escape only once: the next one closes the dialog, whatever `cancel` says.
  const closed = () => {
    if (!element.current || element.current.open) return;
    if (onClose) onClose();
    else element.current.showModal();
  };
  return html`<dialog
    ref=${element}
    class=${className}
    aria-labelledby=${id.current}
    onCancel=${(event) => event.target === element.current && (event.preventDefault(), onClose?.())}
    onClose=${closed}
    onClick=${(event) => event.target === element.current && onClose?.()}
  >
    <div class="dialog-body">
      <header>
        <h2 id=${id.current}>${title}</h2>
        ${onClose && html`<button class="quiet square" aria-label="Close" onClick=${onClose}><${Icon} name="close" /></button>`}
      </header>
      ${children}
    </div>
  </dialog>`;
}

/** A labelled choice; each of `options` is a text, or `[value, text]`. */
export const Select = ({ label, value, options, onChange }) => html`<label>${label}
  <select value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${options.map((option) => {
      const [name, text] = Array.isArray(option) ? option : [option, option];
      return html`<option key=${name} value=${name} selected=${name === value}>${text}</option>`;
    })}
  </select>
</label>`;

/** Copy where the browser allows it; on plain http to another machine it does not, and the old way is left. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = Object.assign(document.createElement("textarea"), { value: text });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  notify("Copied.");
}

export function Snippet({ label, text, shown = text }) {
  return html`<div class="snippet">
    <pre role="group" tabindex="0" aria-label=${label}>${shown}</pre>
    <button class="quiet square" aria-label=${`Copy ${label}`} title="Copy" onClick=${() => copy(text)}><${Icon} name="copy" /></button>
  </div>`;
}

/** What `work(signal)` does while a button waits for it: `[run, busy, stop]`. Errors become notices unless they are handled. */
export function useWork(work) {
  const [busy, setBusy] = useState(false);
  const controller = useRef(null);
  useEffect(() => () => controller.current?.abort(), []);
  const run = async (...given) => {
    controller.current?.abort();
    const mine = (controller.current = new AbortController());
    setBusy(true);
    try {
      await work(mine.signal, ...given);
    } catch (error) {
      if (error.name !== "AbortError") notify(error.message, "bad");
    } finally {
      if (controller.current === mine) setBusy(false);
    }
  };
  return [run, busy, () => controller.current?.abort()];
}

/** The daemon's warnings about a model's memory. */
export const Warnings = ({ texts }) => texts.length > 0 && html`<ul class="warnings" aria-label="Memory warnings">${texts.map((text) => html`<li>${text}</li>`)}</ul>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;
