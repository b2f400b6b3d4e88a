// OpenAI's SDK for Node: chat, a stream, embeddings, and its Responses stream.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];

const whole = await client.chat.completions.create({ model: "quick", messages });
let streamed = "";
const models = new Set([whole.model]);
for await (const chunk of await client.chat.completions.create({ model: "quick", messages, stream: true })) {
  models.add(chunk.model);
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const vectors = (await client.embeddings.create({ model: "embed", input: ["one", "two"] })).data;
const kinds = [];
const stream = client.responses.stream({ model: "quick", input: "Hello" });
for await (const event of stream) kinds.push(event.type);
const response = await stream.finalResponse();
models.add(response.model);

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    models: [...models].sort(),
    vectors: vectors.map((vector) => vector.embedding.length > 0),
    responses: response.output_text,
    first_and_last: [kinds[0], kinds.at(-1)],
  }),
);
