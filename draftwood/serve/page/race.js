// Plain decoding against a policy on the same prompt: one after the other, then both replayed side by side.
import { Answer, make } from "./answer.js";

const PLAIN = "autoregressive";

class Lane {
  constructor(title) {
    this.box = make("section", "lane");
    this.box.setAttribute("aria-label", title);
    this.speed = make("span", "speed", "waits");
    this.bar = make("i");
    const head = make("h3", "", title), track = make("span", "bar"), place = make("p", "tokens");
    head.append(this.speed);
    track.append(this.bar);
    this.box.append(head, track, place);
    this.answer = new Answer(place);
  }

  /** What was reached, once it is known. */
  get rate() {
    return this.answer.last?.tokens_per_s ?? 0;
  }

  tell(top = this.rate) {
    this.speed.textContent = this.rate ? `${this.rate.toFixed(1)} tokens/s` : "reads the prompt";
    this.bar.style.width = `${top && (100 * this.rate) / top}%`;
  }

  /** Show the tokens of the rounds that were done after so many seconds. Returns whether that is all. */
  show(seconds) {
    let done = 0;
    for (const round of this.answer.rounds) {
      if ((seconds -= round.seconds) < 0) break;
      done += 1;
    }
    for (const token of this.answer.place.children) token.hidden = token.dataset.round >= done;
    return done === this.answer.rounds.length;
  }
}

/** A race on the page. Who drafts runs first, so that it cannot have learned from the other's text. */
export class Race {
  #drafts;
  #plain = new Lane("plain decoding");
  #note = make("p", "note", "One after the other, so that neither slows the other. Same seed; reading the prompt is not counted.");

  constructor(place, policy) {
    this.policy = policy;
    this.#drafts = new Lane(policy);
    const grid = make("div", "lanes");
    grid.append(this.#plain.box, this.#drafts.box);
    place.append(grid, this.#note);
  }

  /** The one that goes into the conversation. */
  get answer() {
    return this.#drafts.answer;
  }

  /** Tokens per second of plain decoding; 0 until it has run. */
  get plain() {
    return this.#plain.rate;
  }

  /** `write` streams an answer under a policy and calls back after each chunk. */
  async run(write) {
    for (const [lane, policy] of [[this.#drafts, this.policy], [this.#plain, PLAIN]]) {
      lane.tell();
      await write(lane.answer, policy, () => lane.tell());
    }
    this.#note.replaceWith(verdict(this.#drafts, this.#plain), replay([this.#plain, this.#drafts]));
  }
}

function verdict(drafts, plain) {
  for (const lane of [drafts, plain]) lane.tell(Math.max(drafts.rate, plain.rate));
  const times = plain.rate && drafts.rate / plain.rate;
  const same = drafts.answer.text === plain.answer.text
    ? "Both texts are the same."
    : "The texts differ: a near tie of two tokens fell the other way (docs/exactness.md).";
  const made = make("p", "verdict");
  const learned = "Drafters that learn from texts remember earlier answers: what was asked before is easier for them.";
  made.append(make("b", "", `${times.toFixed(2)} ×`), ` plain decoding, measured one after the other. ${same}`);
  made.append(make("span", "note", ` ${learned}`));
  return made;
}

function replay(lanes) {
  const button = make("button", "quiet", "Replay side by side");
  button.type = "button";
  button.addEventListener("click", () => {
    button.disabled = true;
    const start = performance.now();
    const step = (now) => {
      const done = lanes.map((lane) => lane.show((now - start) / 1000));
      if (done.every(Boolean)) button.disabled = false;
      else requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  });
  return button;
}
