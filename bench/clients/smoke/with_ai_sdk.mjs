// Vercel's AI SDK.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const kvell = createOpenAICompatible({
  name: "kvell",
  baseURL,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const model = kvell(name);
const TO = { model, maxOutputTokens: 80, temperature: 0, maxRetries: 0 };
const Person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(99) });
const weather = tool({
  description: "tells the weather",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async () => "sunny",
});

function check(ok, words = "") {
  if (!ok) throw new Error(words || "it is not so");
}

const checks = {
  async text() {
    check((await generateText({ ...TO, prompt: "Say hello." })).text);
  },
  async stream() {
    let text = "";
    for await (const piece of streamText({ ...TO, prompt: "Say hello." }).textStream) text += piece;
    check(text);
  },
  async object() {
    check("age" in (await generateObject({ ...TO, schema: Person, prompt: "Ann is 30." })).object);
  },
  async required_tool() {
    const told = await generateText({
      ...TO,
      prompt: "Weather in Bern?",
      tools: { weather },
      toolChoice: "required",
    });
    check(told.toolCalls[0].toolName === "weather", JSON.stringify(told.toolCalls));
  },
  async streamed_tool() {
    const told = streamText({
      ...TO,
      prompt: "Weather in Bern?",
      tools: { weather },
      toolChoice: "required",
    });
    check((await told.toolCalls)[0].toolName === "weather");
  },
  async embeddings() {
    const told = await embedMany({ model: kvell.textEmbeddingModel(name), values: ["a", "b"] });
    check(told.embeddings.length === 2);
  },
};

for (const [name, run] of Object.entries(checks)) {
  let ok = true;
  let why = "";
  try {
    await run();
  } catch (error) {
    ok = false;
    why = `${error.name}: ${error.message}`.slice(0, 400);
  }
  console.log(JSON.stringify({ check: name, ok, why }));
}
