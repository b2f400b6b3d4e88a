// What a model's worker writes: as it grows, to search, to wrap, to download.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { events, modelPath, send } from "./api.js";
import { plural } from "./format.js";
import { Empty } from "./parts.js";
import { notify } from "./state.js";

const LINES = 1000; // at first
const LINES_KEPT = 5000;
const LINES_SAVED = 10000; // the most that the daemon gives at once
const AT_END = 24; // pixels

/** The lines of the log: its tail, then each new one. null: none are to be had. */
function useLines(name) {
  const [lines, setLines] = useState([]);
  useEffect(() => {
    const controller = new AbortController();
    let arrived = [];
    const show = () => {
      const added = arrived;
      arrived = [];
      setLines((kept) => [...kept, ...added].slice(-LINES_KEPT));
    };
    const read = async () => {
      const response = await send("GET", modelPath(name, `/logs?lines=${LINES}&follow=true`), { signal: controller.signal });
      for await (const { data } of events(response)) {
        if (arrived.length === 0) setTimeout(show, 50); // many lines come at once: one drawing for all
        arrived.push(data);
      }
    };
    setLines([]);
    read().catch((error) => error.name !== "AbortError" && setLines((kept) => (kept.length ? kept : null)));
    return () => controller.abort();
  }, [name]);
  return lines;
}

async function download(name) {
  const text = await (await send("GET", modelPath(name, `/logs?lines=${LINES_SAVED}`))).text();
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  Object.assign(document.createElement("a"), { href: url, download: `${name.replace(/[^\w.-]+/g, "_")}.log` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** The text in pieces: every second one is what was searched for. */
function pieces(lines, wanted, only) {
  const found = wanted ? new RegExp(`(${wanted.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")})`, "gi") : null;
  const matching = found ? lines.filter((line) => line.search(found) !== -1) : lines;
  const text = (only && found ? matching : lines).join("\n");
  return { parts: found ? text.split(found) : [text], matching: matching.length };
}

const Check = ({ label, checked, onChange }) => html`<label class="check"><input type="checkbox" checked=${checked} onChange=${(event) => onChange(event.target.checked)} />${label}</label>`;

export function Log({ model }) {
  const lines = useLines(model.name);
  const [wanted, setWanted] = useState("");
  const [only, setOnly] = useState(false);
  const [wrap, setWrap] = useState(localStorage.getItem("llmux.wrap") !== "no");
  const [follows, setFollows] = useState(true);
  const place = useRef(null);
  const at = useRef(-1); // which of the places found was gone to last
  const { parts, matching } = useMemo(() => pieces(lines ?? [], wanted, only), [lines, wanted, only]);
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
  if (!lines?.length) return html`<${Empty}>${lines ? "The log is empty." : "There is no log yet."}<//>`;
  return html`<div class="log-tools">
      <input type="search" placeholder="Search; Enter goes on" aria-label="Search the log" value=${wanted} onInput=${search} onKeyDown=${goOn} />
      <span class="muted num" role="status">${wanted ? plural(matching, "line") : ""}</span>
      <${Check} label="Only these" checked=${only} onChange=${setOnly} />
      <${Check} label="Wrap" checked=${wrap} onChange=${setWrapped} />
      <${Check} label="Follow" checked=${follows} onChange=${setFollows} />
      <button class="small" onClick=${() => download(model.name).catch((error) => notify(error.message, "bad"))}>Download</button>
    </div>
    <pre class=${`log ${wrap ? "wrapped" : ""}`} ref=${place} tabindex="0" role="log" aria-label=${`Log of ${model.name}`} onScroll=${scrolled}>${parts.map((part, index) => (index % 2 ? html`<mark>${part}</mark>` : part))}</pre>`;
}
