// Requests to the gateway.

/** The server refuses a request or cannot be reached; `message` is the server's. */
export class ApiError extends Error {
  constructor(message, status = 0, details = []) {
    super(message);
    this.status = status;
    this.details = details.filter(Boolean);
  }
}

/** The models' ids. */
export async function models(key) {
  const response = await request("/v1/models", key);
  return (await response.json()).data.map((model) => model.id);
}

/** The chunks of a streamed chat completion. Throws ApiError, or AbortError after `signal`. */
export async function* chat(body, key, signal) {
  const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const response = await request("/v1/chat/completions", key, { ...body, ...options }, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 0, [chunk.error.code]);
    yield chunk;
  }
  throw new ApiError("The connection closed before the answer was complete.");
}

async function request(path, key, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, credentials: "omit", cache: "no-store" };
  if (body) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Check that it runs, then try again.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const error = await response.json().then((found) => found.error, () => null);
  const wait = response.headers.get("retry-after");
  const id = response.headers.get("x-request-id");
  return new ApiError(error?.message ?? "The request failed.", response.status, [
    `status ${response.status}`,
    error?.code,
    wait && `retry after ${wait} s`,
    id && `request ${id}`,
  ]);
}

/** The data of server-sent events; comments are skipped. */
async function* events(stream) {
  let buffer = "";
  try {
    for await (const part of chunks(stream.pipeThrough(new TextDecoderStream()))) {
      const found = (buffer + part).split("\n\n");
      buffer = found.pop();
      for (const event of found) if (event.startsWith("data: ")) yield event.slice("data: ".length);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection closed before the answer was complete.");
  }
}

// Safari cannot iterate over a stream.
async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
