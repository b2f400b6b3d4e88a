// A model's answer as it is usually marked up: fenced code, headings, lists, bold, inline code. Never as HTML.

import { html } from "../../vendor/htm-preact.js";

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (part.length > 2 && part.startsWith("`")) return html`<code>${part.slice(1, -1)}</code>`;
    if (part.length > 4 && part.startsWith("**")) return html`<strong>${part.slice(2, -2)}</strong>`;
    return part;
  });
}

function block(text) {
  const heading = /^(#{1,6}) (.*)$/.exec(text);
  if (heading) return html`<h3>${inline(heading[2])}</h3>`;
  const lines = text.split("\n");
  if (lines.every((line) => /^\s*([-*•]|\d+[.)]) /.test(line))) {
    const items = lines.map((line) => html`<li>${inline(line.replace(/^\s*([-*•]|\d+[.)]) /, ""))}</li>`);
    return /^\s*\d/.test(lines[0]) ? html`<ol>${items}</ol>` : html`<ul>${items}</ul>`;
  }
  return html`<p>${inline(text)}</p>`;
}

export function Text({ text }) {
  const parts = text.split(/^```([^\n]*)\n([\s\S]*?)(?:^```[ \t]*$|$(?![\s\S]))/m);
  const shown = [];
  for (let at = 0; at < parts.length; at += 3) {
    const prose = parts[at].trim();
    if (prose) shown.push(...prose.split(/\n{2,}/).map(block));
    if (at + 2 < parts.length) shown.push(html`<pre role="group" tabindex="0" aria-label=${parts[at + 1].trim() || "code"}>${parts[at + 2]}</pre>`);
  }
  return html`<div class="prose">${shown}</div>`;
}
