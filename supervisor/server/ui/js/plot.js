// One chart over time: uPlot in the page's colours.

import { html, useEffect, useRef } from "../vendor/htm-preact.js";
import uPlot from "../vendor/uplot.js";

const SYNC = uPlot.sync("history");
const LEAST_SPAN = 120; // seconds
const AXIS = 58; // pixels left of the plot
const PADDING = 16; // right of it: half a label of the time

// What the labels of the upright axis say, and how far apart they may be.
const COUNTS = { values: (_chart, splits) => splits.map((value) => (Number.isInteger(value) ? value : "")) };
const MEMORY = {
  incrs: Array.from({ length: 30 }, (_, power) => 2 ** power),
  values: (_chart, splits) => splits.map((mib) => (mib % 1024 ? `${mib} MiB` : mib ? `${mib / 1024} GiB` : "0")),
};

/** The times at the plot's ends. */
export const span = (from, interval, length) => {
  const last = from + Math.max(0, length - 1) * interval;
  return [Math.min(from, last - LEAST_SPAN), last];
};

/** Where a share of the plot's width is, for an element laid over it. */
export const leftOf = (share) => `calc(${AXIS}px + (100% - ${AXIS + PADDING}px) * ${share.toFixed(4)})`;

export const clock = (at, digits) => new Date(at * 1000).toTimeString().slice(0, digits);

/** A CSS colour as the canvas needs it: resolved for the theme that is on. */
function colour(text) {
  const probe = document.createElement("i");
  probe.style.forcedColorAdjust = "none"; // colours tell the models apart, also in high contrast
  probe.style.color = text;
  document.body.append(probe);
  const resolved = getComputedStyle(probe).color;
  probe.remove();
  return resolved;
}

function options({ width, height, drawn, stepped, top, onCursor }) {
  const muted = colour("var(--muted)");
  const grid = { stroke: colour("var(--line)"), width: 1 };
  const font = "11px Inter, system-ui, sans-serif";
  return {
    width,
    height,
    padding: [8, PADDING, 0, 0],
    cursor: { sync: { key: SYNC.key }, points: { size: 6 }, drag: { setScale: false } },
    legend: { show: false },
    hooks: { setCursor: [(chart) => onCursor(chart.cursor.idx ?? null)] },
    scales: { x: { range: (_chart, first, last) => [Math.min(first, last - LEAST_SPAN), last] }, y: { range: (_chart, _low, high) => [0, top ?? Math.max(1, high * 1.1)] } },
    axes: [
      { stroke: muted, grid: { show: false }, ticks: { show: false }, font, size: 22, incrs: [60, 120, 300, 600, 900], values: (_chart, splits) => splits.map((at) => clock(at, 5)), space: 60 },
      { stroke: muted, grid, ticks: { show: false }, font, size: AXIS, space: 32, ...(top ? MEMORY : COUNTS) },
    ],
    series: [
      {},
      ...drawn.map(({ stroke, fill, dash }) => ({
        stroke: colour(stroke),
        fill: fill && colour(fill),
        dash,
        width: 1.5,
        points: { show: false },
        paths: stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      })),
    ],
  };
}

/** `drawn`: per series its CSS colours `stroke` and `fill`; `values`: per series its points; `top`: the scale's end, in MiB. */
export function Plot({ drawn, values, from, interval, top, height = 120, stepped = false, onCursor }) {
  const place = useRef(null);
  const chart = useRef(null);
  const length = Math.max(0, ...values.map((points) => points.length));
  const data = [Array.from({ length }, (_, index) => from + index * interval), ...values];
  const signature = JSON.stringify([drawn, top, document.documentElement.dataset.theme]);
  useEffect(() => {
    const build = () => {
      chart.current?.destroy();
      chart.current = new uPlot(options({ width: place.current.clientWidth, height, drawn, stepped, top, onCursor }), data, place.current);
    };
    build();
    const resized = new ResizeObserver(() => chart.current.setSize({ width: place.current.clientWidth, height }));
    resized.observe(place.current);
    const looks = [matchMedia("(prefers-color-scheme: dark)"), matchMedia("(forced-colors: active)")];
    for (const look of looks) look.addEventListener("change", build);
    return () => {
      for (const look of looks) look.removeEventListener("change", build);
      resized.disconnect();
      chart.current.destroy();
      chart.current = null;
    };
  }, [signature]);
  useEffect(() => chart.current?.setData(data), [values]);
  return html`<div ref=${place} style=${{ minHeight: `${height}px` }} />`;
}
