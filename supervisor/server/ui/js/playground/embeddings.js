// Embeddings: how alike texts, and pictures, are, as the cosine between each two of them.

import { html, useState } from "../../vendor/htm-preact.js";
import { post } from "../api.js";
import { milliseconds } from "../format.js";
import { physical } from "../colours.js";
import { useWork } from "../parts.js";
import { asDataUrl } from "./files.js";
import { Waiting } from "./playground.js";

const EXAMPLE = "A cat sleeps on the sofa.\nThe kitten naps on the couch.\nInterest rates rose again.";

function cosine(left, right) {
  const dot = (one, other) => one.reduce((sum, value, index) => sum + value * other[index], 0);
  return dot(left, right) / (Math.sqrt(dot(left, left) * dot(right, right)) || 1);
}

export function Embeddings({ model, choice }) {
  const [text, setText] = useState(EXAMPLE);
  const [pictures, setPictures] = useState([]); // as data: URLs
  const [result, setResult] = useState(null);
  const sees = physical(model)?.type === "vision";
  const [compare, busy, stop] = useWork(async (signal) => {
    const began = performance.now();
    const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
    const input = [...lines, ...pictures.map((url) => ({ type: "image_url", image_url: { url } }))];
    const { data } = await post("/v1/embeddings", { model, input, encoding_format: "float" }, { signal });
    const vectors = data.sort((left, right) => left.index - right.index).map(({ embedding }) => embedding);
    if (vectors.length !== input.length) throw new Error(`${input.length} inputs were sent and ${vectors.length} vectors came back.`);
    const table = vectors.map((left) => vectors.map((right) => cosine(left, right)));
    setResult({ lines, pictures, table, size: vectors[0].length, took: performance.now() - began });
  });
  const attach = async (files) => {
    const urls = await Promise.all([...files].map(asDataUrl));
    setPictures((kept) => [...kept, ...urls]);
  };
  const inputOf = (index) => (index < result.lines.length ? result.lines[index] : html`<img src=${result.pictures[index - result.lines.length]} alt=${`Picture ${index + 1 - result.lines.length}`} />`);
  const shade = (value) => ({ background: `color-mix(in oklab, var(--accent) ${Math.round(Math.max(0, value) * 55)}%, var(--panel))` });
  return html`<form class="stack" onSubmit=${(event) => (event.preventDefault(), compare())}>
    <div class="fields">${choice}</div>
    <label>Texts, one per line<textarea rows="5" required=${pictures.length === 0} value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    ${sees && html`<label>Pictures<input type="file" accept="image/*" multiple onChange=${(event) => (attach(event.target.files), (event.target.value = ""))} /></label>
      ${pictures.length > 0 && html`<div class="attached">${pictures.map((url, index) => html`<button type="button" aria-label=${`Remove picture ${index + 1}`} title="Remove" onClick=${() => setPictures(pictures.filter((_, at) => at !== index))}><img src=${url} alt="" /></button>`)}</div>`}`}
    <div class="buttons">${busy ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button class="primary" type="submit">Compare</button>`}</div>
    ${busy && html`<${Waiting} model=${model} />`}
    ${result && !busy && html`<div class="scroll" tabindex="0" role="region" aria-label="Similarity">
      <table class="similarity num">
        <thead><tr><td /><td />${result.table.map((_, index) => html`<th scope="col">${index + 1}</th>`)}</tr></thead>
        <tbody>${result.table.map((row, index) => html`<tr><th scope="row">${index + 1}</th><td class="line">${inputOf(index)}</td>${row.map((value) => html`<td style=${shade(value)}>${value.toFixed(3)}</td>`)}</tr>`)}</tbody>
      </table></div>
      <small class="num">${result.size} dimensions · ${milliseconds(result.took)}</small>`}
  </form>`;
}
