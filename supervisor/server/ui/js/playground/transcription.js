// Speech to text, from a file or the microphone.

import { html, useEffect, useRef, useState } from "../../vendor/htm-preact.js";
import { send } from "../api.js";
import { duration, milliseconds, now } from "../format.js";
import { notify, state } from "../live.js";
import { copy, Icon, useWork } from "../parts.js";
import { Waiting } from "./playground.js";
import { record } from "./recording.js";

export function Transcription({ model, choice }) {
  const [language, setLanguage] = useState("");
  const [file, setFile] = useState(null);
  const [since, setSince] = useState(null); // of the recording under way
  const [result, setResult] = useState(null);
  const finish = useRef(null);
  useEffect(() => () => finish.current?.(), []);
  const [transcribe, busy, stop] = useWork(async (signal, sound) => {
    const began = performance.now();
    const body = new FormData();
    body.append("model", model);
    body.append("file", sound, sound.name);
    if (language.trim()) body.append("language", language.trim());
    const answer = await (await send("POST", "/v1/audio/transcriptions", { body, signal })).json();
    setResult({ text: answer.text ?? "", took: performance.now() - began });
  });
  const take = (sound) => {
    if (!sound) return;
    setFile(sound);
    setResult(null);
    transcribe(sound);
  };
  const toggle = async () => {
    try {
      if (finish.current) {
        const end = finish.current;
        finish.current = null;
        setSince(null);
        take(await end());
      } else {
        finish.current = await record();
        setSince(now());
      }
    } catch (error) {
      notify(error.message, "bad");
    }
  };
  const dropped = (event) => {
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  };
  return html`<div class="stack" onDragOver=${(event) => event.preventDefault()} onDrop=${dropped}>
    <div class="fields">
      ${choice}
      <label>Language<input placeholder="detect" maxlength="10" value=${language} onInput=${(event) => setLanguage(event.target.value)} /></label>
      <label>File<input type="file" accept="audio/*,video/*" onChange=${(event) => take(event.target.files[0])} /></label>
    </div>
    <div class="buttons start">
      <button type="button" class=${since ? "danger" : "primary"} disabled=${busy} aria-pressed=${since !== null} onClick=${toggle}><${Icon} name=${since ? "stop" : "mic"} />${since ? `Stop and transcribe (${duration(state.at - since)})` : "Record"}</button>
      ${busy && html`<button type="button" onClick=${stop}>Stop</button>`}
      ${!busy && result && file && html`<button type="button" onClick=${() => transcribe(file)}>Again</button>`}
    </div>
    ${busy && html`<${Waiting} model=${model} />`}
    ${result && !busy && html`<div class="transcript"><p role="group" tabindex="0" aria-label="Transcript">${result.text || "(nothing was heard)"}</p>
      <button class="quiet square" aria-label="Copy the transcript" onClick=${() => copy(result.text)}><${Icon} name="copy" /></button></div>
      <small class="num">${file.name} · ${milliseconds(result.took)}</small>`}
  </div>`;
}
