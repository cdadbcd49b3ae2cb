// The conversation: what was typed goes to the server, and what comes back goes to the page.
import { Answer, brief, make } from "./answer.js";
import { Race } from "./race.js";
import * as server from "./server.js";
import { Watch } from "./watch.js";

const at = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const watch = new Watch();
const answers = new WeakMap(); // by the element that holds their tokens

let card = null; // what is served
let messages = [];
let running = null; // ends the answer that is being written
let away = false;

// --- the server ------------------------------------------------------------------------------------------------

/** Learn what is served, with a key if one is needed. */
async function greet() {
  try {
    card = await server.model();
  } catch (error) {
    if (error.status !== 401) return leave(error);
    await askForKey();
    return greet();
  }
  const drafters = card.drafter?.split("+").map(brief).join(", ");
  at("model").textContent = [brief(card.id), drafters ? `drafted by ${drafters}` : "no drafter"].join(" · ");
  at("policy").placeholder = card.policy;
  at("policies").replaceChildren(...card.policies.map((name) => Object.assign(make("option"), { value: name })));
  tell("Ready");
}

function askForKey() {
  const door = at("door");
  if (at("key").value) at("door-note").textContent = "That key is not the right one.";
  door.showModal();
  return new Promise((done) => door.addEventListener("close", () => done(server.keepKey(at("key").value.trim())), { once: true }));
}

function leave(error) {
  const told = `${error.message} Trying again every second; what was written stays here.`;
  away = true;
  if (at("alert").textContent !== told) at("alert").textContent = told; // read out once
  at("alert").hidden = false;
  tell("No connection");
}

async function keepInTouch() {
  for (;;) {
    await sleep(away ? 1000 : 3000);
    if (document.hidden) continue;
    const there = await server.alive();
    if (there && away) await comeBack();
    if (!there && !away) leave(new server.Unreachable("The server does not answer."));
  }
}

async function comeBack() {
  away = false;
  if (!running) await greet();
  if (away) return;
  at("alert").hidden = true;
  tell(running ? "Writing" : "The server is back");
}

// --- what is shown around an answer ------------------------------------------------------------------------------

/** The line that screen readers are told, and which buttons there are. */
function tell(status) {
  at("status").textContent = status;
  at("status").className = away ? "away" : running ? "busy" : "";
  at("log").ariaBusy = Boolean(running); // texts are read out when they are whole
  at("stop").hidden = !running;
  at("send").hidden = Boolean(running);
  for (const id of ["race", "new", "send"]) at(id).disabled = Boolean(running) || away || !card;
}

/** Scroll with the text unless the reader is elsewhere. */
function add(change) {
  const log = at("log"), below = log.scrollHeight - log.scrollTop - log.clientHeight;
  change();
  if (below < 80) log.scrollTop = log.scrollHeight;
}

function bubble(text) {
  at("intro").hidden = true;
  const asked = make("p", "asked", text), box = make("article", "turn");
  asked.prepend(make("span", "hidden", "You: "));
  box.append(asked);
  add(() => at("log").append(box));
  at("log").scrollTop = at("log").scrollHeight;
  return box;
}

// --- turns -------------------------------------------------------------------------------------------------------

const settings = () => ({
  temperature: at("temperature").valueAsNumber,
  max_tokens: at("length").valueAsNumber,
  seed: crypto.getRandomValues(new Uint32Array(1))[0],
});

async function take(racing) {
  const text = at("message").value.trim();
  if (!text || running || away || !card || !at("composer").reportValidity()) return;
  at("message").value = "";
  running = new AbortController();
  tell(racing ? "Racing" : "Writing");
  messages.push({ role: "user", content: text });
  const box = bubble(text), policy = at("policy").value.trim() || card.policy;
  const place = make("p", "tokens"), race = racing && new Race(box, policy);
  const answer = race ? race.answer : new Answer(place);
  const write = writer({ model: card.id, messages: [...messages], ...settings() });
  if (!race) box.append(place);
  const error = await (race ? race.run(write) : write(answer, policy)).catch((error) => error);
  running = null;
  if (race && !error) watch.measured = race.plain;
  add(() => box.append(make("p", "note", answer.tokens ? answer.summary : "Nothing was written.")));
  close(box, text, answer, error);
  watch.follow(answer);
  const pressed = [document.body, at("send"), at("stop"), at("race")]; // who is elsewhere by now stays there
  if (pressed.includes(document.activeElement)) at("message").focus({ preventScroll: true });
}

/** How answers to one request are written: streamed under a policy, `changed` after each chunk. */
const writer = (asked) => async (answer, policy, changed = () => {}) => {
  answers.set(answer.place, answer);
  answer.place.tabIndex = 0; // Enter shows its rounds
  watch.follow(answer);
  for await (const chunk of server.chat({ ...asked, policy }, running.signal)) {
    add(() => answer.push(chunk));
    watch.draw();
    changed();
  }
};

/** Keep what was written; say what went wrong, if anything did. */
function close(box, text, answer, error) {
  if (answer.text) {
    messages.push({ role: "assistant", content: answer.text });
  } else {
    messages.pop();
    at("message").value ||= text;
  }
  if (!error) return tell("Done");
  if (error.name === "AbortError") {
    add(() => box.append(make("p", "note", "Stopped.")));
    return tell("Stopped");
  }
  const note = make("p", "error", error.message);
  note.setAttribute("role", "alert");
  add(() => box.append(note));
  tell("Failed");
  if (error instanceof server.Unreachable) leave(error);
  if (error.status === 401) greet();
}

// --- wiring --------------------------------------------------------------------------------------------------------

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  take(false);
});
at("race").addEventListener("click", () => take(true));
at("stop").addEventListener("click", () => running.abort());
// A key that an input method takes. Safari ends the composition before the Enter that ends it, and tells by the code alone.
function composes(event) {
  return event.isComposing || event.keyCode === 229;
}
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || composes(event)) return;
  event.preventDefault();
  take(false);
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !composes(event)) running?.abort();
});
at("new").addEventListener("click", () => {
  messages = [];
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  at("intro").hidden = false;
  at("message").focus();
});
at("ideas").addEventListener("click", ({ target }) => {
  if (target.tagName !== "BUTTON") return;
  at("message").value = target.textContent;
  at("message").focus();
});
at("log").addEventListener("click", ({ target }) => {
  const answer = answers.get(target.parentElement);
  if (answer?.rounds.length && target.dataset.round) watch.look(answer, Number(target.dataset.round));
});
at("log").addEventListener("keydown", ({ key, target }) => {
  if (key === "Enter" && answers.has(target)) watch.follow(answers.get(target));
});

tell("Connecting");
greet();
keepInTouch();
