// Chat with streaming; thoughts are folded away, images come by file, paste or drop.

import { html, useEffect, useRef, useState } from "../../vendor/htm-preact.js";
import { events, send } from "../api.js";
import { milliseconds } from "../format.js";
import { notify } from "../live.js";
import { physical } from "../colours.js";
import { Icon, Select, useWork } from "../parts.js";
import { asDataUrl } from "./files.js";
import { Text } from "./markup.js";
import { Waiting } from "./playground.js";
import { Calls, grown, parsedTools, ToolEditor } from "./tools.js";

const IMAGE_LIMIT = 20 * 1024 * 1024; // bytes

/** A turn as the API takes it. */
function message(turn) {
  const { role, text, calls, id } = split(turn);
  if (role === "tool") return { role, tool_call_id: id, content: text };
  if (!calls?.length) return { role, content: content(split(turn)) };
  return { role, content: text || null, tool_calls: calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) };
}

function content(turn) {
  if (!turn.images?.length) return turn.text;
  return [{ type: "text", text: turn.text }, ...turn.images.map((url) => ({ type: "image_url", image_url: { url } }))];
}

/** Thoughts may come as a field of their own or, from servers that don't tell them apart, in front of the text. */
function split(turn) {
  const inline = /^\s*<think>(.*?)(?:<\/think>\s*|$)/s.exec(turn.text);
  return inline ? { ...turn, thought: inline[1], text: turn.text.slice(inline[0].length) } : turn;
}

/** Ask for the next turn and call `grow(turn)` with each longer piece of it. */
async function converse(body, signal, grow) {
  const began = performance.now();
  const response = await send("POST", "/v1/chat/completions", { body, signal });
  const turn = { role: "assistant", text: "", thought: "", calls: [], queue_ms: Number(response.headers.get("x-queue-wait-ms")) || null };
  let first = null;
  let last = null;
  let pieces = 0;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") continue; // read to the end: the daemon would log a client that left
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const delta = chunk.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (delta.tool_calls) turn.calls = grown(turn.calls, delta.tool_calls);
    if (thought || delta.content || delta.tool_calls) {
      last = performance.now();
      first ??= last;
      pieces += 1;
    }
    turn.thought += thought;
    turn.text += delta.content ?? "";
    turn.finish = chunk.choices?.[0]?.finish_reason ?? turn.finish;
    turn.tokens = chunk.usage?.completion_tokens ?? turn.tokens;
    turn.first_ms = first && first - began;
    const count = turn.tokens ?? pieces;
    turn.speed = first && last > first && count > 1 ? (1000 * (count - 1)) / (last - first) : null;
    grow({ ...turn });
  }
}

function Turn({ turn, model, onResults }) {
  const { role, text, thought, images, calls = [] } = split(turn);
  if (role === "tool") return html`<li class="turn user"><div><small>Result</small><p>${text}</p></div></li>`;
  if (role === "user") {
    return html`<li class="turn user"><div>${images.map((url) => html`<img src=${url} alt="Attached" />`)}${text && html`<p>${text}</p>`}</div></li>`;
  }
  const facts = [
    turn.first_ms ? `first token ${milliseconds(turn.first_ms)}` : null,
    turn.tokens ? `${turn.tokens} tokens` : null,
    turn.speed ? `${turn.speed.toFixed(1)} tokens/s` : null,
    turn.finish && turn.finish !== "stop" && turn.finish !== "tool_calls" ? turn.finish : null,
  ].filter(Boolean);
  return html`<li class="turn assistant">
    ${thought && html`<details class="thought"><summary>${text ? "Thought" : "Thinking"}</summary><p>${thought}</p></details>`}
    ${text ? html`<${Text} text=${text} />` : !turn.error && !thought && calls.length === 0 && html`<${Waiting} model=${model} />`}
    ${calls.length > 0 && html`<${Calls} calls=${calls} onResults=${onResults} />`}
    ${turn.error && html`<p class="problem" role="alert">${turn.error}</p>`}
    ${facts.length > 0 && html`<small class="num">${facts.join(" · ")}</small>`}
  </li>`;
}

