// One answer on its way: its tokens on the page, marked by who they are from, and the rounds that wrote them.

/** An element with a class and a text. */
export function make(tag, name = "", text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

/** A model's name without the folder or the owner. */
export const brief = (name) => name.split("/").pop();

const HUES = 4; // in style.css
const drafters = []; // seen so far: each keeps its colour

/** The number of a drafter's colour. */
export function hue(drafter) {
  const name = brief(drafter);
  if (!drafters.includes(name)) drafters.push(name);
  return drafters.indexOf(name) % HUES;
}

export const seen = () => drafters;

export class Answer {
  /** `place` gets the tokens. */
  constructor(place) {
    this.place = place;
    this.text = "";
    this.tokens = 0;
    this.rounds = []; // the `draftwood` of each round that verified something
    this.finish = null;
  }

  push(chunk) {
    const { delta, finish_reason } = chunk.choices[0];
    this.text += delta.content ?? "";
    this.finish = finish_reason;
    if (!chunk.draftwood) return;
    const verified = chunk.draftwood.tree; // the token that ends the prompt belongs to no round
    if (verified) this.rounds.push({ ...chunk.draftwood, ends: finish_reason === "stop" });
    for (const piece of chunk.draftwood.pieces) {
      const token = this.#write(piece);
      if (verified) token.dataset.round = this.rounds.length - 1;
    }
  }

  #write(piece) {
    this.tokens += 1;
    const token = make("span", piece.origin, piece.text);
    token.title = "the model's own";
    if (piece.origin === "draft") {
      token.dataset.hue = hue(piece.drafter);
      token.style.setProperty("--depth", piece.depth);
      token.title = `drafted by ${brief(piece.drafter)}, depth ${piece.depth}`;
    }
    this.place.append(token);
    return token;
  }

  get last() {
    return this.rounds.at(-1);
  }

  /** Seconds that the rounds took: the prompt is not in them. */
  get seconds() {
    return this.rounds.reduce((sum, round) => sum + round.seconds, 0);
  }

  /** What the server expected plain decoding to reach in the same places, in tokens per second. */
  get plain() {
    const expected = this.rounds.map((round) => round.plain_s).filter(Boolean);
    return expected.length && expected.length / expected.reduce((sum, s) => sum + s, 0);
  }

  /** `64 tokens · 58.1 tokens/s · τ 2.31 · bastion`. */
  get summary() {
    const ends = { length: "cut at max tokens" }[this.finish];
    const round = this.last;
    const rates = round ? [`${round.tokens_per_s.toFixed(1)} tokens/s`, `τ ${round.tau.toFixed(2)}`, round.policy] : [];
    return [`${this.tokens} tokens`, ...rates, ends].filter(Boolean).join(" · ");
  }
}
