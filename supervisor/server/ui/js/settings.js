// The settings of a model, for its next load alone or in the configuration. A bar shows the memory of such a load.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { load } from "./actions.js";
import { answerOf, call } from "./api.js";
import { addedLines, afterCheck, Diff, isOvertaken, WhyLocked, WhyNotSaved } from "./edit-parts.js";
import { mib, plural } from "./format.js";
import { checkEdit, readModelSettings, saveEdit } from "./operations.js";
import { Empty, Snippet, useWork } from "./parts.js";
import { askToRemove } from "./removing.js";
import { notify, state } from "./state.js";

const PAUSE_MS = 400; // after the last key, before the request
const SUMMARIES = { fits: "evicts nothing", evicts: "evicts", waits: "waits for", refused: "does not fit" };

// What most people set, whatever the runtime calls it; all other keys are folded.
const COMMON = {
  ...Object.fromEntries(["n_ctx", "max_model_len", "context_length", "max_seq_len", "max_total_tokens"].map((key) => [key, "Context, in tokens"])),
  ...Object.fromEntries(["parallel", "max_num_seqs", "max_running_requests", "max_batch_size", "max_concurrent_requests"].map((key) => [key, "Slots"])),
  ...Object.fromEntries(["cache_type_k", "type_k"].map((key) => [key, "KV type, keys"])),
  ...Object.fromEntries(["cache_type_v", "type_v"].map((key) => [key, "KV type, values"])),
  ...Object.fromEntries(["kv_cache_dtype", "cache_mode", "cache_quant"].map((key) => [key, "KV type"])),
  n_gpu_layers: "Layers on the GPU",
  devices: "Devices",
  gpus: "GPUs",
  keep_alive_s: "Keep-alive, in seconds",
  pin: "Never evict",
};

const shown = (value) => (value === null || value === undefined ? "" : Array.isArray(value) ? value.join(", ") : String(value));
const words = (text) => text.split(",").map((word) => word.trim()).filter(Boolean);
const choices = (rule) => (rule.type === "boolean" ? [true, false] : rule.enum);

/** A text of the form as the API takes it; null: the default. */
function parsed(text, rule) {
  if (text.trim() === "") return null;
  if (rule.type === "array") return words(text);
  if (rule.type === "boolean") return text === "true";
  return rule.type === "string" || Number.isNaN(Number(text)) ? text.trim() : Number(text);
}

function Field({ setting: { key, schema: rule, description, written, value }, text, problem, onInput }) {
  const isNumber = rule.type === "integer" || rule.type === "number";
  const attributes = { id: `setting-${key}`, value: text, onInput: (event) => onInput(event.target.value), "aria-invalid": problem ? "true" : null };
  const unset = written === null ? shown(value) || "default" : "default";
  return html`<label for=${attributes.id} title=${description}>${COMMON[key] ? html`<span>${COMMON[key]} <code>${key}</code></span>` : key}
    ${choices(rule)
      ? html`<select ...${attributes}><option value="">${unset}</option>${choices(rule).map((choice) => html`<option key=${choice} value=${String(choice)} selected=${String(choice) === text}>${String(choice)}</option>`)}</select>`
      : html`<input ...${attributes} inputmode=${isNumber ? "decimal" : null} autocomplete="off" spellcheck="false" placeholder=${unset} />`}
    ${problem && html`<span class="problem">${problem}</span>`}
  </label>`;
}

/** "would take 9.8 of 16 GiB on GPU 0, evicts nothing". */
function Fit({ fit }) {
  const { outcome, rooms, others, why } = fit;
  const needed = rooms.reduce((sum, { need_mib }) => sum + need_mib, 0);
  const usable = rooms.reduce((sum, { usable_mib }) => sum + usable_mib, 0);
  const amount = rooms.length ? `would take ${mib(needed)} of ${mib(usable)} on ${rooms.map(({ name }) => name).join(" + ")}, ` : "";
  const text = `${amount}${SUMMARIES[outcome]}${outcome !== "refused" && others.length ? ` ${others.join(", ")}` : ""}`;
  return html`<div class=${`fit ${outcome}`} role="status" title=${why}>
    ${rooms.length > 0 && html`<meter min="0" max=${usable} value=${Math.min(needed, usable)} aria-label="Memory that it would take"></meter>`}
    <span>${text}</span>
  </div>`;
}

/** The text that a check says is wrong with a key; what concerns none of the fields. */
function problemsOf(checked, name, keys) {
  const own = new Map();
  const rest = [];
  for (const { key, message } of checked?.marks ?? []) {
    const found = keys.find((known) => key === `models.${name}.${known}` || key.startsWith(`models.${name}.${known}.`));
    if (found) own.set(found, message);
    else rest.push(key ? `${key}: ${message}` : message);
  }
  return [own, rest];
}

/** Where nothing can be saved: what a load takes, from the model's own view. */
const forLoads = (model) => ({
  settings: Object.entries(model.load_constraints ?? {}).map(([key, schema]) => ({ key, schema, description: "", written: null, value: model.definition?.[key] ?? null })),
  names: [],
  other_names: [],
});

