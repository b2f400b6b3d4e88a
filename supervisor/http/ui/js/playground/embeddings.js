// Embeddings: how alike texts are, as the cosine between each two of them.

import { html, useState } from "../../vendor/htm-preact.js";
import { post } from "../api.js";
import { milliseconds } from "../format.js";
import { useWork } from "../parts.js";
import { Waiting } from "./playground.js";

const EXAMPLE = "A cat sleeps on the sofa.\nThe kitten naps on the couch.\nInterest rates rose again.";

function cosine(left, right) {
  const dot = (one, other) => one.reduce((sum, value, index) => sum + value * other[index], 0);
  return dot(left, right) / (Math.sqrt(dot(left, left) * dot(right, right)) || 1);
}

export function Embeddings({ model, choice }) {
  const [text, setText] = useState(EXAMPLE);
  const [result, setResult] = useState(null);
  const [compare, busy, stop] = useWork(async (signal) => {
    const began = performance.now();
    const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
    const { data } = await post("/v1/embeddings", { model, input: lines, encoding_format: "float" }, { signal });
    const vectors = data.sort((left, right) => left.index - right.index).map(({ embedding }) => embedding);
    if (vectors.length !== lines.length) throw new Error(`${lines.length} texts were sent and ${vectors.length} vectors came back.`);
    const table = vectors.map((left) => vectors.map((right) => cosine(left, right)));
    setResult({ lines, table, size: vectors[0].length, took: performance.now() - began });
  });
  const shade = (value) => ({ background: `color-mix(in oklab, var(--accent) ${Math.round(Math.max(0, value) * 55)}%, var(--panel))` });
  return html`<form class="stack" onSubmit=${(event) => (event.preventDefault(), compare())}>
    <div class="fields">${choice}</div>
    <label>Texts, one per line<textarea rows="5" required value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    <div class="buttons">${busy ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button class="primary" type="submit">Compare</button>`}</div>
    ${busy && html`<${Waiting} model=${model} />`}
    ${result && !busy && html`<div class="scroll" tabindex="0" role="region" aria-label="Similarity">
      <table class="similarity num">
        <thead><tr><td /><td />${result.lines.map((_, index) => html`<th scope="col">${index + 1}</th>`)}</tr></thead>
        <tbody>${result.table.map((row, index) => html`<tr><th scope="row">${index + 1}</th><td class="line">${result.lines[index]}</td>${row.map((value) => html`<td style=${shade(value)}>${value.toFixed(3)}</td>`)}</tr>`)}</tbody>
      </table></div>
      <small class="num">${result.size} dimensions · ${milliseconds(result.took)}</small>`}
  </form>`;
}
