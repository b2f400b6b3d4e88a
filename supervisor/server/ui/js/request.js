// One request in full: where its time went, part by part, why, and how to try it again.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { cancel } from "./actions.js";
import { answerOf } from "./api.js";
import { hue, physical } from "./colours.js";
import { curl } from "./curl.js";
import { Decisions } from "./decisions.js";
import { asker, duration, milliseconds, time } from "./format.js";
import { getBody, getRequest } from "./operations.js";
import { Dialog, Empty, Snippet } from "./parts.js";
import { useAnswer } from "./read.js";
import { hasFailed } from "./request-list.js";
import { href } from "./route.js";
import { idOf } from "./state.js";

const AGAIN_MS = 1000;

/** `[request, error]`: asked for again until it has ended. */
function useRequest(id) {
  const [found, setFound] = useState([null, null]);
  useEffect(() => {
    let timer = null;
    const controller = new AbortController();
    const read = async () => {
      const request = await answerOf(getRequest(id), { signal: controller.signal });
      setFound([request, null]);
      if (request.state !== "finished") timer = setTimeout(() => read().catch(failed), AGAIN_MS);
    };
    const failed = (error) => error.name !== "AbortError" && setFound(([request]) => [request, error]);
    read().catch(failed);
    return () => (controller.abort(), clearTimeout(timer));
  }, [id]);
  return found;
}

/** Where the time went: `{what, kind, ms}`, in order. */
function phases(request) {
  const waits = request.wait.map(({ what, kind, s }) => ({ what: what.replace(/^It waited for /, "Waited for "), kind, ms: s * 1000 }));
  const waited = waits.reduce((sum, { ms }) => sum + ms, 0);
  const end = request.total_ms;
  const first = request.first_token_ms;
  if (request.worker === null) return waits;
  if (first === null) return [...waits, { what: "The worker had it, and no answer began.", kind: "worker", ms: end - waited }];
  const reading = request.stream ? "The worker read the prompt, until the first token." : "The worker answered.";
  return [...waits, { what: reading, kind: "worker", ms: first - waited }, { what: request.stream ? "The answer streamed." : "The answer was sent.", kind: "answer", ms: end - first }];
}

function Phases({ request }) {
  const all = phases(request).filter(({ ms }) => ms >= 0.5);
  const whole = Math.max(1, ...all.map(({ ms }) => ms));
  return html`<ol class=${`phases ${hue(request.model)}`} aria-label="Where its time went">
    ${all.map(({ what, kind, ms }) => html`<li class=${kind}>
      <span class="text">${what}</span><b class="num">${milliseconds(ms)}</b>
      <i style=${{ width: `${Math.max(0.5, (100 * ms) / whole)}%` }} />
    </li>`)}
  </ol>`;
}

function Facts({ request }) {
  const facts = [
    ["Model", physical(request.model) ? html`<a href=${href("models", request.model)}>${request.model}</a>` : request.model],
    ["Worker", request.worker],
    ["Path", request.path],
    ["Key", request.key],
    ["For", asker({ ...request, key: null })],
    ["Arrived", time(request.at)],
    ["Tokens", request.completion_tokens === null ? null : `${request.completion_tokens} out, ${request.prompt_tokens ?? "?"} in`],
    ["Speed", request.tokens_per_s == null ? null : `${request.tokens_per_s.toFixed(1)} tokens/s`],
    ["Sent", `${request.bytes} bytes${request.stream ? ", streamed" : ""}`],
    ["Cut", request.cut],
    ["Its id", request.request_id],
  ];
  return html`<dl class="facts">${facts.filter(([, value]) => value).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

/** The parts of its body and its answer that were kept. */
function Bodies({ id }) {
  const [kept, setKept] = useState(null);
  useAnswer(getBody(id), setKept, (error) => setKept({ error: error.message }));
  if (!kept) return null;
  if (kept.error) return html`<p class="hint">${kept.error}</p>`;
  const more = (cut) => (cut ? html` <small>its beginning</small>` : "");
  return html`<h3>Body${more(kept.request_cut)}</h3><${Snippet} label="body" text=${kept.request} />
    <h3>Answer${more(kept.answer_cut)} <small>${kept.answer_type}</small></h3><${Snippet} label="answer" text=${kept.answer} />`;
}

function Found({ request }) {
  const running = request.state !== "finished";
  const failed = !running && hasFailed(request);
  return html`
    <div class="summary">
      <span class=${`badge ${running ? "busy" : failed ? "bad" : "good"}`}>${running ? request.state : (request.error ?? request.status)}</span>
      <span class="reason">${request.error_message ?? (running ? `for ${duration(request.total_ms / 1000)}` : `${milliseconds(request.total_ms)} total`)}</span>
      ${running && request.id && html`<button class="danger" onClick=${() => cancel([request])}>Cancel</button>`}
    </div>
    ${request.awaits && html`<p>${request.awaits.what} <span class="muted">${request.awaits.eta ?? ""}</span></p>`}
    <${Phases} request=${request} />
    <${Facts} request=${request} />
    ${request.decisions.length > 0 && html`<h3>What was decided while it waited</h3><${Decisions} decisions=${request.decisions} />`}
    ${!running && physical(request.model)?.definition?.keep_bodies && html`<${Bodies} id=${idOf(request)} />`}
    ${request.path && html`<h3>Try it again</h3><p class="hint">This body is a short example.</p><${Snippet} label="request as curl" text=${curl(request)} />`}`;
}

export function RequestDialog({ id, onClose }) {
  const [request, error] = useRequest(id);
  return html`<${Dialog} title="Request" className="drawer" onClose=${onClose}>
    ${error && html`<p class="problem" role="alert">${error.message}</p>`}
    ${request ? html`<${Found} request=${request} />` : !error && html`<${Empty}>Looking for it…<//>`}
  <//>`;
}
