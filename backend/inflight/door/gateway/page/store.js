// What the browser keeps: the conversation and settings for long, the API key until the tab is closed.

const CHAT = "inflight.chat";
const FORMER_CHAT = "inflight.former-chat";
const SETTINGS = "inflight.settings";
const KEY = "inflight.key";

function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** False if the browser does not allow it, or has no space left. */
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function messagesOf(found) {
  const isMessage = (one) => ["user", "assistant"].includes(one?.role) && typeof one.content === "string";
  return Array.isArray(found) ? found.filter(isMessage) : [];
}

export const loadChat = () => messagesOf(read(CHAT, []));
export const saveChat = (messages) => write(CHAT, messages);
export const loadFormerChat = () => messagesOf(read(FORMER_CHAT, []));
export const saveFormerChat = (messages) => write(FORMER_CHAT, messages);
export const loadSettings = () => ({ ...read(SETTINGS, {}) });
export const saveSettings = (settings) => write(SETTINGS, settings);

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // without storage, it is kept in memory
}

export const loadKey = () => key;

export function saveKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // as above
  }
}
