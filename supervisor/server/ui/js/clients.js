// Who asks: what each client did, its profile, and its pause, which the operator may begin and end.

import { html } from "../vendor/htm-preact.js";
import { call } from "./api.js";
import { duration, now } from "./format.js";
import { listClients, pauseClient } from "./operations.js";
import { useRead } from "./read.js";
import { notify } from "./state.js";

const PAUSE_S = 60;

const about = (profile) => profile && ([profile.model, profile.priority != null && `priority ${profile.priority}`].filter(Boolean).join(" · ") || "yes");

function Row({ client, read }) {
  const pauses = client.cooldown_s !== null;
  const pause = () =>
    call(pauseClient(client.id), { body: { cooldown_s: pauses ? 0 : PAUSE_S } }).then(read, (error) => notify(error.message, "bad"));
  return html`<tr>
    <th scope="row">${client.id}</th>
    <td class="num">${client.in_flight}</td>
    <td class="num">${client.requests}</td>
    <td class=${`num ${client.errors ? "bad-text" : ""}`}>${client.errors}</td>
    <td class="num">${client.refused}</td>
    <td class="num">${client.completion_tokens} <small title="tokens of the prompts">/ ${client.prompt_tokens}</small></td>
    <td class="num">${client.last_seen === null ? "never" : duration(now() - client.last_seen)}</td>
    <td>${about(client.profile) || "–"}</td>
    <td title=${client.cooldown_reason ?? ""}>${pauses && html`<span class="badge bad">pauses ${duration(client.cooldown_s)}</span> `}
      ${client.last_seen !== null && html`<button class="small" aria-label=${`${pauses ? "Resume" : "Pause"} ${client.id}`} onClick=${pause}>${pauses ? "Resume" : "Pause"}</button>`}</td>
  </tr>`;
}

export function Clients() {
  const [answer, read] = useRead(listClients());
  if (!answer?.data.length) return null;
  const clients = answer.data;
  return html`<section class="panel" aria-labelledby="clients-title">
    <h2 id="clients-title">Clients <small>${clients.length}</small></h2>
    <div class="scrolls"><table class="listing clients-table">
      <thead><tr><th>Client</th><th class="num">Now</th><th class="num">Requests</th><th class="num">Errors</th><th class="num">Refused</th><th class="num">Tokens</th><th class="num">Last seen</th><th>Profile</th><th>Pause</th></tr></thead>
      <tbody>${clients.map((client) => html`<${Row} key=${client.id} client=${client} read=${read} />`)}</tbody>
    </table></div>
  </section>`;
}
