// Every request of the dashboard: where the API is, the key, errors in one shape, server-sent events through fetch (an
// EventSource can't send the Authorization header).

const ROOT = new URL("..", document.baseURI);
const KEY = "llmux.key";

export class ApiError extends Error {
  constructor(message, status, code, detail = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.detail = detail;
  }

  /** This daemon doesn't have the endpoint, as opposed to not having the thing asked for. */
  get absent() {
    return this.status === 405 || (this.status === 404 && this.code !== "model_not_found");
  }
}

export const address = (path) => new URL(path.replace(/^\//, ""), ROOT).href.replace(/\/$/, "");

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY),
  isRemembered: () => localStorage.getItem(KEY) !== null,
  set(value, remember) {
    this.forget();
    (remember ? localStorage : sessionStorage).setItem(KEY, value);
  },
  forget() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
};

const SENDABLE = /^[\x21-\x7e]+$/; // what a browser puts into a header, without the letters that others read differently

let refused = () => {};

/** `listener(error)` hears of every answer 401: the page asks for the key then. */
export function onRefused(listener) {
  refused = listener;
}

/** Send one request; resolves to the Response when its status is 2xx, else throws ApiError. `body`: a value for JSON, or FormData. */
export async function send(method, path, { body, signal, headers = {} } = {}) {
  const secret = key.get();
  if (secret !== null && !SENDABLE.test(secret)) {
    const odd = [...secret].find((letter) => !SENDABLE.test(letter));
    const error = new ApiError(`No key has the character “${odd}”: keys are ASCII letters, digits and signs. Was it copied whole, and nothing else?`, 401, "invalid_api_key");
    refused(error);
    throw error;
  }
  const isForm = body instanceof FormData;
  let response;
  try {
    response = await fetch(new URL(path.replace(/^\//, ""), ROOT), {
      method,
      signal,
      cache: "no-store",
      body: body === undefined || isForm ? body : JSON.stringify(body),
      headers: {
        ...(secret ? { authorization: `Bearer ${secret}` } : {}),
        ...(body === undefined || isForm ? {} : { "content-type": "application/json" }),
        ...headers,
      },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The daemon can't be reached.", 0, "unreachable");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const { message = `${response.status} ${response.statusText}`, code, detail } = answer?.error ?? {};
  const error = new ApiError(message, response.status, code ?? null, detail);
  if (response.status === 401 && secret === key.get()) refused(error); // not of a key that was replaced meanwhile
  throw error;
}

export async function get(path, options) {
  return (await send("GET", path, options)).json();
}

export async function post(path, body, options) {
  return (await send("POST", path, { ...options, body })).json();
}

/** The events of an answer in text/event-stream: `{type, data, id}`, until the server ends it or `signal` fires. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { type: "message", data: [], id: null };
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ApiError("The connection broke off.", 0, "broken_off");
      });
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (event.data.length) yield { ...event, data: event.data.join("\n") };
          event = { type: "message", data: [], id: event.id };
          continue;
        }
        const [, field, text] = /^([^:]*):? ?(.*)$/s.exec(line);
        if (field === "data") event.data.push(text);
        else if (field === "event") event.type = text;
        else if (field === "id") event.id = text;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** One of operations.js: its Response. */
export const call = ({ method, path }, options) => send(method, path, options);

/** One of operations.js: the JSON that it answers. */
export async function answerOf(operation, options) {
  return (await call(operation, options)).json();
}
