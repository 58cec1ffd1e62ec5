// Lines above the conversation: what is away, and what one should know of the model that answers.

import { make } from "./markdown.js";
import { Refusal } from "./stream.js";

const LOCAL_MODEL = "local";
const KEPT = "dualclaw-knows-local-model";

export class Notices {
  constructor(element) {
    this.element = element;
    this.away = make("p", "notice away");
    this.away.setAttribute("role", "alert");
    this.small = make("div", "notice");
    const text = make("p");
    text.append(
      make("strong", "", "Small local model."), " It ships with the engine and is often wrong. For a better one, restart with ",
      make("code", "", "DUALCLAW_MODEL=openai:gpt-4o-mini OPENAI_API_KEY=\u2026 make run"), " or another provider.",
    );
    const known = make("button", "known", "Got it");
    known.type = "button";
    known.addEventListener("click", () => { remember(); this.small.remove(); });
    this.small.append(text, known);
  }

  // Tells what cannot be reached, in words that are true for it; null: all can.
  tellAway(error) {
    if (!error) {
      this.away.remove();
      return;
    }
    const [what, more] = error instanceof TypeError
      ? ["The gateway cannot be reached.", "Is dualclaw-web running, and are you online?"]
      : error instanceof Refusal && error.engineIsAway
        ? ["The engine cannot be reached.", "Is dualclaw-server running? Nothing is lost;"]
        : ["The engine has trouble.", `${error.message.replace(/[.]?$/, ".")} Nothing is lost;`];
    const words = `${what} ${more} This page goes on by itself.`.replace("; This", "; this");
    // Set again, the same words would be read aloud again.
    if (this.away.textContent !== words) this.away.replaceChildren(make("strong", "", what), words.slice(what.length));
    if (!this.away.isConnected) this.element.prepend(this.away);
  }

  // Tells that the agent's answers come from the small model that ships, until somebody has said that they know.
  tellModels(models) {
    if (models.includes(LOCAL_MODEL) && !isKnown()) this.element.append(this.small);
    else this.small.remove();
  }
}

function isKnown() {
  try {
    return localStorage.getItem(KEPT) === "yes";
  } catch {
    return false;   // storage may be forbidden
  }
}

function remember() {
  try {
    localStorage.setItem(KEPT, "yes");
  } catch { /* it will be told again */ }
}
