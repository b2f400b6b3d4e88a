// The settings with which each client reaches this daemon, as text to copy. Pure: a test runs every one of them, or parses it.

const CONTEXT = 32768; // where nobody knows it
const json = (value) => JSON.stringify(value, null, 2);
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`; // for a shell

/** `base`: the address with /v1; `secret`: a key, or any word; `chat`: `{name, context}` of a model that chats; `fill`: one that completes code, and
 * `embed`: one for embeddings, or null. Each has a `name`, `where` it goes, its `language` and the `text`. */
export function snippets({ base, secret, chat, fill, embed }) {
  const root = base.replace(/\/v1$/, "");
  const context = chat.context ?? CONTEXT;
  const output = Math.min(8192, Math.floor(context / 4));
  const continued = (name, model, ...roles) => `  - name: ${JSON.stringify(name)}\n    provider: openai\n    model: ${JSON.stringify(model)}\n    apiBase: ${base}\n    apiKey: ${JSON.stringify(secret)}\n    roles: [${roles.join(", ")}]`;
  return [
    {
      name: "Claude Code",
      where: "the shell in which it starts",
      language: "sh",
      text: `export ANTHROPIC_BASE_URL=${root}\nexport ANTHROPIC_AUTH_TOKEN=${quoted(secret)}\nexport ANTHROPIC_MODEL=${quoted(chat.name)}\nexport ANTHROPIC_DEFAULT_HAIKU_MODEL=${quoted(chat.name)}\nexport CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1`,
    },
    {
      name: "Codex",
      where: "~/.codex/config.toml, with the key in LLMUX_API_KEY",
      language: "toml",
      text: `model = ${JSON.stringify(chat.name)}\nmodel_provider = "llmux"\nmodel_context_window = ${context}\n\n[model_providers.llmux]\nname = "llmux"\nbase_url = "${base}"\nwire_api = "responses"\nenv_key = "LLMUX_API_KEY"`,
    },
    {
      name: "OpenCode",
      where: "opencode.json, in the project or in ~/.config/opencode",
      language: "json",
      text: json({
        $schema: "https://opencode.ai/config.json",
        model: `llmux/${chat.name}`,
        provider: { llmux: { npm: "@ai-sdk/openai-compatible", name: "llmux", options: { baseURL: base, apiKey: secret }, models: { [chat.name]: { tool_call: true, limit: { context, output } } } } },
      }),
    },
    {
      name: "Continue",
      where: "~/.continue/config.yaml",
      language: "yaml",
      text: ["name: llmux", "version: 1.0.0", "schema: v1", "models:", continued(chat.name, chat.name, "chat", "edit", "apply"), ...(fill ? [continued(`${fill} (completion)`, fill, "autocomplete")] : []), ...(embed ? [continued(embed, embed, "embed")] : [])].join("\n"),
    },
    {
      name: "Zed",
      where: "settings.json, with the key in LLMUX_API_KEY or in Zed's own settings",
      language: "json",
      text: json({ language_models: { openai_compatible: { llmux: { api_url: base, available_models: [{ name: chat.name, display_name: chat.name, max_tokens: context, capabilities: { tools: true, images: false } }] } } } }),
    },
    {
      name: "aider",
      where: ".aider.conf.yml, in the project or at home",
      language: "yaml",
      text: `model: ${JSON.stringify(`openai/${chat.name}`)}\nopenai-api-base: ${base}\nopenai-api-key: ${JSON.stringify(secret)}`,
    },
    {
      name: "curl",
      where: "a shell",
      language: "sh",
      text: `curl ${base}/chat/completions \\\n  -H ${quoted(`Authorization: Bearer ${secret}`)} \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify({ model: chat.name, messages: [{ role: "user", content: "Hello" }] }))}`,
    },
    {
      name: "Environment of the OpenAI SDKs",
      where: "a shell",
      language: "sh",
      text: `export OPENAI_BASE_URL=${base}\nexport OPENAI_API_KEY=${quoted(secret)}`,
    },
    {
      name: "Python",
      where: "pip install openai",
      language: "python",
      text: `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key=${JSON.stringify(secret)})\nanswer = client.chat.completions.create(\n    model=${JSON.stringify(chat.name)},\n    messages=[{"role": "user", "content": "Hello"}],\n)\nprint(answer.choices[0].message.content)`,
    },
    {
      name: "Node",
      where: "npm install openai",
      language: "js",
      text: `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${base}", apiKey: ${JSON.stringify(secret)} });\nconst answer = await client.chat.completions.create({\n  model: ${JSON.stringify(chat.name)},\n  messages: [{ role: "user", content: "Hello" }],\n});\nconsole.log(answer.choices[0].message.content);`,
    },
    {
      name: "Python, Anthropic's SDK",
      where: "pip install anthropic",
      language: "python",
      text: `from anthropic import Anthropic\n\nclient = Anthropic(base_url="${root}", auth_token=${JSON.stringify(secret)})\nanswer = client.messages.create(\n    model=${JSON.stringify(chat.name)},\n    max_tokens=256,\n    messages=[{"role": "user", "content": "Hello"}],\n)\nprint(answer.content[-1].text)`,
    },
  ];
}
