// Charts of the last half hour: memory by device, tokens per second, requests, swaps.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import uPlot from "../vendor/uplot.js";
import { state } from "./live.js";

const HEIGHT = 120;
const SYNC = uPlot.sync("history");
const LEAST_SPAN = 300; // seconds

/** A CSS colour as the canvas needs it: resolved for the theme that is on. */
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const resolved = getComputedStyle(probe).color;
  probe.remove();
  return resolved;
}

const HUES = ["hue-0", "hue-1", "hue-2", "hue-3"];

function lines(names, series) {
  return names.filter((name) => series[name]).map((name, index) => ({ name, label: name.split(":")[1] ?? name.replaceAll("_", " "), stroke: HUES[index % HUES.length] }));
}

const withTheme = (alpha, resolved) => resolved.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`).replace(/^(color|oklch|lab|oklab)\((.*)\)$/, `$1($2 / ${alpha})`);

const clock = (at, digits) => new Date(at * 1000).toTimeString().slice(0, digits);

function options(width, drawn, stepped, onCursor) {
  const muted = colour("muted");
  const grid = { stroke: colour("line"), width: 1 };
  const font = "11px Inter, system-ui, sans-serif";
  return {
    width,
    height: HEIGHT,
    padding: [8, 4, 0, 0],
    cursor: { sync: { key: SYNC.key }, points: { size: 6 }, drag: { setScale: false } },
    legend: { show: false },
    hooks: { setCursor: [(chart) => onCursor(chart.cursor.idx ?? null)] },
    scales: { x: { range: (_chart, first, last) => [Math.min(first, last - LEAST_SPAN), last] }, y: { range: (_chart, _low, high) => [0, Math.max(1, high * 1.1)] } },
    axes: [
      { stroke: muted, grid: { show: false }, ticks: { show: false }, font, size: 22, incrs: [60, 120, 300, 600, 900], values: (_chart, splits) => splits.map((at) => clock(at, 5)), space: 60 },
      { stroke: muted, grid, ticks: { show: false }, font, size: 46, space: 32, values: (_chart, splits) => splits.map((value) => (value >= 10240 ? `${Math.round(value / 1024)} Gi` : Number.isInteger(value) ? value : "")) },
    ],
    series: [
      {},
      ...drawn.map(({ stroke }) => ({
        stroke: colour(stroke),
        fill: withTheme(0.12, colour(stroke)),
        width: 1.5,
        points: { show: false },
        paths: stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      })),
    ],
  };
}

const rounded = (value) => (value === null || value === undefined ? "–" : value < 10 ? Math.round(value * 10) / 10 : Math.round(value));

function Chart({ title, names, stepped = false }) {
  const [at, setAt] = useState(null); // the point under the cursor of any chart
  const place = useRef(null);
  const chart = useRef(null);
  const { interval_s: interval, from, series } = state.history;
  const drawn = lines(names, series);
  const signature = `${drawn.map(({ name }) => name).join()} ${document.documentElement.dataset.theme ?? ""}`;
  const length = Math.max(0, ...drawn.map(({ name }) => series[name].length));
  const data = [Array.from({ length }, (_, index) => from + index * interval), ...drawn.map(({ name }) => series[name])];
  useEffect(() => {
    const build = () => {
      chart.current?.destroy();
      chart.current = new uPlot(options(place.current.clientWidth, drawn, stepped, setAt), data, place.current);
    };
    build();
    const resized = new ResizeObserver(() => chart.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    resized.observe(place.current);
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", build);
    return () => {
      system.removeEventListener("change", build);
      resized.disconnect();
      chart.current.destroy();
      chart.current = null;
    };
  }, [signature]);
  useEffect(() => chart.current?.setData(data), [state.history]);
  if (drawn.length === 0) return null;
  const shown = at ?? length - 1;
  return html`<figure class="chart">
    <figcaption>
      <span>${at === null ? title : clock(from + at * interval, 8)}</span>
      ${drawn.map(({ name, label, stroke }) => html`<span class=${`series ${stroke}`}>${drawn.length > 1 && html`<i class="swatch" />`}${drawn.length > 1 && label}<b class="num">${rounded(series[name][shown])}</b></span>`)}
    </figcaption>
    <div ref=${place} />
  </figure>`;
}

export function History() {
  if (!state.history) return null;
  const names = Object.keys(state.history.series);
  return html`<section class="panel" aria-labelledby="history-title">
    <h2 id="history-title">Last half hour</h2>
    <div class="charts">
      <${Chart} title="Memory used, MiB" names=${names.filter((name) => name.startsWith("memory_used_mib:"))} />
      <${Chart} title="Tokens per second" names=${["tokens_per_s"]} />
      <${Chart} title="Requests" names=${["in_flight", "queued"]} stepped />
      <${Chart} title="Swaps" names=${["swaps"]} stepped />
    </div>
  </section>`;
}
