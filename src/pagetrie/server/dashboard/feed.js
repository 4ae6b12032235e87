// Where frames come from: server-sent events over fetch, which can send a key as EventSource can't.

const STORED = "pagetrie-key"; // kept until the tab is closed
const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 15000;

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => (value ? sessionStorage.setItem(STORED, value) : sessionStorage.removeItem(STORED)),
};

/** A refusal that trying again doesn't mend. */
export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }

  get wantsKey() {
    return this.status === 401 || this.code === "insufficient_permissions" || this.code === "invalid_api_key";
  }
}

/** Ask the server, with the key if there is one. Throws Refused for 4xx, Error for all else that isn't an answer. */
export async function ask(path, signal) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  const response = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({ error: {} }));
  const message = error.message ?? `the server answered ${response.status}`;
  if (response.status < 500 && response.status !== 429) throw new Refused(response.status, error.code, message);
  throw new Error(message);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

/** Calls back with frames while the page is seen; opens the stream anew when it breaks. */
export class Feed {
  constructor({ onFrame, onTrouble, onRefused }) {
    this.on = { onFrame, onTrouble, onRefused };
    this.stop = new AbortController();
    this.paused = false;
    document.addEventListener("visibilitychange", () => this.open());
  }

  pause(paused) {
    this.paused = paused;
    this.open();
  }

  async open() {
    this.stop.abort();
    const stop = new AbortController();
    this.stop = stop;
    if (document.hidden || this.paused) return; // then the server does nothing for this page
    for (let pause = FIRST_PAUSE; !stop.signal.aborted; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
      try {
        for await (const news of events(await ask("/v1/admin/live/events", stop.signal))) {
          if (stop.signal.aborted) return;
          if (news.error?.code === "invalid_api_key") throw new Refused(401, news.error.code, news.error.message);
          if (news.error) throw new Error(news.error.message);
          pause = FIRST_PAUSE / 2;
          this.on.onFrame(news);
        }
        throw new Error("the stream ended");
      } catch (error) {
        if (stop.signal.aborted) return;
        if (error instanceof Refused) {
          this.on.onRefused(error);
          return;
        }
        this.on.onTrouble(error);
      }
      await new Promise((wake) => {
        setTimeout(wake, pause);
        stop.signal.addEventListener("abort", wake, { once: true });
      });
    }
  }
}
