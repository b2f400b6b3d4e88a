// Text to image. Models that can show an unfinished picture do so.

import { html, useState } from "../../vendor/htm-preact.js";
import { ApiError, events, send } from "../api.js";
import { milliseconds } from "../format.js";
import { Select, useWork } from "../parts.js";
import { Waiting } from "./playground.js";

const SIZES = ["auto", "512x512", "768x768", "1024x1024", "1024x768", "768x1024"];
const IN_STREAM = { stream: true, partial_images: 3 };

/** Ask for pictures; `show(urls, partial)` gets the finished pictures, and perhaps an unfinished one. */
async function draw(body, options, show) {
  const response = await send("POST", "/v1/images/generations", { ...options, body });
  if (!response.headers.get("content-type")?.startsWith("text/event-stream")) {
    const { data } = await response.json();
    return show(data.map((image) => image.url ?? `data:image/png;base64,${image.b64_json}`));
  }
  const made = [];
  for await (const { data } of events(response)) {
    if (data === "[DONE]") continue;
    const { error, type, b64_json, output_format = "png" } = JSON.parse(data);
    if (error) throw new ApiError(error.message, error.type === "invalid_request_error" ? 400 : 0, error.code);
    const url = `data:image/${output_format};base64,${b64_json}`;
    if (type.endsWith(".completed")) made.push(url);
    show([...made], type.endsWith(".partial_image") ? url : null);
  }
}

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
    setResult(null);
    const options = { signal, headers: { "x-request-id": id } };
    const show = (urls, partial = null) => setResult({ prompt, urls, partial, took: performance.now() - began });
    await draw({ ...body, ...IN_STREAM }, options, show).catch((error) => {
      if (error.status !== 400) throw error;
      return draw(body, options, show); // not every model can be asked for a stream
    });
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
    ${result && html`<div class="pictures" aria-busy=${busy}>${result.urls.map((url, index) => html`<a href=${url} download=${`image-${index + 1}.png`} title="Save"><img src=${url} alt=${result.prompt} /></a>`)}${busy && result.partial && html`<img class="partial" src=${result.partial} alt="What there is so far" />`}</div>`}
    ${result?.urls.length > 0 && !busy && html`<small class="num">${milliseconds(result.took)}</small>`}
  </form>`;
}
