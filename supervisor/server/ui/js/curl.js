// A request as a command to try it again. Its body isn't kept, nor is the key: a short example and a variable stand for them.

import { address } from "./api.js";

const EXAMPLES = [
  [/\/chat\/completions$|\/messages$|\/api\/chat$/, { messages: [{ role: "user", content: "Hello" }] }],
  [/\/responses$/, { input: "Hello" }],
  [/\/completions$|\/api\/generate$/, { prompt: "Hello" }],
  [/\/embeddings$|\/api\/embed$/, { input: ["Hello"] }],
  [/\/rerank$/, { query: "Hello", documents: ["Good morning", "Good night"] }],
  [/\/audio\/speech$/, { input: "Hello", voice: "default" }],
  [/\/images\/generations$/, { prompt: "A lighthouse" }],
];
const FORMS = /\/audio\/(transcriptions|translations)$|\/images\/edits$/;

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** The command line for a shell. */
export function curl({ path, model, stream, key }) {
  const parts = [`curl ${quoted(address(path))}`];
  if (key !== null) parts.push('-H "Authorization: Bearer $LLMUX_API_KEY"');
  if (FORMS.test(path)) {
    const [field, file] = path.endsWith("edits") ? ["image", "image.png"] : ["file", "recording.wav"];
    parts.push(`-F ${quoted(`model=${model ?? ""}`)}`, `-F ${field}=@${file}`);
  } else {
    const [, example] = EXAMPLES.find(([pattern]) => pattern.test(path)) ?? [null, {}];
    const limit = path.endsWith("/messages") ? { max_tokens: 256 } : {};
    const body = JSON.stringify({ model: model ?? undefined, ...example, ...limit, ...(stream ? { stream } : {}) });
    parts.push("-H 'Content-Type: application/json'", `-d ${quoted(body)}`);
  }
  return parts.join(" \\\n  ");
}
