// A figure of the last three minutes, drawn as lines or as areas one above the other.

const CHART_HEIGHT = 84;
const GAP_SECONDS = 5;

class Timeline {
  constructor(title, describe) {
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.title = title;
    this.describe = (value) => (value === null ? "–" : describe(value));
    this.top = element("span");
    const axis = element("div", { className: "axis quiet" },
      element("span", { textContent: "−3 min" }), this.top, element("span", { textContent: "now" }));
    const legend = element("div", { className: "legend" });
    this.legend = new Legend(legend);
    this.figure = element("figure", {},
      element("figcaption", { textContent: title }), this.canvas, axis, legend);
  }

  // Series are {id, label, points, colour, line, help}.  Those without a line are areas, and each
  // is drawn above the one before.  A figure without series is hidden.
  show(end, series, colours, least = 1) {
    this.figure.hidden = !series.length;
    const width = this.canvas.clientWidth;
    if (!series.length || !width) return;
    const drawn = this.stacked(series);
    const values = drawn.flatMap((each) => each.points.map((point) => point[1] ?? 0));
    const top = Math.max(least, ...values);
    const box = { width, height: CHART_HEIGHT, end, top };
    const context = sharp(this.canvas, width, CHART_HEIGHT);
    this.minutes(context, box, colours);
    for (const each of drawn.toReversed()) this.draw(context, each, box);
    setText(this.top, top > 1 ? `top: ${this.describe(top)}` : "");
    const labels = series.map((each) => (
      `${each.label}: ${this.describe(each.points.at(-1)?.[1] ?? null)}`));
    this.legend.show(series.map((each, i) => ({ ...each, label: labels[i] })));
    this.canvas.setAttribute(
      "aria-label", `${this.title}, last three minutes; now ${labels.join(", ")}`);
  }

  stacked(series) {
    const below = new Map();
    return series.map((each) => {
      if (each.line) return each;
      const points = each.points.map(([at, value]) => {
        const sum = value === null ? null : value + (below.get(at) ?? 0);
        if (sum !== null) below.set(at, sum);
        return [at, sum];
      });
      return { ...each, points };
    });
  }

  minutes(context, box, colours) {
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    for (let minute = 0; minute * 60 <= WINDOW_SECONDS; minute += 1) {
      const x = box.width * (1 - (minute * 60) / WINDOW_SECONDS);
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, box.height);
      context.stroke();
    }
  }

  draw(context, series, box) {
    const place = ([at, value]) => [
      box.width * (1 - (box.end - at) / WINDOW_SECONDS),
      (box.height - 3) * (1 - value / box.top) + 1.5,
    ];
    context.strokeStyle = series.colour;
    context.fillStyle = series.colour;
    context.lineWidth = 1.75;
    context.setLineDash(series.line === "dashed" ? [5, 3] : []);
    for (const run of this.runs(series.points)) {
      const places = run.map(place);
      if (places.length === 1) places.push([places[0][0] + 2, places[0][1]]);
      context.beginPath();
      for (const [x, y] of places) context.lineTo(x, y);
      if (series.line) {
        context.stroke();
      } else {
        context.lineTo(places.at(-1)[0], box.height);
        context.lineTo(places[0][0], box.height);
        context.fill();
      }
    }
    context.setLineDash([]);
  }

  // The points without gaps: nothing is drawn across a time of which nothing is known.
  runs(points) {
    const runs = [];
    let last = null;
    for (const point of points) {
      if (point[1] === null) {
        last = null;
      } else {
        if (last === null || point[0] - last > GAP_SECONDS) runs.push([]);
        runs.at(-1).push(point);
        [last] = point;
      }
    }
    return runs;
  }
}
