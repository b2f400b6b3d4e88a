// Jobs of all kinds: those that wait or run, with their progress, and the last that ended; one that isn't over can be cancelled.

import { html, useState } from "../vendor/htm-preact.js";
import { call } from "./api.js";
import { duration, now } from "./format.js";
import { cancelAnyJob, listAllJobs, listLoads } from "./operations.js";
import { Select } from "./parts.js";
import { useRead } from "./read.js";
import { href } from "./route.js";
import { notify, state } from "./state.js";

const ENDED = 5; // so many that are over
const MOST = 200;
const TONES = { completed: "good", failed: "bad", interrupted: "bad", expired: "bad", cancelled: "", queued: "busy", running: "busy" };
const KINDS = [["", "all kinds"], ["load", "loads"], ["pull", "pulls"], ["inference", "inference"], ["response", "responses"], ["batch", "batches"], ["line", "lines of batches"]];

const isOver = (job) => job.ended_at !== null;

function times(job) {
  const from = job.started_at ?? job.created_at;
  const lasts = duration((job.ended_at ?? now()) - from);
  const parts = [job.started_at === null && !isOver(job) ? `waits ${lasts}` : lasts];
  if (job.expected_s !== null) parts.push(`expected ${duration(job.expected_s)}`);
  if (job.eta_s !== null) parts.push(`about ${duration(job.eta_s)} left`);
  return parts.join(" · ");
}

function Row({ job, read }) {
  const name = `${job.kind} ${job.model ?? job.id}`;
  const cancel = () => call(cancelAnyJob(job.id)).then(read, (error) => notify(error.message, "bad"));
  return html`<tr>
    <th scope="row">${state.models.has(job.model) ? html`<a href=${href("models", job.model)}>${job.model}</a>` : job.model ?? job.id}</th>
    <td title=${job.id}>${job.kind}${job.owner && html` <small class="muted">${job.owner}</small>`}</td>
    <td><span class=${`badge ${TONES[job.state]}`}>${job.state}</span></td>
    <td>${job.state === "running" && job.progress !== null ? html`<progress max="1" value=${job.progress} aria-label=${`Progress of ${name}`} /> ${Math.floor(100 * job.progress)} %` : ""}</td>
    <td class="num">${times(job)}</td>
    <td class="why" title=${job.message}>${job.message}</td>
    <td class="do">${!isOver(job) && html`<button class="small" aria-label=${`Cancel ${name}`} onClick=${cancel}>Cancel</button>`}</td>
  </tr>`;
}

export function Jobs() {
  const [kind, setKind] = useState("");
  const [answer, read] = useRead(listAllJobs({ limit: MOST, ...(kind && { kind }) }));
  const estimates = useRead(listLoads())[0]?.estimates;
  if (!answer?.data.length && !kind) return null;
  const jobs = answer?.data ?? [];
  const shown = [...jobs.filter((job) => !isOver(job)), ...jobs.filter(isOver).slice(0, ENDED)];
  return html`<section class="panel" aria-labelledby="jobs-title">
    <div class="title"><h2 id="jobs-title">Jobs</h2>
      ${estimates?.loads > 0 && html`<small class="muted" title=${`Of ${estimates.loads} loads`}>load-time estimates off by ${Math.round(100 * estimates.mean_error)} %</small>`}
      <${Select} label="Show" value=${kind} options=${KINDS} onChange=${setKind} />
    </div>
    <div class="scrolls"><table class="listing jobs-table">
      <thead><tr><th>Model</th><th>Kind</th><th>State</th><th>Done</th><th class="num">Time</th><th>Why</th><td></td></tr></thead>
      <tbody>${shown.map((job) => html`<${Row} key=${job.id} job=${job} read=${read} />`)}</tbody>
    </table></div>
  </section>`;
}
