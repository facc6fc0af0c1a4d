// The chat page: the conversation, and what the user can do with it.

import { Answer, count } from "./answer.js";
import { ApiError, chat, models } from "./api.js";
import { Settings } from "./settings.js";
import * as store from "./store.js";
import { answer, button, element, fit, isSend, question } from "./view.js";

const find = (id) => document.getElementById(id);
const [log, status, banner, composer, input] = ["log", "status", "banner", "composer", "input"].map(find);
const [model, send, stop, panel, toggle] = ["model", "send", "stop", "settings", "toggle"].map(find);
const [keyDialog, keyForm, keyField] = ["key-dialog", "key-form", "key"].map(find);

const settings = new Settings(find("sampling"));
let messages = store.loadChat();
let running = null; // the AbortController of the answer under way

// The conversation

function redraw() {
  log.replaceChildren(
    ...messages.map((message, index) =>
      message.role === "user"
        ? question(message, (text) => edit(index, text))
        : answer(message, () => regenerate(index)),
    ),
  );
  document.body.classList.toggle("empty", !messages.length);
  find("restore").hidden = messages.length > 0 || !store.loadFormerChat().length;
}

function save() {
  if (!store.saveChat(messages)) say("The conversation is not kept: the browser's storage is full or disabled.");
}

function edit(index, text) {
  if (!canAsk()) return;
  messages = messages.slice(0, index);
  ask(text);
}

function regenerate(index) {
  if (!canAsk()) return;
  messages = messages.slice(0, index);
  redraw();
  respond();
}

function ask(text) {
  messages.push({ role: "user", content: text });
  save();
  redraw();
  respond();
}

function startNew() {
  running?.abort();
  running = null;
  setRunning(false);
  if (messages.length) store.saveFormerChat(messages);
  messages = [];
  save();
  redraw();
  say("New chat.");
  input.focus();
}

function restore() {
  messages = store.loadFormerChat();
  save();
  redraw();
  scrollDown();
  input.focus();
}

// An answer

/** Whether a question can be sent now; otherwise the user is shown what prevents it. */
function canAsk() {
  const invalid = settings.invalid;
  if (invalid) {
    openPanel(true);
    invalid.reportValidity();
  }
  return !invalid && !running && Boolean(model.value);
}

async function respond() {
  const made = new Answer(model.value);
  const message = made.message;
  const controller = (running = new AbortController());
  const body = { model: model.value, messages: sent(), ...settings.sampling };
  messages.push(message);
  redraw();
  const article = log.lastElementChild;
  const drawing = new Drawing(article);
  setRunning(true);
  scrollDown();
  try {
    for await (const chunk of chat(body, store.loadKey(), controller.signal)) {
      made.feed(chunk);
      drawing.request();
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else fail(message, error);
  }
  drawing.finish();
  if (running !== controller) return; // a new chat has begun
  running = null;
  setRunning(false);
  save();
  say(outcome(message));
}

function sent() {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const said = messages.filter((one) => one.role === "user" || one.content);
  return [...system, ...said.map(({ role, content }) => ({ role, content }))];
}

function fail(message, error) {
  const { message: text, details = [] } = error;
  message.error = { message: text, details };
  if (error.status === 401) askForKey();
  if (!(error instanceof ApiError)) console.error(error);
}

function outcome({ error, finish, stats }) {
  if (error) return ""; // it is an alert of its own
  if (finish === "stopped") return "Stopped.";
  return `The answer is complete: ${count(stats?.completion ?? 0)}.`;
}

function setRunning(isRunning) {
  const hadFocus = document.activeElement === stop;
  log.setAttribute("aria-busy", String(isRunning));
  send.hidden = isRunning;
  stop.hidden = !isRunning;
  if (isRunning) say("Generating.");
  else if (hadFocus) input.focus();
}

/** Redraws an answer at most once per frame, and stays at its end while the user is there. */
class Drawing {
  constructor(article) {
    this.article = article;
    this.frame = 0;
    article.update(true);
  }

  request() {
    this.frame ||= requestAnimationFrame(() => this.draw(true));
  }

  draw(isStreaming) {
    this.frame = 0;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    this.article.update(isStreaming);
    if (isAtEnd) scrollDown();
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.draw(false);
  }
}

function scrollDown() {
  log.scrollTop = log.scrollHeight;
}

function say(text) {
  status.textContent = text;
}

// Models and keys

async function loadModels() {
  banner.hidden = true;
  try {
    const ids = await models(store.loadKey());
    model.replaceChildren(...ids.map((id) => element("option", { value: id }, id)));
    if (ids.includes(settings.model)) model.value = settings.model;
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    banner.replaceChildren(error.message, " ", button("Try again", loadModels));
    banner.hidden = false;
  }
  model.disabled = send.disabled = !model.options.length;
}

function askForKey() {
  if (keyDialog.open) return;
  find("key-note").textContent = store.loadKey()
    ? "The server does not accept this key. Enter another one."
    : "This server requires an API key. It is kept until the tab is closed.";
  keyField.value = "";
  keyDialog.showModal();
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!keyField.value.trim()) return;
  store.saveKey(keyField.value.trim());
  keyDialog.close();
  loadModels();
  input.focus();
});
find("key-cancel").addEventListener("click", () => keyDialog.close());

// Controls

function openPanel(isOpen) {
  panel.hidden = !isOpen;
  toggle.setAttribute("aria-expanded", String(isOpen));
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (!text || !canAsk()) return;
  input.value = "";
  fit(input);
  ask(text);
});
input.addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  composer.requestSubmit();
});
input.addEventListener("input", () => fit(input));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || keyDialog.open) return;
  if (running) {
    running.abort();
  } else if (!panel.hidden && panel.contains(document.activeElement)) {
    openPanel(false);
    toggle.focus();
  }
});
stop.addEventListener("click", () => running?.abort());
toggle.addEventListener("click", () => openPanel(panel.hidden));
model.addEventListener("change", () => (settings.model = model.value));
find("new").addEventListener("click", startNew);
find("restore").addEventListener("click", restore);
addEventListener("pagehide", () => running && save()); // the incomplete answer

openPanel(matchMedia("(min-width: 64rem)").matches);
redraw();
scrollDown();
loadModels();
