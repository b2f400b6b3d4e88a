// Tools of a chat: their definitions as JSON, the model's calls, and the results that a person gives.

import { html, useState } from "../../vendor/htm-preact.js";

export const EXAMPLE = JSON.stringify(
  [{ type: "function", function: { name: "get_weather", description: "The weather of a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }],
  null,
  2,
);

/** The tools of this text; none of an empty one. Throws an Error with the reason. */
export function parsedTools(text) {
  if (!text.trim()) return [];
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not valid JSON: ${error.message}`);
  }
  if (!Array.isArray(found)) throw new Error("The tools must be a list.");
  return found;
}

/** Add a piece of a stream's `tool_calls` to the calls so far. */
export function grown(calls, pieces) {
  const all = calls.map((call) => ({ ...call }));
  for (const { index = 0, id, function: part = {} } of pieces) {
    all[index] ??= { id: "", name: "", arguments: "" };
    if (id) all[index].id = id;
    all[index].name += part.name ?? "";
    all[index].arguments += part.arguments ?? "";
  }
  return all;
}

export function ToolEditor({ text, onInput }) {
  let problem = null;
  try {
    parsedTools(text);
  } catch (error) {
    problem = error.message;
  }
  return html`<details class="tools">
    <summary>Tools${text.trim() && !problem ? ` (${parsedTools(text).length})` : ""}</summary>
    <div class="stack">
      <label>Definitions, as JSON<textarea rows="8" spellcheck="false" value=${text} onInput=${(event) => onInput(event.target.value)} /></label>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <div class="buttons start"><button type="button" class="small" onClick=${() => onInput(EXAMPLE)}>Example</button><button type="button" class="small" disabled=${!text} onClick=${() => onInput("")}>None</button></div>
    </div>
  </details>`;
}

/** What the model wants called; `onResults(texts)` gets a result for each, and may be missing. */
export function Calls({ calls, onResults }) {
  const [results, setResults] = useState(calls.map(() => ""));
  const send = (event) => {
    event.preventDefault();
    onResults(calls.map((_, index) => results[index] ?? ""));
  };
  return html`<form class="calls stack" onSubmit=${send}>
    ${calls.map(
      (call, index) => html`<div class="call"><code>${call.name}(${call.arguments})</code>
        ${onResults && html`<label>Result of ${call.name}<textarea rows="2" required value=${results[index] ?? ""} onInput=${(event) => setResults(calls.map((_, at) => (at === index ? event.target.value : (results[at] ?? ""))))} /></label>`}</div>`,
    )}
    ${onResults && html`<div class="buttons start"><button type="submit">Go on</button></div>`}
  </form>`;
}
