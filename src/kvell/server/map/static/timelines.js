// What happened in the last three minutes, drawn as lines.

const WINDOW_SECONDS = 180;

// Rows of numbers by time, no older than the window.
class History {
  constructor() { this.rows = []; }

  add(at, values) {
    const last = this.rows.at(-1);
    if (last && at < last.at) this.rows = []; // the server has started again
    this.rows.push({ at, values });
    while (this.rows[0].at < at - WINDOW_SECONDS) this.rows.shift();
  }

  // How much each counter has grown within the window.
  growth() {
    if (!this.rows.length) return {};
    const [first, last] = [this.rows[0].values, this.rows.at(-1).values];
    return Object.fromEntries(
      Object.entries(last).map(([name, value]) => [name, Math.max(0, value - (first[name] ?? 0))]));
  }
}

// One chart; a line is {name, colour, read}, where read takes a row's values, or gives null.
class Timeline {
  constructor(title, describe) {
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.legend = element("div", { className: "legend" });
    this.legend.setAttribute("role", "list");
    this.title = title;
    this.describe = describe;
    this.top = element("span");
    const axis = element("div", { className: "axis quiet" },
      element("span", { textContent: "−3 min" }), this.top, element("span", { textContent: "now" }));
    this.figure = element("figure", {},
      element("figcaption", { textContent: title }), this.canvas, axis, this.legend);
  }

  show(rows, lines, colours) {
    const [width, height] = [this.canvas.clientWidth, 84];
    if (!rows.length || !width) return;
    const told = lines.map((line) => (
      { ...line, points: rows.map((row) => [row.at, line.read(row.values)]) }));
    const values = told.flatMap((line) => line.points.map((point) => point[1]));
    const top = values.reduce((most, value) => Math.max(most, value ?? 0), 1);
    const context = sharp(this.canvas, width, height);
    const end = rows.at(-1).at;
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    for (let minute = 0; minute * 60 <= WINDOW_SECONDS; minute += 1) {
      const x = width * (1 - (minute * 60) / WINDOW_SECONDS);
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height);
      context.stroke();
    }
    this.top.textContent = top > 1 ? `top: ${this.describe(top)}` : "";
    for (const line of told) this.line(context, line, { width, height, end, top });
    this.legend.replaceChildren(...told.map((line) => swatch(
      `${line.name}: ${this.describe(line.points.at(-1)[1])}`, line.colour)));
    this.canvas.setAttribute("aria-label", `${this.title}, last three minutes; now ${told
      .map((line) => `${line.name} ${this.describe(line.points.at(-1)[1])}`).join(", ")}`);
  }

  line(context, line, box) {
    context.strokeStyle = line.colour;
    context.lineWidth = 1.75;
    context.setLineDash(line.dash ?? []);
    context.beginPath();
    for (const [at, value] of line.points) {
      if (value === null) continue;
      const x = box.width * (1 - (box.end - at) / WINDOW_SECONDS);
      context.lineTo(x, (box.height - 3) * (1 - value / box.top) + 1.5);
    }
    context.stroke();
    context.setLineDash([]);
  }
}
