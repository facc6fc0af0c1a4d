// One answer while it is streamed: its text and its statistics.

/** Adds up chunks. `message` is what is shown, kept and sent back with the next question. */
export class Answer {
  constructor(model) {
    this.message = { role: "assistant", content: "", reasoning: "", model, finish: "", stats: null };
    this.sentAt = performance.now();
    this.firstAt = 0;
    this.lastAt = 0;
  }

  feed(chunk) {
    const now = performance.now();
    const [choice] = chunk.choices;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
    if (content || reasoning || calls) {
      this.firstAt ||= now;
      this.lastAt = now;
    }
    this.message.content += content ?? "";
    this.message.reasoning += reasoning ?? "";
    if (choice?.finish_reason) this.message.finish = choice.finish_reason;
    if (chunk.usage) this.message.stats = this.statsOf(chunk.usage);
  }

  /** Times in milliseconds; the rate is that of the tokens after the first. */
  statsOf(usage) {
    const seconds = (this.lastAt - this.firstAt) / 1e3;
    const further = usage.completion_tokens - 1;
    return {
      ttft: this.firstAt ? this.firstAt - this.sentAt : null,
      rate: further > 0 && seconds > 0 ? further / seconds : null,
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
      completion: usage.completion_tokens,
    };
  }
}

const FINISHES = {
  length: "cut off by max tokens or the context",
  tool_calls: "called a tool",
  stopped: "stopped by you",
};

/** Statistics as [name, value] pairs, in the order in which they are shown. */
export function describe({ stats, finish }) {
  const found = [];
  if (stats) {
    if (stats.ttft !== null) found.push(["TTFT", duration(stats.ttft)]);
    if (stats.rate !== null) found.push(["speed", `${stats.rate.toFixed(1)} tokens/s`]);
    const cached = stats.cached ? ` (${stats.cached} cached)` : "";
    found.push(["prompt", `${count(stats.prompt)}${cached}`]);
    found.push(["completion", count(stats.completion)]);
  }
  if (FINISHES[finish]) found.push(["end", FINISHES[finish]]);
  return found;
}

const duration = (ms) => (ms < 1e3 ? `${Math.round(ms)} ms` : `${(ms / 1e3).toFixed(2)} s`);
export const count = (number) => `${number} ${number === 1 ? "token" : "tokens"}`;
