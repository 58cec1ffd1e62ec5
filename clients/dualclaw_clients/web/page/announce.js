// What a screen reader is told while an answer is written: what begins and fails, what is asked, and the answer once,
// when it is complete. The log itself is no live region: it would read every token aloud.
//
// Words that come close together are said together, and the same words not twice in a row.

const PAUSE_MS = 1200;
const LONGEST = 1500;   // characters of an answer that are read by themselves; the rest is read where it stands

export class Announcer {
  constructor(element) {
    this.element = element;
    this.waiting = [];
    this.timer = 0;
  }

  say(text) {
    if (!text || this.waiting.at(-1) === text) return;
    this.waiting.push(text);
    if (!this.timer) this.timer = setTimeout(() => this.speak(), PAUSE_MS);
  }

  // Said instead of all that waits: a complete answer makes old news of it.
  sayNow(text) {
    clearTimeout(this.timer);
    this.waiting = [text.length > LONGEST ? `${text.slice(0, LONGEST)} … The answer goes on.` : text];
    this.speak();
  }

  hush() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.waiting = [];
  }

  speak() {
    this.timer = 0;
    this.element.textContent = this.waiting.splice(0).join(". ");
  }
}
