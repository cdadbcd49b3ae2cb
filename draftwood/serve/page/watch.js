// The panel beside the conversation: gauges, the tree of a round, and how rounds went.
import { hue, make, seen } from "./answer.js";
import { bars, draw, table } from "./tree.js";

const at = (id) => document.getElementById(id);
const rate = (value) => (value ? value.toFixed(1) : "–");

export class Watch {
  measured = 0; // plain decoding's tokens per second in the last race
  #answer = null;
  #at = null; // the round that is looked at; null: the latest
  #asked = false;

  constructor() {
    at("round").addEventListener("input", (event) => {
      const chosen = event.target.valueAsNumber - 1;
      this.#look(chosen === this.#answer.rounds.length - 1 ? null : chosen);
    });
    at("list").addEventListener("toggle", () => this.draw());
  }

  /** Show an answer, and from now on its latest round. */
  follow(answer) {
    this.#answer = answer;
    at("round").disabled = !answer.last;
    this.#look(null);
  }

  /** Show one round of an answer. */
  look(answer, round) {
    this.#answer = answer;
    this.#look(round);
  }

  #look(round) {
    this.#at = round;
    this.draw();
  }

  /** Draw with the next picture of the screen, however many rounds come until then. */
  draw() {
    if (this.#asked || !this.#answer) return;
    this.#asked = true;
    requestAnimationFrame(() => {
      this.#asked = false;
      if (!this.#answer.last) return;
      const rounds = this.#answer.rounds, index = Math.min(this.#at ?? Infinity, rounds.length - 1);
      this.#speed();
      this.#tree(rounds, index);
      this.#rounds(rounds);
    });
  }

  #speed() {
    const { last } = this.#answer, plain = this.measured || this.#answer.plain;
    const top = Math.max(last.tokens_per_s, plain, 1e-9);
    at("plain-name").textContent = this.measured ? "plain, last race" : "plain, estimated";
    at("speed-name").textContent = last.policy;
    at("speed").textContent = rate(last.tokens_per_s);
    at("plain").textContent = rate(plain);
    at("ratio").textContent = plain ? `${(last.tokens_per_s / plain).toFixed(2)} ×` : "–";
    at("speed-bar").style.width = `${(100 * last.tokens_per_s) / top}%`;
    at("plain-bar").style.width = `${(100 * plain) / top}%`;
  }

  #tree(rounds, index) {
    const round = rounds[index], scrub = at("round");
    draw(at("tree"), round);
    at("tree-note").textContent = round.width > 1
      ? `${round.width - 1} drafted, ${round.tree.accepted.length} accepted`
      : "nothing drafted: a plain step";
    at("round-name").textContent = `Round ${index + 1} of ${rounds.length}`;
    Object.assign(scrub, { max: rounds.length, value: index + 1, disabled: false });
    if (at("list").open) at("list").lastElementChild.replaceChildren(table(round));
    for (const marked of document.querySelectorAll(".looked")) marked.classList.remove("looked");
    if (this.#at !== null) {
      for (const token of this.#answer.place.querySelectorAll(`[data-round="${index}"]`)) token.classList.add("looked");
    }
    this.#legend();
  }

  #legend() {
    if (at("legend").childElementCount === seen().length + 1) return;
    const entries = seen().map((drafter) => {
      const entry = make("li"), swatch = make("span", "draft", drafter);
      swatch.dataset.hue = hue(drafter);
      entry.append(swatch);
      return entry;
    });
    at("legend").replaceChildren(...entries, make("li", "bonus", "the model's own"));
  }

  #rounds(rounds) {
    at("tau").textContent = rounds.at(-1).tau.toFixed(2);
    at("width").textContent = rounds.at(-1).width;
    bars(at("tau-chart"), rounds.map((round) => round.pieces.length), rounds.map((round) => round.tau));
    bars(at("width-chart"), rounds.map((round) => round.width));
  }
}
