// The configuration as text: mistakes as marks, the difference before it is written, the last versions to go back to.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { answerOf, call } from "./api.js";
import { afterCheck, Diff, isOvertaken, WhyLocked, WhyNotSaved } from "./edit-parts.js";
import { plural } from "./format.js";
import { checkEdit, getVersion, readFile, saveEdit } from "./operations.js";
import { copy, Empty, Select, useWork, Warnings } from "./parts.js";
import { notify, state } from "./state.js";

const PAUSE_MS = 600; // after the last key, before the request

let draft = null; // {text, file}: what isn't saved yet, and of which file it was made; also while another page is shown

addEventListener("beforeunload", (event) => draft && event.preventDefault());

/** A text area with line numbers, of which those with mistakes are marked. */
function Editor({ area, text, marks, readOnly, onInput }) {
  const gutter = useRef(null);
  const wrong = new Set(marks.map(({ line }) => line));
  const count = text.split("\n").length;
  return html`<div class="editor">
    <div class="gutter" ref=${gutter} aria-hidden="true">${Array.from({ length: count }, (_, index) => html`<span key=${index} class=${wrong.has(index + 1) ? "wrong" : ""}>${index + 1}</span>`)}</div>
    <textarea ref=${area} wrap="off" spellcheck="false" autocapitalize="off" autocomplete="off" aria-label="The configuration as YAML" readonly=${readOnly} value=${text}
      onInput=${(event) => onInput(event.target.value)} onScroll=${(event) => (gutter.current.scrollTop = event.target.scrollTop)} />
  </div>`;
}

/** Put the caret on a line, and scroll there. */
function showLine(area, line) {
  const lines = area.value.split("\n");
  const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
  area.focus();
  area.setSelectionRange(start, start + (lines[line - 1]?.length ?? 0));
  area.scrollTop = (line - 4) * (area.scrollHeight / lines.length);
}

const Marks = ({ marks, onShow }) => marks.length > 0 && html`<ul class="mistakes" aria-label="Mistakes">
  ${marks.map(({ line, column, key, message }) => html`<li key=${`${line} ${column} ${key} ${message}`}>${line > 0 ? html`<button class="small" onClick=${() => onShow(line)}>line ${line}</button> ` : ""}${key && html`<code>${key}</code> `}${message}</li>`)}
</ul>`;

const HEADINGS = [
  ["added", "Adds"],
  ["removed", "Removes"],
  ["changed", "Changes"],
  ["settings", "Settings"],
  ["needs_restart", "Only after a restart"],
];

/** The changes that a reload of this text would make. */
const Effect = ({ difference }) => html`<dl class="facts">
  ${HEADINGS.filter(([name]) => difference[name].length).map(([name, title]) => html`<dt>${title}</dt><dd>${difference[name].join(", ")}</dd>`)}
  ${difference.stops.length > 0 && html`<dt>Ends for it</dt><dd>${difference.stops.map(({ model }) => model).join(", ")}</dd>`}
</dl>`;

function Versions({ versions, current, onChosen }) {
  const [chosen, setChosen] = useState("");
  const options = versions.filter(({ id }) => !current.includes(id.split("-")[1])).map(({ id, at, bytes }) => [id, `${new Date(at * 1000).toLocaleString()}, ${plural(bytes, "byte")}`]);
  if (options.length === 0) return null;
  const choose = (id) => (setChosen(""), id && onChosen(id));
  return html`<${Select} label="Go back to" value=${chosen} options=${[["", "a version…"], ...options]} onChange=${choose} />`;
}