function Form({ model, editable, refused, again }) {
  const { name } = model;
  const before = Object.fromEntries(editable.settings.map(({ key, written }) => [key, shown(written)]));
  // The typed texts, by key; at first the settings of the last "Load once". Other keys are as in the file.
  const [typed, setTyped] = useState(() => Object.fromEntries(Object.entries(model.overrides ?? {}).map(([key, value]) => [key, shown(value)])));
  const [typedNames, setNames] = useState(null);
  const textOf = (key) => typed[key] ?? before[key] ?? "";
  const names = typedNames ?? editable.names.join(", ");
  const [checked, setChecked] = useState(null);
  const [fit, setFit] = useState(null); // of the last check without a mistake
  const [trouble, setTrouble] = useState(null);
  const changed = editable.settings.filter(({ key }) => textOf(key) !== before[key]);
  const keys = Object.fromEntries(changed.map(({ key, schema }) => [key, parsed(textOf(key), schema)]));
  const edit = { model: name, keys, ...(names === editable.names.join(", ") ? {} : { names: words(names) }) };
  const isChanged = changed.length > 0 || "names" in edit;
  const body = JSON.stringify(edit);
  useEffect(() => {
    if (refused) return;
    const controller = new AbortController();
    const timer = setTimeout(
      () =>
        answerOf(checkEdit(), { body: edit, signal: controller.signal }).then(
          (found) => (setChecked(found), setTrouble(afterCheck(null)), found.fit && setFit(found.fit)),
          (error) => error.name !== "AbortError" && (setChecked(null), setTrouble(afterCheck(error))),
        ),
      isChanged ? PAUSE_MS : 0,
    );
    return () => (clearTimeout(timer), controller.abort());
  }, [body, editable]);
  const readAgain = () => again().then(() => (setChecked(null), setTrouble(null)));
  const takeBack = () => (setTyped({}), setNames(null), setTrouble(null));
  const [save, saving] = useWork(async (signal) => {
    try {
      await call(saveEdit(), { body: edit, signal, headers: { "if-match": editable.etag } });
    } catch (error) {
      if (error.status === 401 || error.name === "AbortError") throw error;
      setTrouble(error);
      return;
    }
    notify(`${name} is saved.`);
    await again();
    takeBack();
  });
  const loadable = new Set(Object.keys(model.load_constraints ?? {}));
  const forLoad = Object.fromEntries(Object.entries(keys).filter(([key, value]) => loadable.has(key) && value !== null));
  const [own, rest] = problemsOf(checked, name, editable.settings.map(({ key }) => key));
  const field = (setting) => html`<${Field} key=${setting.key} setting=${setting} text=${textOf(setting.key)} problem=${own.get(setting.key)} onInput=${(text) => setTyped({ ...typed, [setting.key]: text })} />`;
  const folded = editable.settings.filter(({ key }) => !COMMON[key]);
  const mayNotSave = saving || isOvertaken(trouble) || refused || editable.locked || !isChanged || !checked || checked.marks.length + checked.guarded.length > 0;
  return html`<form class="settings-form stack" onSubmit=${(event) => (event.preventDefault(), mayNotSave || save())}>
    ${refused ? html`<${WhyLocked} error=${refused} />` : editable.locked && html`<p class="hint">Nothing can be saved here: ${editable.locked}. What you set here can be copied, to be entered where the file comes from.</p>`}
    ${fit && html`<${Fit} fit=${fit} />`}
    <div class="fields">${editable.settings.filter(({ key }) => COMMON[key]).map(field)}</div>
    <details><summary>${plural(folded.length, "further setting")}</summary><div class="fields">${folded.map(field)}</div></details>
    ${!refused && html`<label>Further names <span class="hint">Separated by commas. ${editable.other_names.length > 0 && `With settings of their own, which are edited as text: ${editable.other_names.join(", ")}.`}</span>
      <input value=${names} autocomplete="off" spellcheck="false" onInput=${(event) => setNames(event.target.value)} /></label>`}
    ${rest.length > 0 && html`<ul class="mistakes" role="alert">${rest.map((text) => html`<li>${text}</li>`)}</ul>`}
    ${checked?.notes.map((note) => html`<p class="problem">${note}</p>`)}
    ${trouble && html`<${WhyNotSaved} error=${trouble} onAgain=${readAgain} />`}
    ${isChanged && checked?.diff && html`<details open=${Boolean(editable.locked)}><summary>What is written</summary><${Diff} text=${checked.diff} /></details>`}
    ${isChanged && editable.locked && checked?.diff && html`<${Snippet} label="lines to enter" text=${addedLines(checked.diff)} />`}
    ${isChanged && checked?.difference?.stops.length > 0 && html`<p class="hint">Saving ends ${plural(checked.difference.stops.length, "worker")} after the running requests: ${checked.difference.stops.map((stop) => stop.model).join(", ")}.</p>`}
    <div class="buttons">
      ${editable.etag && html`<button type="button" class="danger apart" onClick=${() => askToRemove(name, editable.etag, again)}>Take out…</button>`}
      ${isChanged && html`<button type="button" class="quiet" onClick=${takeBack}>Take back</button>`}
      <button type="button" disabled=${loadable.size === 0} title="Until it is unloaded; the configuration stays as it is" onClick=${() => load(name, forLoad)}>Load once</button>
      <button type="submit" class="primary" disabled=${mayNotSave} title="Into the configuration">Save</button>
    </div>
  </form>`;
}

export function Settings({ model }) {
  const [editable, setEditable] = useState(null); // the settings; null: not known yet
  const [refused, setRefused] = useState(null); // why this page may not even look
  const again = () =>
    answerOf(readModelSettings(model.name)).then(
      (found) => (setEditable(found), setRefused(null)),
      (error) => error.status !== 401 && setRefused(error),
    );
  useEffect(() => void again(), [model.name, state.link, state.reloads]);
  if (refused) return html`<${Form} model=${model} editable=${forLoads(model)} refused=${refused} again=${again} />`;
  if (!editable) return html`<${Empty}>Asking…<//>`;
  return html`<${Form} model=${model} editable=${editable} again=${again} />`;
}
