// The playground: one page per kind of model, each a small client of the same API that everybody else uses.

import { html, useState } from "../../vendor/htm-preact.js";
import { notify, state } from "../live.js";
import { physical } from "../colours.js";
import { Empty, Select } from "../parts.js";
import { useAnswer } from "../read.js";
import { href } from "../route.js";
import { Chat } from "./chat.js";
import { Embeddings } from "./embeddings.js";
import { Images } from "./images.js";
import { Rerank } from "./rerank.js";
import { Speech } from "./speech.js";
import { Transcription } from "./transcription.js";

const RERANK = "/v1/rerank";

const KINDS = [
  { id: "chat", title: "Chat", type: "llm", path: "/v1/chat/completions", View: Chat },
  { id: "speech", title: "Speech", type: "tts", path: "/v1/audio/speech", View: Speech },
  { id: "transcription", title: "Transcription", type: "asr", path: "/v1/audio/transcriptions", View: Transcription },
  { id: "images", title: "Images", type: "image", path: "/v1/images/generations", View: Images },
  { id: "embeddings", title: "Embeddings", type: "embedding", path: "/v1/embeddings", View: Embeddings },
  { id: "rerank", title: "Rerank", path: RERANK, View: Rerank },
];

const serves = (endpoints, path) => endpoints?.some((endpoint) => endpoint === `POST ${path}`);

/** By its type, as a model for pictures and texts embeds texts as well; but a reranker is known by what it serves alone. */
function fits(model, { type, path }) {
  const endpoints = physical(model.id)?.capabilities?.endpoints;
  if (!type) return serves(endpoints, path);
  const isAlike = model.type === type || (type === "embedding" && model.type === "vision");
  return isAlike && (serves(endpoints, path) || !serves(endpoints, RERANK));
}

/** The public names, as any client sees them. */
function useListing() {
  const [listing, setListing] = useState(null);
  const names = [...state.models.keys()].join();
  useAnswer(state.link === "locked" ? null : "/v1/models", ({ data }) => setListing(data), (error) => error.status === 401 || notify(error.message, "bad"), [names]);
  return listing;
}

export function Playground({ kind = "chat" }) {
  const listing = useListing();
  const of = KINDS.find(({ id }) => id === kind) ?? KINDS[0];
  const { id: shown, type, title, View } = of;
  const names = (listing ?? []).filter((model) => fits(model, of)).map((model) => model.id);
  const [chosen, setChosen] = useState({});
  const model = names.includes(chosen[shown]) ? chosen[shown] : names[0];
  return html`<section class="panel playground" aria-labelledby="playground-title">
    <h1 id="playground-title" class="unseen">Playground</h1>
    <nav class="tabs" aria-label="Kinds">
      ${KINDS.map(({ id, title }) => html`<a href=${href("playground", id)} aria-current=${id === kind ? "page" : null}>${title}</a>`)}
    </nav>
    ${model
      ? html`<${View} key=${shown} model=${model} choice=${html`<${Select} label="Model" value=${model} options=${names} onChange=${(name) => setChosen({ ...chosen, [shown]: name })} />`} />`
      : listing && html`<${Empty}>No model for ${title.toLowerCase()} is configured${type && html` (type <code>${type}</code>)`}.<//>`}
  </section>`;
}

/** What a waiting client waits for, in words. `request`: its x-request-id. */
export function Waiting({ model, request }) {
  const made = state.steps.get(request);
  if (made) return html`<p class="waiting" role="status">Step ${made.step} of ${made.steps} <progress value=${made.step} max=${made.steps} /></p>`;
  const found = physical(model);
  if (!found || found.state === "ready") return html`<p class="waiting" role="status">Working…</p>`;
  return html`<p class="waiting" role="status">${found.name} is ${found.state}: ${found.reason || "waiting for its turn"}</p>`;
}
