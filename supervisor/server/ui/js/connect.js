// Addresses, the key and settings, ready to copy for Open WebUI, agents, editors and the SDKs.

import { html, useState } from "../vendor/htm-preact.js";
import { address, key } from "./api.js";
import { physical } from "./colours.js";
import { start, state } from "./live.js";
import { Snippet } from "./parts.js";
import { useAnswer } from "./read.js";
import { snippets } from "./snippets.js";

const HIDDEN = "••••••••";
const CONTAINER_HOST = "host.docker.internal";
const FEEDBACK = '{"X-Llmux-Load-Feedback": "true"}';
// Open WebUI's own words for its fields.
const OTHERS = [
  { type: "asr", where: "Audio › Speech-to-Text", engine: "Speech-to-Text Engine", model: "STT Model" },
  { type: "tts", where: "Audio › Text-to-Speech", engine: "Text-to-Speech Engine", model: "TTS Model" },
  { type: "image", where: "Images", engine: "Image Generation Engine", model: "Model" },
  { type: "embedding", where: "Documents", engine: "Embedding Model Engine", model: "Embedding Model" },
];

function ofType(type) {
  const model = [...state.models.values()].find((found) => found.type === type);
  return model && (model.virtual_models[0] ?? model.name);
}

/** A model that fills gaps in code: another one than that for chats, where there is one. */
function fills() {
  const found = [...state.models.values()].filter(({ capabilities }) => capabilities?.endpoints?.includes("POST /infill"));
  return found.at(-1)?.name ?? null;
}

/** A voice that the model has. */
function useVoice(model) {
  const [voice, setVoice] = useState("default");
  useAnswer(model ? `/v1/audio/voices?model=${encodeURIComponent(model)}` : null, ({ voices }) => voices.length && setVoice(voices[0].id));
  return voice;
}

const Settings = ({ rows }) => html`<dl class="settings">
  ${rows.filter(([, text]) => text).map(([name, text, shown]) => html`<dt>${name}</dt><dd><${Snippet} label=${name} text=${text} shown=${shown ?? text} /></dd>`)}
</dl>`;

function KeyPanel({ shown, onShow }) {
  const secret = key.get();
  return html`<section class="panel" aria-labelledby="key-title">
    <h2 id="key-title">Key</h2>
    ${secret
      ? html`<p>This page uses the key below, ${key.isRemembered() ? "remembered in this browser" : "for this tab only"}. Give each client a key of its own with the scope <code>inference</code>:</p>
          <${Snippet} label="command for a new key" text="llmux keys add open-webui --scope inference" />
          <div class="buttons"><button onClick=${onShow}>${shown ? "Hide the key" : "Show the key in the settings"}</button><button class="danger" onClick=${() => (key.forget(), start())}>Forget the key</button></div>`
      : html`<p>No key was asked for: only this machine gets in, and clients may send any. To open llmux to others, make keys first:</p>
          <${Snippet} label="command for a new key" text="llmux keys add open-webui --scope inference" />`}
  </section>`;
}

export function Connect() {
  const [shown, setShown] = useState(false);
  const base = address("/v1");
  const secret = key.get() ?? "none";
  const visible = key.get() && !shown ? HIDDEN : secret;
  const chat = ofType("llm") ?? "MODEL";
  const voice = useVoice(ofType("tts"));
  const fromContainer = new URL(base);
  fromContainer.hostname = CONTAINER_HOST;
  const masked = (text) => (key.get() ? text.replaceAll(secret, visible) : text);
  const context = physical(chat)?.capabilities?.context ?? null;
  const all = snippets({ base, secret, chat: { name: chat, context }, fill: fills(), embed: ofType("embedding") ?? null });
  return html`<div class="connect">
    <h1 class="unseen">Connect</h1>
    <${KeyPanel} shown=${shown} onShow=${() => setShown(!shown)} />
    <section class="panel" aria-labelledby="webui-title">
      <h2 id="webui-title">Open WebUI <small>Admin Settings</small></h2>
      <h3>Connections › OpenAI API</h3>
      <${Settings} rows=${[["URL", base], ["API Key", secret, visible], ["Advanced › Provider", "llama.cpp"], ["Advanced › Headers", FEEDBACK]]} />
      <p class="hint">With the provider llama.cpp Open WebUI gets buttons that load and eject models; they need a key with the scope <code>admin</code> as well. With the header a thought tells what a message waits for while its model loads.</p>
      <h3>From a container on this machine</h3>
      <${Settings} rows=${[["URL", fromContainer.href], ["llmux.yaml", "server:\n  host: 0.0.0.0"], ["docker run", `--add-host=${CONTAINER_HOST}:host-gateway`]]} />
      <p class="hint">llmux listens to others only once it has keys. It knows the name <code>${CONTAINER_HOST}</code>, and with keys this machine's own name; any other name goes into <code>server.allowed_hosts</code>.</p>
      <h3>Interface</h3>
      <${Settings} rows=${[["Task Model", "Current model"]]} />
      <p class="hint">For each message Open WebUI asks for a title and tags, too: another model for these would be swapped in each time.</p>
      <div class="columns">
        ${OTHERS.filter(({ type }) => ofType(type)).map(
          ({ type, where, engine, model }) => html`<div><h3>${where}</h3><${Settings} rows=${[[engine, "OpenAI"], ["API Base URL", base], ["API Key", secret, visible], [model, ofType(type)], ["TTS Voice", type === "tts" && voice], ["Image Size", type === "image" && "512x512"]]} /></div>`,
        )}
      </div>
    </section>
    <div class="columns">
      ${all.map(({ name, where, text }) => html`<section class="panel"><h2>${name} <small>${where}</small></h2><${Snippet} label=${name} text=${text} shown=${masked(text)} /></section>`)}
    </div>
  </div>`;
}
