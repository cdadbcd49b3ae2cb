// The server as the page sees it: JSON, streams of events, and whether it answers at all.

/** The server said no, and why. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Nobody answers, or an answer broke off. */
export class Unreachable extends Error {}

const KEY = "draftwood-key";
let key = kept(() => sessionStorage.getItem(KEY));

export function keepKey(given) {
  key = given;
  kept(() => sessionStorage.setItem(KEY, given));
}

/** What the browser keeps, if the user lets it keep anything: without that a key lasts as long as the page. */
function kept(ask) {
  try {
    return ask();
  } catch {
    return null;
  }
}

/** Header values are bytes: a key goes out in UTF-8, as the server compares it. */
const bearer = (key) => `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;

/** Errors of the network become Unreachable; what we ended ourselves stays an AbortError. */
const network = (error) => {
  throw error.name === "AbortError" ? error : new Unreachable("The server does not answer.");
};

async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: bearer(key) }) };
  const answer = await fetch(path, { ...options, headers }).catch(network);
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Refused(answer.status, told?.error?.message ?? `The server answers with status ${answer.status}.`);
}

/** What is served: id, drafter, policy, policies … */
export const model = async () => (await (await call("v1/models", soon())).json()).data[0];

export const alive = () => fetch("health", soon()).then((answer) => answer.ok, () => false);

/** For what needs no model: a server that takes longer is not there. */
const soon = () => ({ signal: AbortSignal.timeout(5000) });

/** The chunks of a chat completion, each with what its round did (docs/serve.md, "Watching rounds"). */
export async function* chat(asked, signal) {
  const body = JSON.stringify({ ...asked, stream: true, stream_options: { include_draftwood: true } });
  const headers = { "Content-Type": "application/json" };
  const answer = await call("v1/chat/completions", { method: "POST", headers, body, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read().catch(network);
    if (done) throw new Unreachable("The server broke off.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new Refused(500, told.error.message);
      yield told;
    }
  }
}
