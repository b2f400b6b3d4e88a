// The frame: pages by the address after "#", the key dialog, notices, theme, shortcuts.

import { html, render, useEffect, useReducer, useRef, useState } from "../vendor/htm-preact.js";
import { physical } from "./colours.js";
import { ConfigurationPage } from "./configuration.js";
import { Connect } from "./connect.js";
import { DaemonPage } from "./daemon.js";
import { DecisionsPage } from "./decisions.js";
import { KeyDialog } from "./key.js";
import { start } from "./live.js";
import { ModelDialog } from "./model.js";
import { Overview } from "./overview.js";
import { Icon } from "./parts.js";
import { Playground } from "./playground/playground.js";
import { RequestDialog } from "./request.js";
import { RequestsPage } from "./request-list.js";
import { go, parts } from "./route.js";
import { HelpDialog, listen } from "./shortcuts.js";
import { dismiss, state, subscribe } from "./state.js";
import { UsagePage } from "./usage.js";

const PAGES = [
  { path: "", title: "Overview" },
  { path: "playground", title: "Playground" },
  { path: "requests", title: "Requests" },
  { path: "usage", title: "Usage" },
  { path: "decisions", title: "Decisions" },
  { path: "connect", title: "Connect" },
  { path: "configuration", title: "Configuration" },
  { path: "daemon", title: "Daemon" },
];
const LINKS = {
  connecting: "Connecting",
  live: "Live",
  polling: "Polling",
  offline: "Offline",
  locked: "Locked",
};

const THEMES = ["", "light", "dark"];
const THEME_ICONS = { "": "auto", light: "sun", dark: "moon" };
const THEME_NAMES = { "": "as the system", light: "light", dark: "dark" };

function useTheme() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "");
  const next = () => {
    const chosen = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    if (chosen) document.documentElement.dataset.theme = chosen;
    else delete document.documentElement.dataset.theme;
    if (chosen) localStorage.setItem("llmux.theme", chosen);
    else localStorage.removeItem("llmux.theme");
    setTheme(chosen);
  };
  return [theme, next];
}

/** `[page, drawer]`, each the parts of an address: a drawer lies over the page from which it was opened. */
function usePlaces() {
  const below = useRef(null);
  const here = parts();
  const isDrawer = here[0] === "models" || (here[0] === "requests" && here[1]);
  if (!isDrawer) below.current = here;
  return [below.current ?? [here[0] === "requests" ? "requests" : ""], isDrawer ? here : null];
}

function App() {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [help, setHelp] = useState(false);
  const [theme, nextTheme] = useTheme();
  useEffect(() => subscribe(redraw), []);
  useEffect(() => {
    addEventListener("hashchange", redraw);
    return () => removeEventListener("hashchange", redraw);
  }, []);
  useEffect(
    () =>
      listen({
        "?": () => setHelp(true),
        t: nextTheme,
        ...Object.fromEntries(PAGES.map(({ path }, index) => [`${index + 1}`, () => go(path)])),
      }),
    [theme],
  );
  const [[page, detail, more], drawer] = usePlaces();
  const model = drawer?.[0] === "models" ? physical(drawer[1]) : null;
  const back = () => go(...[page, detail, more].slice(0, more ? 3 : detail ? 2 : 1));
  const shown = PAGES.some(({ path }) => path === page) ? page : ""; // whatever else is asked for: the overview
  useEffect(() => {
    const title = PAGES.find(({ path }) => path === shown)?.title;
    document.title = title ? `${title} · llmux` : "llmux";
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); // on a narrow page
  }, [shown]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.getElementById("main").focus())}>Skip to content</a>
    <header class="top">
      <a class="brand" href="#/"><img src="icon.svg" alt="" width="22" height="22" />llmux</a>
      <nav aria-label="Pages">
        ${PAGES.map(
          ({ path, title }) =>
            html`<a href=${`#/${path}`} aria-current=${path === shown ? "page" : null}>${title}</a>`,
        )}
      </nav>
      <span class=${`link ${state.link}`} role="status" title=${state.trouble ?? ""}>${LINKS[state.link]}</span>
      <button class="quiet square" onClick=${nextTheme} aria-label=${`Theme: ${THEME_NAMES[theme]}`} title=${`Theme: ${THEME_NAMES[theme]} (t)`}>
        <${Icon} name=${THEME_ICONS[theme]} />
      </button>
      <button class="quiet square" onClick=${() => setHelp(true)} aria-label="Keyboard shortcuts" title="Keyboard shortcuts (?)">
        <${Icon} name="help" />
      </button>
    </header>
    <main id="main" tabindex="-1">
      ${state.link === "offline" && html`<p class="banner" role="alert">${state.trouble} Trying again.</p>`}
      ${shown === "" && html`<${Overview} />`}
      ${shown === "playground" && html`<${Playground} kind=${detail} />`}
      ${shown === "requests" && html`<${RequestsPage} />`}
      ${shown === "usage" && html`<${UsagePage} />`}
      ${shown === "decisions" && html`<${DecisionsPage} model=${detail} chosen=${more} />`}
      ${shown === "connect" && html`<${Connect} />`}
      ${shown === "configuration" && html`<${ConfigurationPage} />`}
      ${shown === "daemon" && html`<${DaemonPage} />`}
    </main>
    ${model && html`<${ModelDialog} key=${model.name} name=${model.name} tab=${drawer[2]} onClose=${back} />`}
    ${drawer?.[0] === "requests" && html`<${RequestDialog} key=${drawer[1]} id=${drawer[1]} onClose=${back} />`}
    ${state.question && html`<${state.question} />`}
    ${state.link === "locked" && html`<${KeyDialog} />`}
    ${help && html`<${HelpDialog} onClose=${() => setHelp(false)} />`}
    <div class="notices" role="status" aria-live="polite">
      ${state.notices.map(
        ({ id, text, tone }) =>
          html`<p key=${id} class=${`notice ${tone}`}><span>${text}</span><button class="quiet square" aria-label="Dismiss" onClick=${() => dismiss(id)}><${Icon} name="close" /></button></p>`,
      )}
    </div>
  `;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
start();
