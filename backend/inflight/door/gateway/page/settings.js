// The settings panel: sampling, system prompt and theme.

import { loadSettings, saveSettings } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export class Settings {
  constructor(form) {
    this.form = form;
    this.values = loadSettings();
    for (const field of form.elements) {
      if (field.name) field.value = this.values[field.name] ?? "";
    }
    form.addEventListener("input", () => this.changed());
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => this.changed()));
    this.show();
  }

  changed() {
    for (const field of this.form.elements) {
      if (field.name) this.values[field.name] = field.value;
    }
    saveSettings(this.values);
    this.show();
  }

  get model() {
    return this.values.model ?? "";
  }

  set model(id) {
    this.values.model = id;
    saveSettings(this.values);
  }

  get system() {
    return (this.values.system ?? "").trim();
  }

  /** The first field with a value that is not allowed; null for none. */
  get invalid() {
    return this.form.querySelector("input:invalid");
  }

  /** Fields of a request; the server's default for those that are empty. */
  get sampling() {
    const given = NUMBERS.filter((name) => (this.values[name] ?? "") !== "");
    return Object.fromEntries(given.map((name) => [name, Number(this.values[name])]));
  }

  show() {
    document.documentElement.dataset.theme = this.values.theme || "auto";
  }
}
