// Charts of the last half hour: memory by device and model, tokens per second, requests, swaps.

import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { hue } from "./colours.js";
import { mib, plural, time } from "./format.js";
import { clock, leftOf, Plot, span } from "./plot.js";
import { href } from "./route.js";
import { state } from "./state.js";

const HUES = [0, 4];
const TOGETHER = 0.02; // of the width: evictions closer than that are one mark

const rounded = (value) => (value === null || value === undefined ? "–" : value < 10 ? Math.round(value * 10) / 10 : Math.round(value));
const pale = (name, share) => `color-mix(in oklab, var(--${name}) ${share}%, var(--panel))`;

function Chart({ title, names, stepped = false }) {
  const [at, setAt] = useState(null); // the point under the cursor of any chart
  const { interval_s: interval, from, series } = state.history;
  const shown = names.filter((name) => series[name]);
  const values = useMemo(() => shown.map((name) => series[name]), [state.history]);
  if (shown.length === 0) return null;
  const colour = (index) => `hue-${HUES[index]}`;
  const drawn = shown.map((_, index) => ({ stroke: `var(--${colour(index)})`, fill: pale(colour(index), 14) }));
  const point = at ?? values[0].length - 1;
  return html`<figure class="chart">
    <figcaption>
      <span>${at === null ? title : clock(from + at * interval, 8)}</span>
      ${shown.map((name, index) => html`<span class=${`series ${colour(index)}`}>${shown.length > 1 && html`<i class="swatch" />${name.replaceAll("_", " ")}`}<b class="num">${rounded(values[index][point])}</b></span>`)}
    </figcaption>
    <${Plot} drawn=${drawn} values=${values} from=${from} interval=${interval} stepped=${stepped} onCursor=${setAt} />
  </figure>`;
}

/** Evictions as marks: `{left, decisions}`, oldest first; those close together are one. */
function marks(device, length) {
  const { from, interval_s: interval, series } = state.history;
  const [first, last] = span(from, interval, length);
  const made = [];
  for (const decision of [...state.decisions].reverse()) {
    if (decision.kind !== "evicted" || decision.at < first || decision.at > last || !series[`worker_memory_mib:${device}/${decision.model}`]) continue;
    const left = (decision.at - first) / (last - first);
    if (made.length && left - made.at(-1).left < TOGETHER) made.at(-1).decisions.push(decision);
    else made.push({ left, decisions: [decision] });
  }
  return made;
}

function Mark({ left, decisions }) {
  const [{ model, seq }] = decisions;
  const text = decisions.map((decision) => `${time(decision.at)} ${decision.model}: ${decision.reason}`).join("\n");
  const about = decisions.every((decision) => decision.model === model) ? [model, seq] : ["", seq];
  return html`<a class="mark" style=${{ left: leftOf(left) }} href=${href("decisions", ...about)} title=${text} aria-label=${`${plural(decisions.length, "eviction")}: ${text}`}><i /></a>`;
}

/** The end of the axis: a step above the largest value, so that a small use of a large device is no flat line. */
function scaleOf(used, total) {
  const most = 1.1 * Math.max(1, ...used.map((value) => value ?? 0));
  const power = 2 ** Math.floor(Math.log2(most));
  return Math.min(total, [power, 1.5 * power, 2 * power].find((end) => end >= most));
}

/** What each model's worker took on one device, one upon the other; the dashed line is all that is used there. */
function MemoryChart({ device }) {
  const [at, setAt] = useState(null);
  const { interval_s: interval, from, series } = state.history;
  const prefix = `worker_memory_mib:${device.id}/`;
  const used = series[`memory_used_mib:${device.id}`];
  const { models, values, total } = useMemo(() => {
    const models = Object.keys(series).filter((name) => name.startsWith(prefix)).map((name) => name.slice(prefix.length)).sort();
    let below = (used ?? []).map((value) => (value === null ? null : 0));
    const stacked = models.map((model) => (below = below.map((value, point) => (value === null ? null : value + (series[prefix + model][point] ?? 0)))));
    // The device and its workers are not read at the same time: the whole is never less than its parts.
    const total = (used ?? []).map((value, point) => (value === null ? null : Math.max(value, below[point] ?? 0)));
    return { models, values: [...stacked.reverse(), total], total };
  }, [state.history]);
  if (!used) return null;
  const layers = models.map((model) => hue(model)).reverse();
  const drawn = [...layers.map((name) => ({ stroke: `var(--${name})`, fill: pale(name, 45) })), { stroke: "var(--muted)", dash: [4, 4] }];
  const point = at ?? used.length - 1;
  return html`<figure class="chart whole">
    <figcaption>
      <span>${at === null ? `Memory of ${device.id}` : clock(from + at * interval, 8)}</span>
      ${models.filter((model) => series[prefix + model][point]).map((model) => html`<span class=${`series ${hue(model)}`}><i class="swatch" />${model}<b class="num">${mib(series[prefix + model][point])}</b></span>`)}
      <span class="series"><i class="dashes" />total used<b class="num">${mib(total[point])}</b> of ${mib(device.total_mib)}</span>
    </figcaption>
    <div class="marked">
      <${Plot} drawn=${drawn} values=${values} from=${from} interval=${interval} top=${scaleOf(total, device.total_mib)} height=${170} stepped onCursor=${setAt} />
      ${marks(device.id, used.length).map((mark) => html`<${Mark} key=${mark.decisions[0].seq} ...${mark} />`)}
    </div>
  </figure>`;
}

export function History() {
  if (!state.history) return null;
  return html`<section class="panel" aria-labelledby="history-title">
    <h2 id="history-title">Last half hour <small>click ▾ for the reason of an eviction</small></h2>
    <div class="charts">
      ${state.devices.map((device) => html`<${MemoryChart} key=${device.id} device=${device} />`)}
      <${Chart} title="Tokens per second" names=${["tokens_per_s"]} />
      <${Chart} title="Requests" names=${["in_flight", "queued"]} stepped />
      <${Chart} title="Swaps" names=${["swaps"]} stepped />
    </div>
  </section>`;
}
