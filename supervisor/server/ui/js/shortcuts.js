// Keyboard shortcuts. Single keys, and only while nothing is being typed and no dialog is open.

import { html, useEffect } from "../vendor/htm-preact.js";
import { Dialog } from "./parts.js";

const TYPING = "input:not([type=checkbox]):not([type=radio]):not([type=file]), textarea, select, [contenteditable]";

/** Call `table[key]` on its key press; returns what ends that. */
export function listen(table) {
  const pressed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.(TYPING)) return;
    if (document.querySelector("dialog[open]")) return;
    const action = Object.hasOwn(table, event.key) ? table[event.key] : null;
    if (!action) return;
    event.preventDefault();
    action(event);
  };
  addEventListener("keydown", pressed);
  return () => removeEventListener("keydown", pressed);
}

/** `listen` for as long as the component is shown. */
export function useShortcuts(table) {
  useEffect(() => listen(table));
}

const HELP = [
  ["1 – 8", "Overview, playground, requests, usage, decisions, connect, configuration, daemon"],
  ["j  k", "Next, previous model"],
  ["Enter", "Details of the model: why, log, definition"],
  ["l", "Load it"],
  ["u", "Unload it"],
  ["p", "Pin or unpin it"],
  ["/", "Filter the models"],
  ["t", "Theme: as the system, light, dark"],
  ["Esc", "Close a dialog"],
  ["?", "This help"],
];

export const HelpDialog = ({ onClose }) => html`<${Dialog} title="Keyboard shortcuts" className="narrow" onClose=${onClose}>
  <dl class="keys">
    ${HELP.map(([keys, text]) => html`<dt>${keys.split("  ").map((name) => html`<kbd>${name}</kbd> `)}</dt><dd>${text}</dd>`)}
  </dl>
<//>`;
