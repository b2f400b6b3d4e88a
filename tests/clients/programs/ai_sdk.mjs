// Vercel's AI SDK: five turns with a tool, and a picture in the first of them that the model can't see.
// usage: node ai_sdk.mjs URL MODEL
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const PNG =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";
const model = createOpenAICompatible({ name: "llmux", baseURL: `${process.argv[2]}/v1`, includeUsage: true })(process.argv[3]);
const called = [];
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => {
      called.push(input);
      return "sunny";
    },
  }),
};
const messages = [
  { role: "user", content: [{ type: "text", text: "Look." }, { type: "image", mediaType: "image/png", image: PNG }] },
  { role: "assistant", content: "A hat." },
];
const said = [];
for (let turn = 0; turn < 5; turn++) {
  messages.push({ role: "user", content: `Turn ${turn}: the weather?` });
  const ask = { model, messages, tools, stopWhen: stepCountIs(3) };
  const told = turn % 2 ? streamText(ask) : await generateText(ask);
  said.push(await told.text);
  messages.push(...(await told.responseMessages));
}
console.log(JSON.stringify({ said, called, messages: messages.length }));
