// Loads: those that wait or run, with their progress, and the last that ended; one that isn't over can be cancelled.

import { html } from "../vendor/htm-preact.js";
import { call } from "./api.js";
import { duration } from "./format.js";
import { cancelLoad, listLoads } from "./operations.js";
import { useRead } from "./read.js";
import { href } from "./route.js";
import { notify } from "./state.js";

const ENDED = 5; // so many that are over
const TONES = { ready: "good", failed: "bad", interrupted: "bad", cancelled: "", waiting: "busy", loading: "busy" };

const isOver = (load) => load.ended_at !== null;

function times(load) {
  const parts = [load.took_s !== null && duration(load.took_s), load.expected_s !== null && `expected ${duration(load.expected_s)}`];
  if (load.took_s === null) parts[0] = `waits ${duration(load.waited_s)}`;
  if (load.eta_s !== null) parts.push(`about ${duration(load.eta_s)} left`);
  return parts.filter(Boolean).join(" · ");
}

function Row({ load, read }) {
  const name = load.worker;
  const cancel = () => call(cancelLoad(load.id)).then(read, (error) => notify(error.message, "bad"));
  return html`<tr>
    <th scope="row"><a href=${href("models", load.model)}>${name}</a></th>
    <td><span class=${`badge ${TONES[load.state]}`}>${load.state}</span></td>
    <td>${load.state === "loading" ? html`<progress max="1" value=${load.progress} aria-label=${`Load of ${name}`} /> ${Math.floor(100 * load.progress)} %` : ""}</td>
    <td class="num">${times(load)}</td>
    <td class="why" title=${load.reason}>${(load.state === "loading" && load.stage) || load.reason}</td>
    <td class="do">${!isOver(load) && html`<button class="small" aria-label=${`Cancel the load of ${name}`} onClick=${cancel}>Cancel</button>`}</td>
  </tr>`;
}

export function Loads() {
  const [told, read] = useRead(listLoads());
  if (!told?.data.length) return null;
  const shown = [...told.data.filter((load) => !isOver(load)), ...told.data.filter(isOver).slice(0, ENDED)];
  const { loads, mean_error: error } = told.estimates;
  return html`<section class="panel" aria-labelledby="loads-title">
    <div class="title"><h2 id="loads-title">Loads</h2>${loads > 0 && html`<small class="muted" title=${`Of ${loads} loads`}>load-time estimates off by ${Math.round(100 * error)} %</small>`}</div>
    <div class="scrolls"><table class="listing loads-table">
      <thead><tr><th>Model</th><th>State</th><th>Done</th><th class="num">Time</th><th>Why</th><td></td></tr></thead>
      <tbody>${shown.map((load) => html`<${Row} key=${load.id} load=${load} read=${read} />`)}</tbody>
    </table></div>
  </section>`;
}
