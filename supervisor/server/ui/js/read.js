// Answers that the stream of events doesn't have: read when they are shown, and again every few seconds.

import { useEffect, useState } from "../vendor/htm-preact.js";
import { get } from "./api.js";
import { state } from "./state.js";

const AGAIN_MS = 3000;

/** Ask for an operation or a path, and again when it or one of `inputs` changes; null: for nothing. Of several questions the answer to the last one counts. */
export function useAnswer(operation, keep, fail = () => {}, inputs = []) {
  const path = operation?.path ?? operation;
  useEffect(() => {
    if (path === null) return;
    const controller = new AbortController();
    get(path, { signal: controller.signal }).then(keep, (error) => error.name === "AbortError" || fail(error));
    return () => controller.abort();
  }, [path, ...inputs]);
}

/** `[what this operation answers, read again]`; null until it has answered. */
export function useRead({ path }) {
  const [answer, setAnswer] = useState(null);
  const read = () => get(path).then(setAnswer, () => {}); // the header shows that the daemon doesn't answer
  useEffect(() => {
    read();
    const timer = setInterval(() => document.hidden || read(), AGAIN_MS);
    return () => clearInterval(timer);
  }, [path, state.link]);
  return [answer, read];
}
