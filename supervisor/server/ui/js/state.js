// The state of the page: one plain object. Views read it, and draw themselves again when it changes.

import { now } from "./format.js";

export const state = {
  link: "connecting", // "live", "polling", "offline", "locked"
  trouble: null, // why it is offline or locked
  models: new Map(),
  devices: [],
  decisions: [], // newest first
  requests: null, // in flight and queued, oldest first; null: this daemon doesn't list them
  ended: new Map(), // requests by id, in the order they ended
  steps: new Map(), // how far requests are that are made in steps, by their x-request-id
  history: null,
  reloads: 0, // how often the configuration was read again since this page is open
  notices: [],
  question: null, // a component: the dialog in which the operator decides something
  at: now(), // seconds; ticks, so that ages grow
};

/** The model as it is configured, of which this may be a replica: "chat" of "chat#2". None of none. */
export const baseOf = (name) => name?.replace(/#[1-9]\d*$/, "");

const listeners = new Set();
let scheduled = false;

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function changed() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    state.at = now();
    for (const listener of listeners) listener();
  });
}

let noticeCount = 0;

/** A line for the operator that goes away by itself. `tone`: "info" or "bad". */
export function notify(text, tone = "info") {
  const notice = { id: ++noticeCount, text, tone };
  state.notices = [...state.notices.slice(-3), notice];
  setTimeout(() => dismiss(notice.id), tone === "bad" ? 12000 : 5000);
  changed();
}

export function dismiss(id) {
  state.notices = state.notices.filter((notice) => notice.id !== id);
  changed();
}

/** Show `dialog`, a component; null closes it. */
export function ask(dialog) {
  state.question = dialog;
  changed();
}

export const ENDED_KEPT = 1000; // as many as the daemon keeps

/** The id by which a request is found. Requests that were refused at once have only the client's own, if any. */
export const idOf = (record) => record.id ?? record.request_id;

const endOf = ({ at, total_ms: total }) => at * 1000 + total;

/** Take in requests that ended: one just now, or a list of which some may be known. */
export function keepEnded(records) {
  for (const record of records) state.ended.set(idOf(record), record);
  if (records.length > 1) state.ended = new Map([...state.ended].sort(([, left], [, right]) => endOf(left) - endOf(right)));
  for (const id of state.ended.keys()) {
    if (state.ended.size <= ENDED_KEPT) break;
    state.ended.delete(id);
  }
}
