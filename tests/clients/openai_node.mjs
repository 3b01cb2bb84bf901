// Asks a server by OpenAI's JavaScript SDK, and prints what the SDK made of the answers as JSON.
import OpenAI from "openai";

const [baseURL, plain, call] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "not needed", maxRetries: 0 });
const model = "letters";
const tools = [{ type: "function", function: { name: "weather", parameters: { type: "object" } } }];
const asking = (content) => ({ model, messages: [{ role: "user", content }] });

const chat = await client.chat.completions.create(asking(plain));

let streamed = "";
const stream = await client.chat.completions.create({
  ...asking(plain), stream: true, stream_options: { include_usage: true },
});
let usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const called = await client.chat.completions.create({ ...asking(call), tools });
// The SDK's own reader of streams puts the pieces of a call together.
const runner = client.chat.completions.stream({ ...asking(call), tools });
const final = await runner.finalChatCompletion();

const completion = await client.completions.create({ model, prompt: plain, max_tokens: 100 });
const models = (await client.models.list()).data.map((each) => each.id);
const wrong = await client.chat.completions
  .create({ ...asking(plain), temperature: -1 })
  .catch((error) => ({ status: error.status, param: error.param, kind: error.constructor.name }));

const functionOf = (answer) => answer.choices[0].message.tool_calls[0].function;
console.log(JSON.stringify({
  chat: chat.choices[0].message.content,
  streamed,
  usage: usage?.completion_tokens,
  called: functionOf(called),
  calledReason: called.choices[0].finish_reason,
  streamedCall: functionOf(final),
  streamedReason: final.choices[0].finish_reason,
  completion: completion.choices[0].text,
  models,
  wrong,
}));
