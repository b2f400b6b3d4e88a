// Ollama's own client for Node, with a key.
import { Ollama } from "ollama";

const [host, key] = process.argv.slice(2);
const client = new Ollama({ host, headers: { Authorization: `Bearer ${key}` } });
const messages = [{ role: "user", content: "Hello" }];
const pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="; // a PNG
const format = { type: "object", properties: { it: { const: "is so" } }, required: ["it"] };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "Tell the weather.", parameters } }];

async function all(asked) {
  const parts = [];
  for await (const part of await asked) parts.push(part);
  return parts;
}

// The status and the message that it shows.
async function refused(asked) {
  try {
    await asked;
  } catch (error) {
    return [error.status_code, error.message.includes("llmux add")];
  }
}

const whole = await client.chat({ model: "quick", messages, keep_alive: "10m", options: { temperature: 0, num_ctx: 4096 } });
const streamed = await all(client.chat({ model: "quick", messages, stream: true }));
const thought = (await client.chat({ model: "thinker", messages, think: true })).message;
const called = (await all(client.chat({ model: "thinker", messages, tools, stream: true }))).flatMap((part) => part.message.tool_calls ?? []);
const looking = [{ role: "user", content: "What is it?", images: [Uint8Array.from(Buffer.from(pixel, "base64"))] }];
const seen = await client.chat({ model: "eyes", messages: looking, think: false });
const shaped = await client.chat({ model: "quick", messages, format });
const prompt = await all(client.generate({ model: "quick", prompt: "Hello", stream: true }));
const vectors = await client.embed({ model: "embed", input: ["one", "two"], dimensions: 8 });
const shown = await client.show({ model: "quick" });
const endless = await client.chat({ model: "endless", messages, stream: true });
let aborted;
try {
  for await (const part of endless) endless.abort();
} catch (error) {
  aborted = error.name;
}

console.log(
  JSON.stringify({
    whole: whole.message.content,
    streamed: streamed.map((part) => part.message.content).join(""),
    figures: [streamed.at(-1).done_reason, streamed.at(-1).eval_count > 0, streamed.at(-1).total_duration > 0],
    thought: [thought.thinking, thought.content],
    "called, streamed": called.map((call) => [call.function.name, call.function.arguments]),
    seen: seen.message.content,
    shaped: JSON.parse(shaped.message.content),
    prompt: prompt.map((part) => part.response).join(""),
    vectors: vectors.embeddings.map((vector) => vector.length),
    listed: (await client.list()).models.map((model) => model.model).sort(),
    running: (await client.ps()).models.some((model) => model.model === "quick:latest"),
    can: shown.capabilities,
    version: (await client.version()).version.split(".").length,
    pulled: [(await client.pull({ model: "quick" })).status, ...(await all(client.pull({ model: "quick", stream: true }))).map((part) => part.status)],
    aborted,
    failure: (await refused(client.chat({ model: "nobody", messages })))[0],
    refused: {
      pull: await refused(client.pull({ model: "llama3.2" })),
      push: await refused(client.push({ model: "quick" })),
      create: await refused(client.create({ model: "mine", from: "quick" })),
      copy: await refused(client.copy({ source: "quick", destination: "mine" })),
      delete: await refused(client.delete({ model: "quick" })),
    },
    unloaded: (await client.generate({ model: "quick", prompt: "", keep_alive: 0 })).done_reason,
  }),
);