export function ConfigurationPage() {
  const [file, setFile] = useState(draft?.file ?? null);
  const [refused, setRefused] = useState(null);
  const [text, setText] = useState(draft?.text ?? "");
  const [checked, setChecked] = useState(null);
  const [trouble, setTrouble] = useState(null);
  const area = useRef(null);
  const read = () =>
    answerOf(readFile()).then(
      (found) => {
        setFile(found);
        setRefused(null);
        if (draft) draft.file = found;
        else setText(found.text);
        setChecked(null);
        setTrouble(null);
      },
      (error) => error.status !== 401 && setRefused(error),
    );
  useEffect(() => void (draft || read()), [state.link, state.reloads]);
  const isChanged = file !== null && text !== file.text;
  const change = (value) => {
    setText(value);
    draft = value === file.text ? null : { text: value, file };
  };
  useEffect(() => {
    if (!isChanged) return void setChecked(null);
    const controller = new AbortController();
    const timer = setTimeout(
      () => answerOf(checkEdit(), { body: { text }, signal: controller.signal }).then((found) => (setChecked(found), setTrouble(afterCheck(null))), (error) => error.name !== "AbortError" && setTrouble(afterCheck(error))),
      PAUSE_MS,
    );
    return () => (clearTimeout(timer), controller.abort());
  }, [text, file]);
  const [save, saving] = useWork(async (signal, force) => {
    try {
      await call(saveEdit(), { body: { text, force }, signal, headers: { "if-match": file.etag } });
    } catch (error) {
      if (error.status === 401 || error.name === "AbortError") throw error;
      setTrouble(error);
      return;
    }
    draft = null;
    notify("The configuration is saved, and in force.");
    await read();
  });
  const goBack = (id) => answerOf(getVersion(id)).then((found) => change(found.text), (error) => notify(error.message, "bad"));
  if (refused) return html`<h1 class="unseen">Configuration</h1><section class="panel"><${WhyLocked} error=${refused} /></section>`;
  if (!file) return html`<${Empty}>Asking…<//>`;
  const marks = checked?.marks ?? [];
  const guarded = checked?.guarded ?? [];
  const mayForce = marks.length > 0 && marks.every(({ message }) => message.includes("--force"));
  const mayNotSave = saving || isOvertaken(trouble) || !isChanged || !checked || checked.text.replaceAll("\r\n", "\n") !== text || file.locked !== null || guarded.length > 0;
  return html`<h1 class="unseen">Configuration</h1>
    <section class="panel stack" aria-labelledby="configuration-title" aria-busy=${saving}>
      <div class="title"><h2 id="configuration-title">Configuration <small>${file.path}</small></h2><${Versions} versions=${file.versions} current=${file.etag} onChosen=${goBack} /></div>
      ${file.locked !== null && html`<p class="hint">It can't be changed from here: ${file.locked}. What you write is checked, and can be copied.</p>`}
      ${file.locked === null && file.edit === "safe" && html`<p class="hint" title=${file.guarded_keys.join(", ")}>Keys that name a program, its arguments or environment, and the section <code>server</code>, are read-only here. <code>server.edit: all</code> opens them.</p>`}
      <${Editor} area=${area} text=${text} marks=${marks} onInput=${change} />
      <${Marks} marks=${marks} onShow=${(line) => showLine(area.current, line)} />
      ${guarded.length > 0 && html`<p class="problem" role="alert">Read-only here: ${guarded.join(", ")}.</p>`}
      ${trouble && html`<${WhyNotSaved} error=${trouble} onAgain=${read} />`}
      ${isChanged && checked?.diff && html`<${Diff} text=${checked.diff} />`}
      ${isChanged && file.locked !== null && html`<div class="buttons start"><button onClick=${() => copy(text)}>Copy the text</button></div>`}
      ${isChanged && checked?.difference && html`<${Effect} difference=${checked.difference} /><${Warnings} texts=${checked.difference.warnings} />`}
      <div class="buttons">
        ${isChanged && html`<button class="quiet" onClick=${() => change(file.text)}>Take back</button>`}
        ${mayForce && html`<button class="danger" disabled=${mayNotSave} onClick=${() => save(true)}>Save all the same</button>`}
        <button class="primary" disabled=${mayNotSave || marks.length > 0} onClick=${() => save(false)}>Save</button>
      </div>
    </section>`;
}
