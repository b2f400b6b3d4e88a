// What the operator does to a model. The answer of the API is the model's new view, so a click shows at once.

import { modelPath, post, send } from "./api.js";
import { changed, keepModel, notify, refresh, state } from "./live.js";

const asking = new Set(); // models with a load or unload under way from here

export const isAsking = (name) => asking.has(name);

async function ask(name, rest, body) {
  asking.add(name);
  changed();
  try {
    keepModel(await post(modelPath(name, rest), body));
    if (state.link !== "live") await refresh();
  } catch (error) {
    if (error.status !== 401) notify(`${name}: ${error.message}`, "bad");
  } finally {
    asking.delete(name);
    changed();
  }
}

export const STOPPED = new Set(["stopped", "backoff", "failed"]);

export const load = (name, overrides) => ask(name, "/load", overrides ? { overrides } : undefined);
export const unload = (name, { force = false } = {}) => ask(name, `/unload${force ? "?force=true" : ""}`);
export const pin = (model) => ask(model.name, "/pin", { pin: !model.pin });

export async function cancel(request) {
  try {
    await send("DELETE", `/v1/admin/requests/${encodeURIComponent(request.id)}`);
    state.requests = state.requests.filter(({ id }) => id !== request.id);
    changed();
  } catch (error) {
    notify(error.message, "bad");
  }
}
