// The daemon's state, kept up to date: one snapshot, then GET /v1/admin/events. Where the daemon has no events
// (or the stream breaks) it is read every few seconds instead.

import { answerOf, ApiError, call, events, key, onRefused } from "./api.js";
import { now } from "./format.js";
import { followEvents, listDecisions, listEnded, listModels, listRequests, readHistory, readMemory } from "./operations.js";
import { changed, keepEnded, notify, state } from "./state.js";

export { changed, notify, state } from "./state.js";

const POLL_MS = 2000;
const HISTORY_MS = 6000;
const DECISIONS_KEPT = 1000;
const ENDED_FIRST = 30; // the page of requests asks for more

/** Take in one model's view; its ages become times, which stay true while the view does not change. */
export function keepModel(view) {
  const seen = now();
  view.since = seen - view.since_s;
  view.idleSince = view.idle_s === null ? null : seen - view.idle_s;
  view.startedAt = view.worker ? seen - view.worker.uptime_s : null;
  state.models.set(view.name, view);
}

/** The sum of these leases and of their measured memory; a lease without a measurement adds none. */
function total(parts) {
  const measured = parts.filter(({ measured_mib }) => measured_mib !== null);
  const sum = (all, field) => all.reduce((count, part) => count + part[field], 0);
  return { lease_mib: sum(parts, "lease_mib"), measured_mib: measured.length ? sum(measured, "measured_mib") : null };
}

/** Take in the devices. Models come when their state changes, memory comes more often: the measured memory is the models', too. */
function keepDevices(devices) {
  state.devices = devices;
  const byWorker = new Map(); // leases, on all devices of each worker
  for (const { model, generation, ...lease } of devices.flatMap(({ leases }) => leases)) {
    const worker = `${model}:${generation}`;
    byWorker.set(worker, [...(byWorker.get(worker) ?? []), lease]);
  }
  for (const { memory, replicas } of state.models.values()) {
    const known = (replicas ?? []).filter(({ worker }) => byWorker.has(worker));
    for (const replica of known) Object.assign(replica, total(byWorker.get(replica.worker)));
    if (known.length) Object.assign(memory, total(known));
  }
}

function keepDecision(decision) {
  if (state.decisions.some((kept) => kept.seq === decision.seq)) return;
  state.decisions = [decision, ...state.decisions].slice(0, DECISIONS_KEPT);
}

async function fetchModels() {
  const { data } = await answerOf(listModels());
  const names = new Set(data.map((view) => view.name));
  for (const name of state.models.keys()) if (!names.has(name)) state.models.delete(name);
  data.forEach(keepModel);
}

async function fetchMemory() {
  keepDevices((await answerOf(readMemory())).devices);
}

async function fetchDecisions() {
  const { data } = await answerOf(listDecisions({ limit: DECISIONS_KEPT }));
  state.decisions = data.sort((left, right) => right.seq - left.seq);
}

const absent = new Set(); // endpoints that this daemon turned out not to have

/** What an operation answers; null, now and from now on, where the daemon doesn't have it. */
async function askIfThere(operation) {
  if (absent.has(operation.path)) return null;
  try {
    return await answerOf(operation);
  } catch (error) {
    if (!(error instanceof ApiError && error.absent)) throw error;
    absent.add(operation.path);
    return null;
  }
}

let requestsRead = false;

/** At most one question under way; requests come and go faster than anybody reads. */
async function fetchRequests() {
  if (requestsRead) return;
  requestsRead = true;
  try {
    const seen = now();
    const answer = await askIfThere(listRequests());
    state.requests = answer && answer.data.map((request) => ({ ...request, since: seen - request.age_s }));
  } finally {
    requestsRead = false;
  }
}

/** The last requests that ended. */
export async function fetchEnded(limit) {
  const answer = await askIfThere(listEnded({ limit }));
  if (answer) keepEnded(answer.data);
}

async function fetchHistory() {
  state.history = await askIfThere(readHistory());
}

/** Read everything once. Throws the API's error. */
export async function refresh() {
  await fetchModels(); // alone and first: without a key one refusal is enough
  await Promise.all([fetchMemory(), fetchDecisions(), fetchRequests(), fetchEnded(ENDED_FIRST), fetchHistory()]);
  changed();
}

let requestsTimer = null;

function requestsSoon() {
  requestsTimer ??= setTimeout(async () => {
    requestsTimer = null;
    await fetchRequests().catch(() => {});
    changed();
  }, 250);
}

function take({ type, data }) {
  const value = JSON.parse(data);
  if (type === "model") {
    if (value.state === "removed") state.models.delete(value.name);
    else keepModel(value);
    requestsSoon();
  } else if (type === "memory") {
    keepDevices(value.devices);
  } else if (type === "decision") {
    keepDecision(value);
  } else if (type === "request") {
    if (value.state !== "started") {
      keepEnded([value]);
      state.steps.delete(value.request_id);
    }
    requestsSoon();
  } else if (type === "progress") {
    state.steps.set(value.request_id, value);
  } else if (type === "alert") {
    notify(`${value.model ?? value.device ?? "llmux"}: ${value.message}`, "bad");
  } else if (type === "reload") {
    if (value.problems) notify(`The changed configuration is not in effect: ${value.problems[0]}`, "bad");
    state.reloads += 1;
    refresh().catch(() => {});
  }
  changed();
}

/** Follow the events. Returns when they end; true when the daemon has them at all. */
async function follow(signal) {
  if (absent.has(followEvents().path)) return false;
  let response;
  try {
    response = await call(followEvents(), { signal });
  } catch (error) {
    if (!(error instanceof ApiError && error.absent)) throw error;
    absent.add(followEvents().path);
    return false;
  }
  state.ended.clear(); // another daemon may have begun to count anew
  await refresh(); // after the stream is open, so that nothing falls between the two
  state.link = "live";
  changed();
  for await (const event of events(response)) take(event);
  return true;
}

export const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });

async function run(signal) {
  let wait = 500;
  while (!signal.aborted) {
    try {
      if (await follow(signal)) {
        wait = 500;
      } else {
        await refresh();
        state.link = "polling";
        state.trouble = null;
        wait = POLL_MS;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        lock(error);
        return;
      }
      state.link = "offline";
      state.trouble = error.message;
      wait = Math.min(wait * 2, 10000);
    }
    changed();
    await pause(wait, signal);
  }
}

let controller = null;

/** Begin, or begin anew with another key. */
export function start() {
  controller?.abort();
  controller = new AbortController();
  absent.clear();
  state.link = "connecting";
  state.trouble = null;
  changed();
  run(controller.signal);
}

function lock(error) {
  controller?.abort();
  state.link = "locked";
  state.trouble = key.get() ? error.message : null;
  changed();
}

onRefused(lock);
setInterval(changed, 1000);
setInterval(() => {
  if (state.link !== "locked" && !document.hidden && state.history) fetchHistory().then(changed, () => {});
}, HISTORY_MS);
