// The messages of the conversation as elements.

import { describe } from "./answer.js";
import { show } from "./markdown.js";

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

export function button(text, click, label = text) {
  const made = element("button", { type: "button", "aria-label": label }, text);
  made.addEventListener("click", click);
  return made;
}

/** Copies a text and says so in the button. Without HTTPS, browsers allow only the older way. */
export async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", { value: text, className: "hidden" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    from.focus();
  }
  from.textContent = "Copied";
  setTimeout(() => (from.textContent = "Copy"), 1500);
}

/** A question; `edit` gets its new text. */
export function question(message, edit) {
  const text = element("div", { className: "text" }, message.content);
  const actions = element("div", { className: "actions" });
  const article = element("article", { className: "user", "aria-label": "You" }, text, actions);
  const copying = button("Copy", () => copy(message.content, copying), "Copy message");
  const editing = button("Edit", open, "Edit message");
  actions.append(copying, editing);

  function open() {
    const area = element("textarea", { value: message.content, "aria-label": "Message" });
    const save = button("Send", () => area.value.trim() && edit(area.value), "Send edited message");
    const form = element("div", { className: "editor" }, area, button("Cancel", close), save);
    area.addEventListener("keydown", (event) => {
      if (isSend(event)) {
        event.preventDefault();
        save.click();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    text.hidden = actions.hidden = true;
    article.append(form);
    article.classList.add("edited");
    fit(area);
    area.addEventListener("input", () => fit(area));
    area.focus();
  }

  function close() {
    article.querySelector(".editor").remove();
    article.classList.remove("edited");
    text.hidden = actions.hidden = false;
    editing.focus();
  }

  return article;
}

/** An answer: an element with `update`, to be called when the message has changed. */
export function answer(message, regenerate) {
  const summary = element("summary", {}, "Reasoning");
  const thought = element("div", { className: "text" });
  const reasoning = element("details", { className: "reasoning", hidden: true }, summary, thought);
  const text = element("div", { className: "text" });
  const error = element("div", { className: "error", role: "alert", hidden: true });
  const stats = element("dl", { className: "stats" });
  const copying = button("Copy", () => copy(message.content, copying), "Copy answer");
  const again = button("Regenerate", regenerate, "Regenerate answer");
  const actions = element("div", { className: "actions" }, copying, again);
  const footer = element("footer", {}, stats, actions);
  const label = `Answer of ${message.model}`;
  const article = element("article", { className: "assistant", "aria-label": label });
  article.append(element("header", {}, message.model), reasoning, text, error, footer);

  article.update = (isStreaming) => {
    article.classList.toggle("streaming", isStreaming);
    reasoning.hidden = !message.reasoning;
    if (message.reasoning) show(thought, message.reasoning, copy);
    show(text, message.content, copy);
    const pairs = describe(message).map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    );
    stats.replaceChildren(...pairs);
    actions.hidden = isStreaming;
    copying.hidden = !message.content;
    error.hidden = !message.error;
    if (message.error && !error.childNodes.length) {
      const details = element("small", {}, message.error.details.join(" · "));
      error.append(element("p", {}, message.error.message), details);
    }
  };
  article.update(false);
  return article;
}

/** Whether a key press sends: Enter, but not with Shift or within an input method. */
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

/** The height of a text field follows its text; CSS limits it. */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
