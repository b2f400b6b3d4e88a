// Text to speech: what POST /v1/audio/speech answers, to hear and to keep.

import { html, useEffect, useState } from "../../vendor/htm-preact.js";
import { send } from "../api.js";
import { milliseconds } from "../format.js";
import { Select, useWork } from "../parts.js";
import { useAnswer } from "../read.js";
import { Waiting } from "./playground.js";

const FORMATS = ["mp3", "wav", "opus", "flac", "aac"];

/** Voices that this model's worker names, where it does. */
function useVoices(model) {
  const [voices, setVoices] = useState([]);
  useAnswer(
    `/v1/audio/voices?model=${encodeURIComponent(model)}`,
    (answer) => setVoices((answer.voices ?? answer.data ?? []).map((voice) => voice.id ?? voice.name ?? voice)),
    () => setVoices([]),
  );
  return voices;
}

export function Speech({ model, choice }) {
  const voices = useVoices(model);
  const [text, setText] = useState("The quick brown fox jumps over the lazy dog.");
  const [voice, setVoice] = useState("");
  const [format, setFormat] = useState("mp3");
  const [speed, setSpeed] = useState("");
  const [result, setResult] = useState(null);
  useEffect(() => () => result && URL.revokeObjectURL(result.url), [result]);
  const [speak, busy, stop] = useWork(async (signal) => {
    const began = performance.now();
    const body = { model, input: text, voice: voice || "default", response_format: format };
    if (speed !== "") body.speed = Number(speed);
    const blob = await (await send("POST", "/v1/audio/speech", { body, signal })).blob();
    setResult({ url: URL.createObjectURL(blob), format, took: performance.now() - began, size: blob.size });
  });
  return html`<form class="stack" onSubmit=${(event) => (event.preventDefault(), speak())}>
    <div class="fields">
      ${choice}
      <label>Voice<input list="voices" placeholder="default" value=${voice} onInput=${(event) => setVoice(event.target.value)} /></label>
      <datalist id="voices">${voices.map((name) => html`<option value=${name} />`)}</datalist>
      <${Select} label="Format" value=${format} options=${FORMATS} onChange=${setFormat} />
      <label>Speed<input type="number" min="0.25" max="4" step="0.05" placeholder="1" value=${speed} onInput=${(event) => setSpeed(event.target.value)} /></label>
    </div>
    <label>Text<textarea rows="4" required value=${text} onInput=${(event) => setText(event.target.value)} /></label>
    <div class="buttons">${busy ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button class="primary" type="submit">Speak</button>`}</div>
    ${busy && html`<${Waiting} model=${model} />`}
    ${result && !busy && html`<div class="result"><audio controls autoplay src=${result.url} /><a href=${result.url} download=${`speech.${result.format}`}>Save</a><small class="num">${milliseconds(result.took)} · ${Math.ceil(result.size / 1024)} KiB</small></div>`}
  </form>`;
}
