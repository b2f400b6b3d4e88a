// What each key used on each day, as a table and as CSV.

import { html, useState } from "../vendor/htm-preact.js";
import { call } from "./api.js";
import { duration } from "./format.js";
import { readUsage } from "./operations.js";
import { Empty, useWork } from "./parts.js";
import { useAnswer } from "./read.js";
import { notify, state } from "./state.js";

const DAYS = 30;
const FIGURES = [
  ["requests", "Requests"],
  ["failed", "Failed"],
  ["prompt_tokens", "Tokens in"],
  ["cached_tokens", "of these cached"],
  ["completion_tokens", "Tokens out"],
  ["gpu_s", "GPU time"],
];

const number = new Intl.NumberFormat();
const day = (back) => {
  const at = new Date();
  at.setDate(at.getDate() - back);
  return `${at.getFullYear()}-${String(at.getMonth() + 1).padStart(2, "0")}-${String(at.getDate()).padStart(2, "0")}`;
};
const shown = (name, value) => (name === "gpu_s" ? (value ? duration(value) : "–") : number.format(value));
const totalOf = (rows) => Object.fromEntries(FIGURES.map(([name]) => [name, rows.reduce((sum, row) => sum + row[name], 0)]));

const Figures = ({ row }) => FIGURES.map(([name, title]) => html`<td key=${name} class="num" data-label=${title}>${shown(name, row[name])}</td>`);

/** Hand a text to the browser as a file. */
function save(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export function UsagePage() {
  const [from, setFrom] = useState(day(DAYS - 1));
  const [to, setTo] = useState(day(0));
  const [byModel, setByModel] = useState(false);
  const [rows, setRows] = useState(null);
  const query = { from, to, by_model: byModel };
  useAnswer(from && to ? readUsage(query) : null, ({ data }) => setRows(data.reverse()), (error) => error.status === 401 || notify(error.message, "bad"), [state.link]);
  const [download, busy] = useWork(async (signal) => save(await (await call(readUsage({ ...query, format: "csv" }), { signal })).text(), `llmux-usage-${from}-${to}.csv`));
  return html`<section class="panel" aria-labelledby="usage-title">
    <div class="title"><h1 id="usage-title">Usage</h1><button disabled=${busy || !rows?.length} onClick=${download}>Download as CSV</button></div>
    <div class="filters">
      <label>From<input type="date" value=${from} max=${to} onInput=${(event) => setFrom(event.target.value)} /></label>
      <label>To<input type="date" value=${to} min=${from} onInput=${(event) => setTo(event.target.value)} /></label>
      <label class="check"><input type="checkbox" checked=${byModel} onChange=${(event) => setByModel(event.target.checked)} />By model</label>
    </div>
    ${rows?.length > 0 && html`<div class="scrolls"><table class="listing usage-table">
      <thead><tr><th>Day</th><th>Key</th>${byModel && html`<th>Model</th>`}${FIGURES.map(([, title]) => html`<th class="num">${title}</th>`)}</tr></thead>
      <tbody>
        <tr class="sum"><th scope="row">Total</th><td />${byModel && html`<td />`}<${Figures} row=${totalOf(rows)} /></tr>
        ${rows.map((row) => html`<tr key=${`${row.day} ${row.key_id} ${row.model}`}><th scope="row">${row.day}</th><td>${row.key}</td>${byModel && html`<td>${row.model ?? "no model"}</td>`}<${Figures} row=${row} /></tr>`)}
      </tbody>
    </table></div>`}
    ${rows?.length === 0 && html`<${Empty}>Nothing was used on these days.<//>`}
    <p class="hint">Days are those of the daemon's clock. A GPU second is one second of one GPU during which a worker had the request; requests that it computes together count each as if alone.</p>
  </section>`;
}
