// Reranking: which texts answer a question best.

import { html, useState } from "../../vendor/htm-preact.js";
import { post } from "../api.js";
import { milliseconds } from "../format.js";
import { useWork } from "../parts.js";
import { Waiting } from "./playground.js";

const QUERY = "Which of these is a fruit?";
const DOCUMENTS = "An apple a day keeps the doctor away.\nA hammer drives nails.\nInterest rates rose again.";

export function Rerank({ model, choice }) {
  const [query, setQuery] = useState(QUERY);
  const [text, setText] = useState(DOCUMENTS);
  const [ranked, setRanked] = useState(null);
  const [rank, busy, stop] = useWork(async (signal) => {
    const began = performance.now();
    const documents = text.split("\n").map((line) => line.trim()).filter(Boolean);
    const { results } = await post("/v1/rerank", { model, query, documents }, { signal });
    const rows = results.map(({ index, relevance_score: score }) => ({ text: documents[index], score })).sort((left, right) => right.score - left.score);
    setRanked({ rows, took: performance.now() - began });
  });
  return html`<form class="stack" onSubmit=${(event) => (event.preventDefault(), rank())}>
    <div class="fields">${choice}</div>
    <label>Question<input required value=${query} onInput=${(event) => setQuery(event.target.value)} /></label>
    <label>Documents, one per line<textarea rows="5" required value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    <div class="buttons">${busy ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button class="primary" type="submit">Rank</button>`}</div>
    ${busy && html`<${Waiting} model=${model} />`}
    ${ranked && !busy && html`<ol class="ranked" aria-label="Ranked documents">${ranked.rows.map((row) => html`<li><b class="num">${row.score.toFixed(3)}</b> ${row.text}</li>`)}</ol>
      <small class="num">${milliseconds(ranked.took)}</small>`}
  </form>`;
}
