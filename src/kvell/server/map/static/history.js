// The last three minutes, which the server keeps: a row for each second.

const WINDOW_SECONDS = 180;
const RATE_SECONDS = 10; // as the line at the top

class History {
  constructor() { this.rows = []; }

  get after() { return this.rows.at(-1)?.at_seconds ?? 0; }

  add(answer) {
    if (answer.at_seconds < this.after) this.rows = []; // the server has started again
    const named = (fields, values) => Object.fromEntries(fields.map((name, i) => [name, values[i]]));
    for (const values of answer.rows) {
      const row = named(answer.fields, values);
      for (const [id, sample] of Object.entries(row.instances)) {
        row.instances[id] = named(answer.instance_fields, sample);
      }
      if (row.at_seconds > this.after) this.rows.push(row);
    }
    while (this.rows.length && this.rows[0].at_seconds < answer.at_seconds - WINDOW_SECONDS) {
      this.rows.shift();
    }
  }

  // Points [seconds, value or null] of a figure of each row.
  points(read) {
    return this.rows.map((row) => [row.at_seconds, read(row) ?? null]);
  }

  // The growth of a counter per second, averaged over a few seconds.
  rates(name) {
    let first = 0;
    return this.rows.map((row, i) => {
      while (row.at_seconds - this.rows[first].at_seconds > RATE_SECONDS && first < i - 1) first += 1;
      const [span, growth] = ["at_seconds", name].map((key) => row[key] - this.rows[first][key]);
      return [row.at_seconds, span > 0 && growth >= 0 ? growth / span : null];
    });
  }
}
