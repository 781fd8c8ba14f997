// The page: asks for figures twice a second while somebody sees it, and shows them.

const IS_CALM = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
const POLL_MILLISECONDS = IS_CALM ? 2000 : 500;

class MemoryMap {
  constructor() {
    this.views = new Map();
    this.paused = false;
    this.polls = 0;
    this.latest = null;
    this.history = new History();
    this.server = new ServerView();
    byId("pause").addEventListener("click", () => this.pause(!this.paused));
    byId("access").addEventListener("submit", (event) => this.unlock(event));
    window.addEventListener("resize", () => this.redraw());
    const scheme = window.matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", () => this.redraw());
    this.run();
  }

  async run() {
    for (;;) {
      if (!this.paused && !document.hidden) await this.poll();
      await new Promise((wake) => { setTimeout(wake, POLL_MILLISECONDS); });
    }
  }

  async poll() {
    try {
      const snapshot = await ask("debug/pages");
      this.history.add(await ask(`debug/history?after=${this.history.after}`));
      this.show(snapshot);
      this.polls += 1;
      byId("access").hidden = true;
      const looks = 1000 / POLL_MILLISECONDS;
      this.say(`live: ${count(this.views.size, "instance")}, ${looks} looks a second`);
    } catch (error) {
      this.say(`not live: ${error.message}`);
    }
  }

  show(snapshot) {
    this.latest = snapshot;
    const { instances, requests } = snapshot;
    const ids = instances.map((instance) => instance.id);
    for (const [id, view] of this.views) {
      if (!ids.includes(id)) {
        view.section.remove();
        this.views.delete(id);
      }
    }
    this.server.show(snapshot, this.history);
    const lends = instances.length > 1
      && instances.some((instance) => instance.loans.section_bytes > 0);
    for (const instance of instances) {
      this.view(instance.id).show(instance, snapshot.at_seconds, this.history, lends);
    }
    setText(byId("requests-count"), `${requests.running} at instances, `
      + `${requests.waiting} waiting for one`);
    const idle = requests.idle_wait;
    byId("idle-wait").hidden = idle === null;
    if (idle !== null) {
      setText(byId("idle-wait"), `${count(idle.requests, "request")} wait although every `
        + `instance is idle: ${idle.why}`);
    }
    fillRequests(byId("requests"), requests);
  }

  view(id) {
    if (!this.views.has(id)) {
      this.views.set(id, new InstanceView(id));
      byId("instances").append(this.views.get(id).section);
    }
    return this.views.get(id);
  }

  redraw() {
    colours = new Colours();
    if (this.latest !== null) this.show(this.latest);
  }

  pause(paused) {
    this.paused = paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    this.say(paused ? "paused" : "live");
  }

  say(text) {
    if (byId("status").textContent !== text) byId("status").textContent = text;
  }

  unlock(event) {
    event.preventDefault();
    key = byId("key").value;
    byId("key").value = "";
    this.poll();
  }

  // For tests in a browser: what is shown, in numbers.
  counts() {
    const shown = [...this.views].map(([id, view]) => [id, view.columns?.tally() ?? null]);
    return Object.fromEntries(shown);
  }
}

window.kvellMap = new MemoryMap();
