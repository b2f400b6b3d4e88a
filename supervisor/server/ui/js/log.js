// What a model's worker writes: as it grows, to search, to wrap, to download.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { call, events } from "./api.js";
import { plural } from "./format.js";
import { pause } from "./live.js";
import { readLogs } from "./operations.js";
import { Empty } from "./parts.js";
import { notify, state } from "./state.js";

const LINES = 1000; // at first
const LINES_KEPT = 5000;
const LINES_SAVED = 10000; // the most that the daemon gives at once
const OLDER = `[older lines are not shown; Download has the last ${LINES_SAVED}]`;
const AGAIN_MS = 1000;
const AT_END = 24; // pixels

/** `[lines, trouble]`: the tail of the log, then each new line, also after a broken connection; and why none come just now. */
function useLines(name) {
  const [lines, setLines] = useState([]);
  const [trouble, setTrouble] = useState(null);
  useEffect(() => {
    const controller = new AbortController();
    const { signal } = controller;
    let arrived = [];
    let last = null; // the id of the last line taken in, after which the daemon goes on
    const show = () => {
      const added = arrived;
      arrived = [];
      setLines((kept) => {
        const all = [...kept, ...added];
        return all.length > LINES_KEPT ? [OLDER, ...all.slice(1 - LINES_KEPT)] : all;
      });
    };
    const read = async () => {
      const response = await call(readLogs(name, { lines: LINES, follow: true }), { signal, headers: last ? { "last-event-id": last } : {} });
      setTrouble(null);
      const begun = []; // lines up to the next id: without it they come again
      for await (const { data, id } of events(response)) {
        begun.push(data);
        if (id === null || id === last) continue;
        last = id;
        if (arrived.length === 0) setTimeout(show, 50); // many lines come at once: one drawing for all
        arrived.push(...begun.splice(0));
      }
      throw new Error("The daemon ended.");
    };
    const follow = async () => {
      while (!signal.aborted) {
        if (state.link !== "locked") await read().catch((error) => error.name !== "AbortError" && setTrouble(error.message));
        await pause(AGAIN_MS, signal);
      }
    };
    setLines([]);
    follow();
    return () => controller.abort();
  }, [name]);
  return [lines, trouble && `${trouble} Trying again.`];
}

async function download(name) {
  const text = await (await call(readLogs(name, { lines: LINES_SAVED }))).text();
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  Object.assign(document.createElement("a"), { href: url, download: `${name.replace(/[^\w.-]+/g, "_")}.log` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** The text in pieces: every second one is a match of the search. */
function pieces(lines, wanted, only) {
  const found = wanted ? new RegExp(`(${wanted.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")})`, "gi") : null;
  const matching = found ? lines.filter((line) => line.search(found) !== -1) : lines;
  const text = (only && found ? matching : lines).join("\n");
  return { parts: found ? text.split(found) : [text], matching: matching.length };
}

const Check = ({ label, checked, onChange }) => html`<label class="check"><input type="checkbox" checked=${checked} onChange=${(event) => onChange(event.target.checked)} />${label}</label>`;

export function Log({ model }) {
  const [lines, trouble] = useLines(model.name);
  const [wanted, setWanted] = useState("");
  const [only, setOnly] = useState(false);
  const [wrap, setWrap] = useState(localStorage.getItem("llmux.wrap") !== "no");
  const [follows, setFollows] = useState(true);
  const place = useRef(null);
  const at = useRef(-1); // which of the places found was gone to last
  const { parts, matching } = useMemo(() => pieces(lines, wanted, only), [lines, wanted, only]);
  useEffect(() => {
    if (follows && place.current) place.current.scrollTop = place.current.scrollHeight;
  }, [parts, follows, wrap]);
  const scrolled = ({ target }) => setFollows(target.scrollHeight - target.scrollTop - target.clientHeight < AT_END);
  const search = (event) => ((at.current = -1), setWanted(event.target.value));
  const goOn = (event) => {
    if (event.key !== "Enter") return;
    const marks = place.current?.querySelectorAll("mark") ?? [];
    if (marks.length === 0) return;
    marks[at.current]?.classList.remove("here");
    at.current = (at.current + (event.shiftKey ? -1 : 1) + marks.length) % marks.length;
    marks[at.current].classList.add("here");
    marks[at.current].scrollIntoView({ block: "center" });
  };
  const setWrapped = (value) => {
    localStorage.setItem("llmux.wrap", value ? "yes" : "no");
    setWrap(value);
  };
  if (lines.length === 0) return html`<${Empty}>${trouble ?? "The log is empty."}<//>`;
  return html`<div class="log-tools">
      <input type="search" placeholder="Search; Enter goes on" aria-label="Search the log" value=${wanted} onInput=${search} onKeyDown=${goOn} />
      <span class="muted num" role="status">${wanted ? plural(matching, "line") : ""}</span>
      <${Check} label="Only these" checked=${only} onChange=${setOnly} />
      <${Check} label="Wrap" checked=${wrap} onChange=${setWrapped} />
      <${Check} label="Follow" checked=${follows} onChange=${setFollows} />
      <button class="small" onClick=${() => download(model.name).catch((error) => notify(error.message, "bad"))}>Download</button>
    </div>
    ${trouble && html`<p class="problem" role="alert">${trouble}</p>`}
    <pre class=${`log ${wrap ? "wrapped" : ""}`} ref=${place} tabindex="0" role="log" aria-label=${`Log of ${model.name}`} onScroll=${scrolled}>${parts.map((part, index) => (index % 2 ? html`<mark>${part}</mark>` : part))}</pre>`;
}