export function Chat({ model, choice }) {
  const [turns, setTurns] = useState([]);
  const [text, setText] = useState("");
  const [images, setImages] = useState([]);
  const [options, setOptions] = useState({ system: "", temperature: "", max_tokens: "", thinking: "", tools: "" });
  const [over, setOver] = useState(false);
  const end = useRef(null);
  const files = useRef(null);
  useEffect(() => end.current?.scrollIntoView?.({ block: "nearest" }), [turns]);

  const attach = async (given) => {
    for (const file of [...given].filter(({ type }) => type.startsWith("image/"))) {
      if (file.size > IMAGE_LIMIT) notify(`${file.name} is larger than 20 MiB.`, "bad");
      else {
        const url = await asDataUrl(file);
        setImages((kept) => [...kept, url]);
      }
    }
  };

  const [run, busy, stop] = useWork(async (signal, conversation) => {
    const grow = (turn) => setTurns([...conversation, turn]);
    const messages = conversation.filter((turn) => turn.text || turn.images?.length || turn.calls?.length).map(message);
    const tools = parsedTools(options.tools);
    const body = { model, messages, stream: true, stream_options: { include_usage: true } };
    if (options.system.trim()) messages.unshift({ role: "system", content: options.system });
    if (options.temperature !== "") body.temperature = Number(options.temperature);
    if (options.max_tokens !== "") body.max_tokens = Number(options.max_tokens);
    if (tools.length) body.tools = tools;
    if (options.thinking) body.chat_template_kwargs = { enable_thinking: options.thinking === "on" };
    grow({ role: "assistant", text: "", thought: "" });
    try {
      await converse(body, signal, grow);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      setTurns((kept) => [...kept.slice(0, -1), { ...kept.at(-1), error: error.message }]);
    }
  });

  const ask = (event) => {
    event?.preventDefault();
    if (busy || (!text.trim() && images.length === 0)) return;
    try {
      parsedTools(options.tools);
    } catch (error) {
      notify(error.message, "bad");
      return;
    }
    const conversation = [...turns, { role: "user", text: text.trim(), images }];
    setText("");
    setImages([]);
    run(conversation);
  };
  const goOn = (calls) => (results) => run([...turns, ...calls.map(({ id }, index) => ({ role: "tool", id, text: results[index] }))]);
  const typed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
  };
  const pasted = (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      attach(event.clipboardData.files);
    }
  };
  const dropped = (event) => {
    event.preventDefault();
    setOver(false);
    attach(event.dataTransfer.files);
  };
  const set = (name) => (event) => setOptions({ ...options, [name]: event.target.value });
  const calls = physical(model)?.capabilities?.tools !== false;
  const thinks = physical(model)?.capabilities?.thinking !== false;

  return html`<div class=${`chat ${over ? "over" : ""}`} onDragOver=${(event) => (event.preventDefault(), setOver(true))} onDragLeave=${() => setOver(false)} onDrop=${dropped}>
    <div class="fields">
      ${choice}
      <label>Temperature<input type="number" min="0" max="2" step="0.1" placeholder="default" value=${options.temperature} onInput=${set("temperature")} /></label>
      <label>Max tokens<input type="number" min="1" step="1" placeholder="no limit" value=${options.max_tokens} onInput=${set("max_tokens")} /></label>
      ${thinks && html`<${Select} label="Thinking" value=${options.thinking} options=${[["", "default"], "on", "off"]} onChange=${(thinking) => setOptions({ ...options, thinking })} />`}
      <label class="wide">System prompt<input placeholder="none" value=${options.system} onInput=${set("system")} /></label>
    </div>
    ${calls && html`<${ToolEditor} text=${options.tools} onInput=${(tools) => setOptions({ ...options, tools })} />`}
    <ol class="turns" aria-label="Conversation" aria-live="polite" aria-busy=${busy}>
      ${turns.map((turn, index) => html`<${Turn} turn=${turn} model=${model} onResults=${!busy && index === turns.length - 1 && turn.calls?.length ? goOn(turn.calls) : null} />`)}
      <li ref=${end} class="end" aria-hidden="true" />
    </ol>
    <form class="ask" onSubmit=${ask}>
      ${images.length > 0 && html`<div class="attached">${images.map((url, index) => html`<button type="button" aria-label="Remove this image" title="Remove" onClick=${() => setImages(images.filter((_, at) => at !== index))}><img src=${url} alt="" /></button>`)}</div>`}
      <textarea rows="2" aria-label="Message" placeholder="Message; Enter sends, Shift+Enter breaks the line" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${typed} onPaste=${pasted} />
      <div class="buttons">
        <input ref=${files} class="unseen" type="file" accept="image/*" multiple tabindex="-1" aria-label="Images" onChange=${(event) => (attach(event.target.files), (event.target.value = ""))} />
        <button type="button" class="quiet" onClick=${() => files.current.click()}><${Icon} name="image" />Image</button>
        <button type="button" class="quiet" disabled=${turns.length === 0} onClick=${() => (stop(), setTurns([]))}>New chat</button>
        ${busy ? html`<button type="button" onClick=${stop}><${Icon} name="stop" />Stop</button>` : html`<button type="submit" class="primary">Send</button>`}
      </div>
    </form>
  </div>`;
}
