// Tasks: their candidates as they are now, whom a request would go to, and the guard against cloud fallbacks.

import { html } from "../vendor/htm-preact.js";
import { call } from "./api.js";
import { changeSettings, listTasks, readSettings } from "./operations.js";
import { useRead } from "./read.js";
import { StateBadge } from "./models.js";
import { href } from "./route.js";
import { notify } from "./state.js";

const Candidate = ({ candidate, chosen }) => html`<li class=${candidate.allowed ? "" : "muted"} title=${candidate.allowed ? "" : "No cloud fallback: it is asked only by its own name"}>
  <a href=${href("models", candidate.physical)}>${candidate.model}</a>
  ${candidate.remote ? html`<span class="badge">remote</span>` : html`<${StateBadge} model=${candidate} />`}${candidate.model === chosen && html` <span class="badge">next</span>`}
</li>`;

const Row = ({ task }) => html`<tr>
  <th scope="row" title=${task.description ?? ""}>${task.name}</th>
  <td><ol class="candidates">${task.candidates.map((candidate) => html`<${Candidate} key=${candidate.model} candidate=${candidate} chosen=${task.chosen} />`)}</ol></td>
  <td class="why">${task.why}</td>
</tr>`;

/** Only where a candidate is remote: may a request fall back to it? */
function Guard({ tasks, read }) {
  const [config, readConfig] = useRead(readSettings());
  if (!config || !tasks.some((task) => task.candidates.some((candidate) => candidate.remote))) return null;
  const change = ({ target }) =>
    call(changeSettings(), { body: { allowCloudFallback: target.checked } })
      .catch((error) => notify(error.message, "bad"))
      .then(() => Promise.all([readConfig(), read()]));
  return html`<label class="guard"><input type="checkbox" checked=${config.allowCloudFallback} onChange=${change} /> Remote models may answer where a local one can't</label>`;
}

export function Tasks() {
  const [tasks, read] = useRead(listTasks());
  if (!tasks?.data.length) return null;
  return html`<section class="panel" aria-labelledby="tasks-title">
    <div class="title"><h2 id="tasks-title">Tasks <small>${tasks.data.length}</small></h2><${Guard} tasks=${tasks.data} read=${read} /></div>
    <div class="scrolls"><table class="listing tasks-table">
      <thead><tr><th>Task</th><th>Candidates</th><th>A request now</th></tr></thead>
      <tbody>${tasks.data.map((task) => html`<${Row} key=${task.name} task=${task} />`)}</tbody>
    </table></div>
  </section>`;
}
