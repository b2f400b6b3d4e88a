// The operator's corner: the daemon's version, start and files; and a reload, which shows its changes first.

import { html, useState } from "../vendor/htm-preact.js";
import { answerOf } from "./api.js";
import { duration, now, plural } from "./format.js";
import { Empty, Snippet, useWork, Warnings } from "./parts.js";
import { readInfo, reloadConfiguration } from "./operations.js";
import { useAnswer } from "./read.js";
import { notify, state } from "./state.js";

function useInfo() {
  const [info, setInfo] = useState(null);
  useAnswer(
    state.link === "locked" || state.link === "offline" ? null : readInfo(),
    (found) => setInfo({ ...found, since: now() - found.uptime_s }),
    (error) => error.status === 401 || notify(error.message, "bad"),
    [state.link],
  );
  return info;
}

const KINDS = { configuration: "the configuration", tasks: "tasks", local: "changes on this machine", api_keys: "API keys" };

function Facts({ info }) {
  const facts = [
    ["Version", `llmux ${info.version}, Python ${info.python}`],
    ["Up", `${duration(state.at - info.since)}, since ${new Date(info.since * 1000).toLocaleString()}`],
    ["Process", `pid ${info.pid}`],
    ["Listens on", `${info.host}, port ${info.port}`],
    ["Keeps its state in", info.state_dir],
    ["Reloads by itself", info.watch ? "when a file below changes" : "no: set server.watch, or reload here"],
  ];
  return html`<dl class="facts">${facts.map(([name, text]) => html`<dt>${name}</dt><dd>${text}</dd>`)}</dl>
    <h3>Files</h3>
    <div class="files">${info.configuration.map(({ path, kind, exists }) => html`<div><small>${KINDS[kind]}${exists ? "" : ": not there"}</small><${Snippet} label=${`path of ${KINDS[kind]}`} text=${path} /></div>`)}</div>`;
}

const Names = ({ title, names }) => names.length > 0 && html`<dt>${title}</dt><dd>${names.join(", ")}</dd>`;

const stopText = ({ model, in_flight: running, queued, drain_s: drain }) =>
  `${model}${running ? ` (${plural(running, "request")} may run ${duration(drain)} more)` : ""}${queued ? ` (${plural(queued, "request")} waiting)` : ""}`;

/** The changes that a reload makes, or made. */
function Difference({ difference, done }) {
  const { added, removed, changed, stops, settings, needs_restart: later, unchanged, warnings } = difference;
  const nothing = [added, removed, changed, settings, later].every((names) => names.length === 0);
  return html`<p role="status">${done ? "The configuration was reloaded." : "The configuration is right."} ${nothing ? `Nothing ${done ? "has changed" : "would change"}.` : `${plural(unchanged, "model")} ${done ? "stayed" : "would stay"} as ${unchanged === 1 ? "it is" : "they are"}.`}</p>
    ${!nothing && html`<dl class="facts">
      <${Names} title="Added" names=${added} />
      <${Names} title="Removed" names=${removed} />
      <${Names} title="Changed" names=${changed} />
      <${Names} title="Workers that end for it" names=${stops.map(stopText)} />
      <${Names} title="Settings" names=${settings} />
      <${Names} title="Only after a restart" names=${later} />
    </dl>`}
    <${Warnings} texts=${warnings} />`;
}

function Reload() {
  const [result, setResult] = useState(null); // {difference, done} or {problems, done}
  const [run, busy] = useWork(async (signal, body) => {
    const done = !body.dry_run;
    setResult(null);
    try {
      setResult({ difference: await answerOf(reloadConfiguration(), { body, signal }), done });
    } catch (error) {
      if (error.code !== "invalid_configuration") throw error;
      setResult({ problems: error.detail ?? [error.message], done });
    }
  });
  const mayForce = result?.problems?.every((problem) => problem.includes("--force"));
  return html`<section class="panel stack" aria-labelledby="reload-title" aria-busy=${busy}>
    <h2 id="reload-title">Configuration</h2>
    <div class="buttons start">
      <button disabled=${busy} onClick=${() => run({ dry_run: true })}>Check</button>
      <button class="primary" disabled=${busy} onClick=${() => run({})}>Reload</button>
      ${mayForce && html`<button class="danger" disabled=${busy} onClick=${() => run({ force: true })}>Reload all the same</button>`}
    </div>
    ${busy && html`<p class="waiting" role="status">Reading the files…</p>`}
    ${!busy && !result && html`<p class="hint">Check reads the files and says what a reload would do. Models that didn't change keep their workers.</p>`}
    ${result?.difference && html`<${Difference} ...${result} />`}
    ${result?.problems && html`<p class="problem" role="alert">${plural(result.problems.length, "mistake")}. ${result.done ? "Nothing was changed: the configuration from before is still in effect." : "A reload would change nothing."}</p>
      <ul class="mistakes">${result.problems.map((problem) => html`<li><code>${problem}</code></li>`)}</ul>`}
  </section>`;
}

export function DaemonPage() {
  const info = useInfo();
  return html`<h1 class="unseen">Daemon</h1>
    <div class="columns">
      <section class="panel stack" aria-labelledby="daemon-title">
        <h2 id="daemon-title">This daemon</h2>
        ${info ? html`<${Facts} info=${info} />` : html`<${Empty}>Asking…<//>`}
      </section>
      <${Reload} />
    </div>`;
}
