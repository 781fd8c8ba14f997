// The whole server: the line of figures at the top, its charts, and transfers between instances.

const LINKS = { metrics: "Metrics", docs: "API" };
const FIGURES = {
  model: ["Model", "The names that requests give as their model."],
  dtype: ["Dtype", "The dtype in which the first model computes."],
  in: ["Tokens/s in", HELP.tokensIn],
  out: ["Tokens/s out", HELP.tokensOut],
  running: ["Running", HELP.running],
  waiting: ["Waiting", HELP.waiting],
  ttft: ["TTFT p50", "Median time to first token of the last three minutes, from arrival on."],
  tpot: ["TPOT p50", "Median time per further output token of the last three minutes."],
  memory: ["Memory, at most", "The most memory that all processes take, by their contract."],
};

class ServerView {
  constructor() {
    this.values = new Map();
    this.tokens = new Timeline("Tokens per second", rate);
    this.requests = new Timeline("Requests", (value) => value.toLocaleString("en"));
    byId("charts").append(this.tokens.figure, this.requests.figure);
    this.links = [];
    this.lines = [];
  }

  show(snapshot, history) {
    const { server } = snapshot;
    if (server !== null) this.figures(server);
    const end = snapshot.at_seconds;
    const series = (id, label, points, help, line) => (
      { id, label, points, colour: colours.ink, line, help });
    this.tokens.show(end, [
      series("out", "out", history.rates("output_tokens"), HELP.tokensOut, "solid"),
      series("in", "in", history.rates("prompt_tokens"), HELP.tokensIn, "dashed"),
    ], colours);
    this.requests.show(end, ["running", "waiting"].map((name, i) => series(
      name, name, history.points((row) => row[name]), HELP[name], i ? "dashed" : "solid")), colours);
    this.between(snapshot);
  }

  figures(server) {
    const values = {
      model: server.models.join(", "),
      dtype: server.dtype,
      in: rate(server.prompt_tokens_per_second),
      out: rate(server.output_tokens_per_second),
      running: server.running.toLocaleString("en"),
      waiting: server.waiting.toLocaleString("en"),
      ttft: seconds(server.ttft_p50_seconds),
      tpot: seconds(server.tpot_p50_seconds),
      memory: server.contract_bytes ? bytes(server.contract_bytes) : "",
    };
    for (const [name, [label, help]] of Object.entries(FIGURES)) {
      if (!this.values.has(name)) {
        const value = element("dd");
        value.dataset.figure = name;
        const box = element("div", { title: help }, element("dt", { textContent: label }), value);
        byId("figures").append(box);
        this.values.set(name, { box, value });
      }
      const { box, value } = this.values.get(name);
      setText(value, values[name]);
      value.title = values[name];
      box.hidden = !values[name];
    }
    if (this.links.join() !== server.links.join()) {
      this.links = server.links;
      byId("links").replaceChildren(...this.links.filter((link) => link in LINKS).map(
        (link) => element("a", { href: link, textContent: LINKS[link] })));
    }
  }

  // Loans, and transfers that run or ran: nothing of the kind can be on a server of one instance.
  between(snapshot) {
    byId("between").hidden = snapshot.instances.length < 2;
    const loans = snapshot.instances.flatMap((lender) => lender.loans.lends.map((loan) => (
      `${lender.id} lends ${loan.sections} to ${loan.peer}`
      + ` (sections of ${count(loan.requests, "request")})`)));
    const lines = [...loans, ...snapshot.transfers.map(transferText)];
    if (!lines.length) lines.push("no loans, moves or pulls in the last three minutes");
    if (lines.join("\n") === this.lines.join("\n")) return;
    this.lines = lines;
    byId("between-list").replaceChildren(
      ...lines.map((line) => element("li", { textContent: line })));
  }
}

const TRANSFERS = {
  handover: ["request", "requests", "being handed over", "handed over"],
  move: ["request", "requests", "moving now", "moved"],
  pull: ["prefix", "prefixes", "pulled now", "pulled"],
  loan: ["section", "sections", "lent now", "lent"],
};

function transferText(transfer) {
  const { kind, source, target, running, recent } = transfer;
  const [noun, nouns, during, past] = TRANSFERS[kind];
  const parts = [
    running ? `${count(running, noun, nouns)} ${during}` : "",
    recent ? `${count(recent, noun, nouns)} ${past} in the last three minutes` : "",
  ];
  return `${source} → ${target}: ${parts.filter(Boolean).join(", ")}`;
}
