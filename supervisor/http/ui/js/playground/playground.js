// The playground: one page per kind of model, each a small client of the same API that everybody else uses.

import { html, useEffect, useState } from "../../vendor/htm-preact.js";
import { get } from "../api.js";
import { notify, state } from "../live.js";
import { physical } from "../colours.js";
import { Empty, Select } from "../parts.js";
import { href } from "../route.js";
import { Chat } from "./chat.js";
import { Embeddings } from "./embeddings.js";
import { Images } from "./images.js";
import { Speech } from "./speech.js";
import { Transcription } from "./transcription.js";

const KINDS = [
  { id: "chat", title: "Chat", type: "llm", View: Chat },
  { id: "speech", title: "Speech", type: "tts", View: Speech },
  { id: "transcription", title: "Transcription", type: "asr", View: Transcription },
  { id: "images", title: "Images", type: "image", View: Images },
  { id: "embeddings", title: "Embeddings", type: "embedding", View: Embeddings },
];

/** A model for pictures and texts embeds texts as well. */
const fits = (model, type) => model.type === type || (type === "embedding" && model.type === "vision");

/** The public names, as any client sees them. */
function useListing() {
  const [listing, setListing] = useState(null);
  const names = [...state.models.keys()].join();
  useEffect(() => {
    if (state.link === "locked") return;
    get("/v1/models")
      .then(({ data }) => setListing(data))
      .catch((error) => error.status === 401 || notify(error.message, "bad"));
  }, [names, state.link === "locked"]);
  return listing;
}

export function Playground({ kind = "chat" }) {
  const listing = useListing();
  const { type, title, View } = KINDS.find(({ id }) => id === kind) ?? KINDS[0];
  const names = (listing ?? []).filter((model) => fits(model, type)).map((model) => model.id);
  const [chosen, setChosen] = useState({});
  const model = names.includes(chosen[type]) ? chosen[type] : names[0];
  return html`<section class="panel playground" aria-labelledby="playground-title">
    <h1 id="playground-title" class="unseen">Playground</h1>
    <nav class="tabs" aria-label="Kinds">
      ${KINDS.map(({ id, title }) => html`<a href=${href("playground", id)} aria-current=${id === kind ? "page" : null}>${title}</a>`)}
    </nav>
    ${model
      ? html`<${View} key=${type} model=${model} choice=${html`<${Select} label="Model" value=${model} options=${names} onChange=${(name) => setChosen({ ...chosen, [type]: name })} />`} />`
      : listing && html`<${Empty}>No model for ${title.toLowerCase()} is configured (type <code>${type}</code>).<//>`}
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
