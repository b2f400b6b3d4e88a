// Text to image.

import { html, useState } from "../../vendor/htm-preact.js";
import { post } from "../api.js";
import { milliseconds } from "../format.js";
import { Select, useWork } from "../parts.js";
import { Waiting } from "./playground.js";

const SIZES = ["auto", "512x512", "768x768", "1024x1024", "1024x768", "768x1024"];

export function Images({ model, choice }) {
  const [prompt, setPrompt] = useState("A lighthouse above a calm sea at dawn");
  const [size, setSize] = useState(SIZES[1]);
  const [count, setCount] = useState("1");
  const [result, setResult] = useState(null);
  const [request, setRequest] = useState(null);
  const [make, busy, stop] = useWork(async (signal) => {
    const began = performance.now();
    const body = { model, prompt, size, n: Number(count), response_format: "b64_json" };
    const id = `pictures-${Math.random().toString(36).slice(2)}`;
    setRequest(id);
    const { data } = await post("/v1/images/generations", body, { signal, headers: { "x-request-id": id } });
    setResult({ prompt, urls: data.map((image) => image.url ?? `data:image/png;base64,${image.b64_json}`), took: performance.now() - began });
  });
  return html`<form class="stack" onSubmit=${(event) => (event.preventDefault(), make())}>
    <div class="fields">
      ${choice}
      <${Select} label="Size" value=${size} options=${SIZES} onChange=${setSize} />
      <label>Number<input type="number" min="1" max="4" required value=${count} onInput=${(event) => setCount(event.target.value)} /></label>
    </div>
    <label>Prompt<textarea rows="3" required value=${prompt} onInput=${(event) => setPrompt(event.target.value)} /></label>
    <div class="buttons">${busy ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button class="primary" type="submit">Make</button>`}</div>
    ${busy && html`<${Waiting} model=${model} request=${request} />`}
    ${result && !busy && html`<div class="pictures">${result.urls.map((url, index) => html`<a href=${url} download=${`image-${index + 1}.png`} title="Save"><img src=${url} alt=${result.prompt} /></a>`)}</div><small class="num">${milliseconds(result.took)}</small>`}
  </form>`;
}
