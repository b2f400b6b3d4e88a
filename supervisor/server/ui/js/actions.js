// The operator's actions on a model. The answer of the API is the model's new view, so a click shows at once.

import { answerOf, call } from "./api.js";
import { changed, keepModel, notify, refresh, state } from "./live.js";
import { cancelRequest, loadModel, pinModel, unloadModel } from "./operations.js";

const asking = new Set(); // models with a load or unload under way from here

export const isAsking = (name) => asking.has(name);

async function act(name, operation, body) {
  asking.add(name);
  changed();
  try {
    keepModel(await answerOf(operation, { body }));
    if (state.link !== "live") await refresh();
  } catch (error) {
    if (error.status !== 401) notify(error.message.startsWith(name) ? error.message : `${name}: ${error.message}`, "bad");
  } finally {
    asking.delete(name);
    changed();
  }
}

export const STOPPED = new Set(["stopped", "backoff", "failed"]);

export const load = (name, overrides) => act(name, loadModel(name), overrides ? { overrides } : undefined);
export const unload = (name, { force = false } = {}) => act(name, unloadModel(name, force ? { force } : null));
export const pin = (model) => act(model.name, pinModel(model.name), { pin: !model.pin });

/** Cancel requests that are queued or in flight. Those that have ended meanwhile don't matter. */
export async function cancel(requests) {
  const ids = new Set(requests.map(({ id }) => id));
  const answers = await Promise.allSettled([...ids].map((id) => call(cancelRequest(id))));
  const failed = answers.find(({ reason }) => reason && reason.status !== 404);
  if (failed) notify(failed.reason.message, "bad");
  else state.requests = state.requests.filter(({ id }) => !ids.has(id));
  changed();
}
